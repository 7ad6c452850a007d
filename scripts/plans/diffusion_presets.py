#!/usr/bin/env python
"""Presets by card of the LoRAs of SDXL and Flux, as files: what docs/benchmarks/diffusion_cards.md says "by card".

    python scripts/plans/diffusion_presets.py            # write files and their rows on the page of presets
    python scripts/plans/diffusion_presets.py --check    # fail if a file says something else

Nothing is planned here: figures are the table's, which `scripts/plans/diffusion_cards.py` plans. A recipe that changes
nothing gets no file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mpt.config.finding.shipped import find_shipped
from mpt.config.load import load_config
from mpt.config.text.yaml_text import write_text
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.recipes.patch_origin import describe_origin
from mpt.planner.recipes.presets import usable_bytes

ROOT = Path(__file__).resolve().parents[2]
CARDS, PRESETS = (
    ROOT / "docs" / "benchmarks" / f"{name}.md" for name in ("diffusion_cards", "presets")
)
COMMAND = "python scripts/plans/diffusion_presets.py"
CONFIGS = ("flux_lora", "sdxl_lora")
GPU = "rtx3060"
"""The card of the table."""
EXACT = {"memory.recompute=all", "memory.stream_weights=0.35"}
END = "<!-- end of shipped presets -->"


@dataclass(frozen=True)
class Recipe:
    """A row of "By card"."""

    config: str
    sizes: tuple[int, ...]
    """GB of the cards."""
    words: str
    gib: str
    seconds: str
    overrides: tuple[str, ...]

    @property
    def patch(self) -> dict[str, Any]:
        """The added settings as a file has them."""
        found: dict[str, Any] = {}
        for one in self.overrides:
            name, _, value = one.partition("=")
            section, _, key = name.partition(".")
            found.setdefault(section, {})[key] = yaml.safe_load(value)
        return found

    def files(self) -> Iterator[tuple[Path, str]]:
        """Yield its presets with their text. Raises SystemExit for a card that it does not fit."""
        config, folder = (
            load_config(find_shipped(self.config)),
            find_shipped(self.config).parent / "presets",
        )
        for size in self.sizes if self.overrides else ():
            budget = usable_bytes(find_gpu(GPU), size)
            if float(self.gib) * 2**30 > budget:
                sys.exit(
                    f"{self.config}: {self.words} does not fit a card of {size} GB; write {CARDS.name} again"
                )
            path = folder / f"{self.config}_{size}gb.yaml"
            said = (
                f"{self.words}: {self.gib} GiB of the {budget / 2**30:.2f} GiB that a card of {size} GB gives to "
                f"programs, {self.seconds} s a step on an {GPU}; planned, not run; written by {COMMAND}"
            )
            head = f"# mpt train @{self.config} --with @{path.stem} dataset.root=DIR\n# {said}\n"
            yield path, f"{head}{describe_origin(config, GPU, budget)}\n{write_text(self.patch)}"

    @property
    def row(self) -> str:
        """The row on the page of presets."""
        cost = "exact" if set(self.overrides) <= EXACT else "low-bit base"
        cells = [
            f"`{self.config}`",
            ", ".join(map(str, self.sizes)),
            "1",
            self.words,
            cost,
            f"{self.gib} GiB",
        ]
        return f"| {' | '.join([*cells, f'{self.seconds} s, {GPU}'])} |"


def recipes() -> Iterator[Recipe]:
    """Yield the rows of "By card"."""
    first, _, by_card = CARDS.read_text("utf-8").partition("\n## By card")
    seconds = {tuple(cells[:2]): cells[4] for cells in table(first)}
    for model, sizes, words, gib, added in table(by_card.partition("\n## ")[0]):
        config, _, overrides = added.partition(": ")
        if config.strip("`@") in CONFIGS:
            given = () if overrides == "nothing" else tuple(overrides.split())
            cards = tuple(int(size) for size in sizes.split(", "))
            yield Recipe(config.strip("`@"), cards, words, gib, seconds[model, words], given)


def table(text: str) -> Iterator[list[str]]:
    """Yield the cells of a table's rows, its head left out."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    yield from ([cell.strip() for cell in line.split("|")[1:-1]] for line in rows[1:])


def texts() -> dict[Path, str]:
    """Return every file that says something of these presets."""
    wanted = sorted(recipes(), key=lambda one: (one.config, one.sizes))
    others = tuple(f"| `{name}` |" for name in CONFIGS)
    kept = [line for line in PRESETS.read_text("utf-8").splitlines() if not line.startswith(others)]
    end = kept.index(END)
    page = "\n".join([*kept[:end], *(one.row for one in wanted), *kept[end:]]) + "\n"
    return {PRESETS: page} | {path: text for one in wanted for path, text in one.files()}


def main() -> None:
    """Write or check the presets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if a file says something else"
    )
    is_check = parser.parse_args().check
    wrong = {
        path: text
        for path, text in texts().items()
        if not path.is_file() or path.read_text("utf-8") != text
    }
    for path, text in wrong.items():
        print(f"{'differs' if is_check else 'wrote'}: {path.relative_to(ROOT)}")
        if not is_check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")
    if is_check and wrong:
        sys.exit(f"presets are not what {CARDS.name} says: {COMMAND}")


if __name__ == "__main__":
    main()
