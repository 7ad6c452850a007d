#!/usr/bin/env python
"""Plan LoRAs of published image models for usual cards, without a GPU and without their weights.

    python scripts/plans/diffusion_cards.py -o docs/benchmarks/diffusion_cards.md

Each row is one plan, as `mpt plan @NAME` makes it; the networks are built from their shapes alone. A card is enough if
the total fits, with a chance of nine in ten (`mpt.planner.facts.verdict`), with what its driver keeps. Rows that were
planned are kept in a file beside the output until the table is whole, so that a second call continues; the page has the
rows that there are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from mpt.config.finding.shipped import find_shipped
from mpt.config.load import load_config
from mpt.errors import MptError
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import load_calibration
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.facts.verdict import sure_share
from scripts.command_line import described
from scripts.provenance import made

GPU = "rtx3060"
CARDS = (4, 6, 8, 10, 12, 16, 24, 32)
WITHOUT_DISPLAY_GIB = 0.2
"""Of a card, what its driver keeps: a card of 6 GB gives 5,929 MiB to programs."""
RECOMPUTED = "memory.recompute=all"
NF4 = "memory.low_bit_base=nf4"
FP8 = "memory.low_bit_base=fp8"
RECIPES: dict[str, tuple[str, ...]] = {
    "as it stands": (),
    "recomputed": (RECOMPUTED,),
    "fp8 base, recomputed": (RECOMPUTED, FP8),
    "NF4 base, recomputed": (RECOMPUTED, NF4),
    "NF4 base, recomputed, all frozen weights streamed": (
        RECOMPUTED,
        NF4,
        "memory.stream_weights=true",
    ),
}
CONFIGS = {
    "sd15_lora": "Stable Diffusion 1.5, 512 px",
    "sdxl_lora": "SDXL, 1024 px",
    "flux_lora": "Flux.1-dev, 512 px",
    "sd3_lora": "SD3 medium, 1024 px",
}
STREAMED = "memory.stream_weights"
PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "sdxl_lora": {
        "recomputed, 35 % of the blocks streamed": (RECOMPUTED, f"{STREAMED}=0.35"),
        "fp8 base, recomputed, 35 % of the blocks streamed": (RECOMPUTED, FP8, f"{STREAMED}=0.35"),
    },
    "flux_lora": {
        "fp8 base, recomputed, 35 % of the blocks streamed": (RECOMPUTED, FP8, f"{STREAMED}=0.35"),
        "fp8 base, recomputed, 50 % of the blocks streamed": (RECOMPUTED, FP8, f"{STREAMED}=0.5"),
        "NF4 base, recomputed, 35 % of the blocks streamed": (RECOMPUTED, NF4, f"{STREAMED}=0.35"),
    },
}
"""Further recipes of a configuration that is large."""
GENTLEST = (
    *("as it stands", "recomputed", "recomputed, 35 % of the blocks streamed"),
    "fp8 base, recomputed",
    *(f"fp8 base, recomputed, {part} % of the blocks streamed" for part in (35, 50)),
    "NF4 base, recomputed",
    "NF4 base, recomputed, 35 % of the blocks streamed",
    "NF4 base, recomputed, all frozen weights streamed",
)
"""The order in which a card's recipe is chosen: first what changes nothing, last what is slowest."""
BY_CARD = (6, 8, 10, 12, 16, 24)
FULL = ("memory=null", "precision=null")
FULL_RECIPES: dict[str, tuple[str, ...]] = {
    "full training, float32 weights, bf16 autocast": ("precision=bf16",),
}
PUBLISHED = """| Program | Published | Said of |
|---|---|---|
| SimpleTuner, Flux, rank 16 | 30 GB, 18 GB, 13 GB, 9 GB | bf16, int8, int4, NF4 base |
| sd-scripts, Flux | 24, 16, 12, 10, 8 GB cards | 0, any, 16, 22, 28 blocks to swap |
| diffusers' aMUSEd examples | 5.6 to 24.2 GB | 18 rows, [planned](diffusion_amused.md) |
"""


