"""A frame of 3840 x 2160 by published RIFE: whole, in tiles and at half the scale; a table of docs/benchmarks/dain.md.

    python scripts/quality/rife_4k_table.py flownet.pkl                              # half an hour of one core and more
    python scripts/quality/rife_4k_table.py flownet.pkl --only '--scale 0.5' '--scale 0.5 --vram 2GiB'

Two frames of noise at several scales, one moved by 12 pixels, are given to `mpt infer FILE` and `mpt dain interpolate
FILE`, each a process of its own whose peak of resident memory and processor seconds are taken. The frame between is
compared with that of the whole frame at the same scale, in grey levels of 8 bits.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.command_line import described
from scripts.provenance import made
from scripts.quality.generative_table import COMMAND, ROOT, write_between

DOCUMENT = ROOT / "docs" / "benchmarks" / "dain.md"
MARKER = "table:rife-4k"
HEIGHT, WIDTH, MOTION = 2160, 3840, 12
WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "whole": ("", ()),
    "`--vram 3GiB`": ("whole", ("--vram", "3GiB")),
    "`--vram 2GiB`": ("whole", ("--vram", "2GiB")),
    "`--scale 0.5`": ("", ("--scale", "0.5")),
    "`--scale 0.5 --vram 2GiB`": ("`--scale 0.5`", ("--scale", "0.5", "--vram", "2GiB")),
}
"""What is typed, and with which of the others the frame is compared."""
MEBI = 2**20


def main() -> None:
    """Make the frames and write the table."""
    parser = described(__doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--weights", default="weights as in the file", help="the weights in words")
    parser.add_argument(
        "--only", nargs="*", choices=[way.strip("`") for way in WAYS], help="these ways alone"
    )
    arguments = parser.parse_args()
    for way in [way for way in WAYS if arguments.only and way.strip("`") not in arguments.only]:
        del WAYS[way]
    lines = [
        f"`python scripts/quality/rife_4k_table.py {' '.join(file.name for file in arguments.files)}`, {made()}, CPU,"
    ]
    lines[0] += f" one thread; {arguments.weights}."
    lines += [
        "",
        "| File | Options | Tiles | Resident, MiB | CPU s | From the whole frame: mean | largest |",
    ]
    lines.append("|---|---|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw(folder / "in")
        for file in arguments.files:
            lines += rows(file, folder)
    write_between(DOCUMENT, MARKER, lines)


def draw(folder: Path) -> None:
    """Write two frames, the second of the same picture further on."""
    folder.mkdir()
    numbers = np.random.default_rng(0)
    picture = np.zeros((HEIGHT, WIDTH + MOTION, 3), np.float32)
    for cells in (8, 32, 128, 512):
        grid = (255 * numbers.random((cells, 2 * cells, 3))).astype(np.uint8)
        resized = Image.fromarray(grid).resize((WIDTH + MOTION, HEIGHT), Image.Resampling.BICUBIC)
        picture += np.asarray(resized, np.float32) / 4
    for number in range(2):
        start = MOTION * number
        Image.fromarray(picture[:, start : start + WIDTH].astype(np.uint8)).save(
            folder / f"{number}.png"
        )


def rows(file: Path, folder: Path) -> list[str]:
    """Return the rows of one file."""
    made: dict[str, np.ndarray] = {}
    found = []
    for number, (label, (reference, options)) in enumerate(WAYS.items()):
        output = folder / f"made-{number}"
        words = ["infer", str(file), "--input", str(folder / "in"), "-o", str(output), *options]
        if "--scale" in options:
            words = [
                "dain",
                "interpolate",
                str(file),
                str(folder / "in"),
                "--output",
                str(output),
                *options,
            ]
        said, peak, seconds = measured(words)
        made[label] = np.asarray(Image.open(output / "frame-000001.png"), np.int16)
        tiles = next(
            (
                line.split(":")[0]
                for line in said.splitlines()
                if " tile" in line and " of " in line
            ),
            "1",
        )
        difference = np.abs(made[label] - made[reference]) if reference else None
        cells = (
            ("", "") if difference is None else (f"{difference.mean():.2f}", f"{difference.max()}")
        )
        found.append(
            f"| {file.name} | {label} | {tiles} | {peak:,.0f} | {seconds:.0f} | {cells[0]} | {cells[1]} |"
        )
        print(found[-1], flush=True)
    return found


def measured(words: list[str]) -> tuple[str, float, float]:
    """Run a command; return what it prints, its peak of resident memory in MiB, and its processor seconds."""
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen([*COMMAND, *words, "--device", "cpu"], stdout=output)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if child.returncode:
        sys.exit(f"{' '.join(words)}: exit {child.returncode}\n{text}")
    return text, usage.ru_maxrss / 1024, usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
