"""Fill the table of transfers in docs/benchmarks/stylegan2_transfers.md, without a GPU and without a network.

Usage:
    nice -n 15 python scripts/quality/stylegan2_transfers.py          # a quarter of an hour on one core

Each row is a plan of the configuration that `mpt stylegan2 transfer NETWORK.pkl --size N --freeze-d 10` writes for a
network with the settings of NVIDIA's FFHQ network of 1,024 pixels: memory follows from shapes alone, so no file is
needed. Rows that were planned are kept in --work, so that a second call continues.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from mpt.config.load import load_config
from mpt.errors import MptError
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import load_calibration
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.recipes.presets import usable_bytes
from mpt.systems.stylegan2.commands.transfer import Command, configuration
from scripts.command_line import described
from scripts.provenance import made
from scripts.quality.generative_table import ROOT, write_between

DOCUMENT = ROOT / "docs" / "benchmarks" / "stylegan2_transfers.md"
MARKER = "table:transfers"
GPU = "rtx3060"
MEBI = 2**20
SIZES_GB = (6, 8, 10, 12)
"""Cards, whose room for programs is `usable_bytes`."""
COMMON = {
    "name": "stylegan2",
    "channels": 3,
    "classes": 0,
    "published": True,
    "num_fp16_res": 4,
    "conv_clamp": 256,
}
NETWORK = {**COMMON, "channel_base": 32768, "mapping_layers": 8}
SIZES = (256, 512, 1024)
FROZEN = 10
RECIPES: dict[str, tuple[str, ...]] = {
    "as it stands": (),
    "micro-batches of a half": ("memory.micro_batch={half}",),
}
"""The gentlest first."""


def main() -> None:
    """Plan every row and write the table."""
    parser = described(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs") / "stylegan2_transfers.json")
    work = parser.parse_args().work
    found: dict[str, Any] = json.loads(work.read_text("utf-8")) if work.is_file() else {}
    with (
        tempfile.TemporaryDirectory() as folder,
        Session(find_gpu(GPU), load_calibration(GPU)) as session,
    ):
        for size in SIZES:
            for recipe, words in RECIPES.items():
                key = f"{size}|{recipe}"
                if key not in found:
                    found[key] = plan(session, size, words, Path(folder))
                    print(key, found[key], flush=True)
                    work.parent.mkdir(parents=True, exist_ok=True)
                    work.write_text(json.dumps(found), "utf-8")
    write_between(DOCUMENT, MARKER, table(found))


def plan(session: Session, size: int, words: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Return the plan of a transfer, or why there is none."""
    from PIL import Image

    pictures = folder / str(size)
    pictures.mkdir(exist_ok=True)
    for number in range(2):
        Image.new("RGB", (size, size), (90 * number, 60, 30)).save(pictures / f"{number}.png")
    data = configuration(
        Command(Path("ffhq.pkl"), pictures, freeze_d=FROZEN), {**NETWORK, "image_size": size}
    )
    batch = data["train"]["batch_size"]
    try:
        made = session.plan([load_config(data, [word.format(half=batch // 2) for word in words])])[
            0
        ].get()
    except MptError as error:
        return {"batch": batch, "error": str(error)}
    return {"batch": batch, "bytes": made.reserved + made.context_bytes, "step": made.step_seconds}


def table(found: dict[str, Any]) -> list[str]:
    """Return the rows, each with the smallest card that has room."""
    lines = [
        f"`python scripts/quality/stylegan2_transfers.py`, {made()}; planned on a CPU with the kernels and times of "
        f"an {GPU}.",
        "",
        "| Pixels | Batch | Recipe | Memory, MiB | Step, s | Smallest card |",
        "|---:|---:|---|---:|---:|---:|",
    ]
    for key, one in found.items():
        size, recipe = key.split("|")
        figures = f"refused: {one['error'][:100]} | | |" if "error" in one else costs(one)
        lines.append(f"| {size} | {one['batch']} | {recipe} | {figures}")
    return lines


def costs(one: dict[str, Any]) -> str:
    """Return the last cells of a row."""
    fitting = (size for size in SIZES_GB if one["bytes"] <= usable_bytes(find_gpu(GPU), size))
    card = next((f"{size} GB" for size in fitting), "none of these")
    return f"{one['bytes'] / MEBI:,.0f} | {one['step']:.1f} | {card} |"


if __name__ == "__main__":
    main()