def plan(session: Session, config: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return the plan's figures, or why there is none."""
    try:
        found = session.plan([load_config(find_shipped(config), [*overrides])])[0].get()
    except MptError as error:
        return {"error": str(error)}
    weights = found.by_category["parameters"]
    return {
        "bytes": found.reserved + found.context_bytes,
        "parameters": weights,
        "step": found.step_seconds,
    }


def fits_card(needed_bytes: int, size: int) -> bool:
    """Return whether a plan is of the class that fits a card of that many GB."""
    return needed_bytes / 2**30 <= sure_share() * (size - WITHOUT_DISPLAY_GIB)


def smallest_card(needed_bytes: int) -> str:
    """Return the smallest usual card that it fits."""
    return next((f"{size} GB" for size in CARDS if fits_card(needed_bytes, size)), "none")


def row(label: str, recipe: str, found: dict[str, Any]) -> str:
    """Return a row of the table."""
    if "bytes" not in found:
        return f"| {label} | {recipe} | | | | {found['error'][:120]} |"
    weights, total = found["parameters"] / 2**30, found["bytes"] / 2**30
    return (
        f"| {label} | {recipe} | {weights:.2f} | {total:.2f} | {found['step']:.1f} | "
        f"{smallest_card(found['bytes'])} |"
    )


def main() -> None:
    """Plan every row, and write the page."""
    parser = described(__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    output = parser.parse_args().output
    kept = output.with_suffix(".rows.json")
    rows: dict[str, Any] = json.loads(kept.read_text("utf-8")) if kept.is_file() else {}
    wanted = [
        (name, label, recipe, words)
        for name, label in CONFIGS.items()
        for recipe, words in (RECIPES | PARTS.get(name, {})).items()
    ]
    wanted += [
        ("sdxl_lora", CONFIGS["sdxl_lora"], recipe, (*FULL, *words))
        for recipe, words in FULL_RECIPES.items()
    ]
    with Session(find_gpu(GPU), load_calibration(GPU)) as session:
        for name, _, recipe, words in wanted:
            if f"{name} {recipe}" not in rows:
                rows[f"{name} {recipe}"] = plan(session, name, words)
                kept.write_text(json.dumps(rows), "utf-8")
            there = [one for one in wanted if f"{one[0]} {one[2]}" in rows]
            lines = [
                row(label, recipe, rows[f"{config} {recipe}"]) for config, label, recipe, _ in there
            ]
            output.write_text(page(lines, by_card(rows)), "utf-8")
    kept.unlink()


def by_card(rows: dict[str, Any]) -> list[str]:
    """Return a row for each model and card: the gentlest recipe that fits, and what to add to the command."""
    lines = []
    for name, label in CONFIGS.items():
        chosen: dict[str, list[int]] = {}
        for size in BY_CARD:
            planned = {recipe: rows.get(f"{name} {recipe}", {}).get("bytes") for recipe in GENTLEST}
            fitting = (r for r, needed in planned.items() if needed and fits_card(needed, size))
            if (recipe := next(fitting, None)) is not None:
                chosen.setdefault(recipe, []).append(size)
        for recipe, sizes in chosen.items():
            words = " ".join((RECIPES | PARTS.get(name, {}))[recipe]) or "nothing"
            gib, cards = rows[f"{name} {recipe}"]["bytes"] / 2**30, ", ".join(map(str, sizes))
            lines.append(f"| {label} | {cards} | {recipe} | {gib:.2f} | `@{name}`: {words} |")
    return lines


def page(lines: list[str], cards: list[str]) -> str:
    """Return the page."""
    today = made()
    return "\n".join(
        [
            "# LoRAs of image models by card, planned",
            "",
            f"Written by `python scripts/plans/diffusion_cards.py`, {today}, torch {torch.__version__}. **Planned, not "
            "measured**: no GPU and no weights were used. Memory is in GiB for batch 1 on an "
            f"{GPU}, with the CUDA context; weights are those that are on the card throughout. A card is named by its "
            "GB and has to hold all of the total with a chance of nine in ten. The base is in bfloat16 if nothing else "
            "is said; a step is this card's, whether it has the memory or not.",
            "",
            "| Model | Recipe | Weights | Total | Step, s | Smallest card |",
            "|---|---|---:|---:|---:|---|",
            *lines,
            "",
            "## By card",
            "",
            "The gentlest of these recipes that fits with a chance of nine in ten ([chances](plan_chances.md)): first "
            "what changes nothing of the result (as it stands, recomputed, blocks streamed), then an fp8 base, then "
            "NF4. `mpt train @NAME` with what the last column adds.",
            "",
            "| Model | Cards, GB | Recipe | Total, GiB | Add |",
            "|---|---|---|---:|---|",
            *cards,
            "",
            "## Published by others",
            "",
            "At their own resolutions, targets and optimizers, so figures are near to each other at best:",
            "",
            PUBLISHED,
        ]
    )


if __name__ == "__main__":
    main()
