"""Does half precision want lower learning rates, or higher ones? docs/benchmarks/rates.md.

    python scripts/quality/rate_table.py --folder DIR   # trains what is not there yet: an hour or two of one CPU core
    python scripts/quality/rate_table.py --folder DIR --write  # and writes the page
    python scripts/quality/rate_table.py --folder DIR --only saehd --write  # the other networks' lines stay as they are

One article says that a network in half precision wants a learning rate 20 to 30 % lower, another that it bears one 2
to 4 times higher. `mpt compare --over optimizer.lr=...` is run on three networks that a CPU trains in seconds; the page
has each mode's window and the ratios of its edge and best rate to float32's.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.command_line import described
from scripts.provenance import made

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "rates.md"
FLOAT16 = "precision=amp precision.dtype=float16"


@dataclass(frozen=True)
class Subject:
    """A network, and how it is made small enough."""

    name: str
    config: str
    settings: tuple[str, ...]
    over: str
    margin: str
    modes: tuple[str, ...] = ("fp32", "bf16")
    variants: tuple[str, ...] = (FLOAT16,)

    def command(self, folder: Path) -> list[str]:
        """Return the comparison's command line."""
        words = ["mpt", "compare", *self.modes, "--config", f"@{self.config}", "--over", self.over]
        words += [word for variant in self.variants for word in ("--variant", variant)]
        words += [*self.settings, "train.threads=1", "--margin", self.margin, "--jobs", "1"]
        return [*words, "--output", str(folder / self.name)]


SUBJECTS = (
    Subject(
        "vae",
        "vae",
        ("train.steps=600", "train.evaluate_every=0", "train.sample_every=0"),
        margin="2%",
        over="optimizer.lr=2x,8x,16x,32x,64x",
    ),
    Subject(
        "dcgan",
        "dcgan_fp32",
        (
            "model.image_size=16", "model.features=8", "train.batch_size=32", "train.steps=400",
            "train.evaluate_every=0", "train.sample_every=0",
        ),
        margin="200%",
        over="optimizer.lr=0.5x,2x,8x,24x,48x,96x,192x",
    ),
    Subject(
        "saehd",
        "saehd_demo",
        (
            "model.ae_dims=16", "model.e_dims=4", "model.d_dims=4", "model.d_mask_dims=4", "train.batch_size=2",
            "train.steps=120", "optimizer.warmup_steps=20", "train.evaluate_every=0", "train.sample_every=0",
        ),
        margin="3%",
        over="optimizer.lr=0.7x,1.5x,3x,6x,12x",
    ),
)  # fmt: skip


def say(found: dict[str, Any], *, is_ratio: bool = False) -> str:
    """Write an estimate with its interval, or that it lies beyond the grid."""
    if found["value"] is None:
        return "–"
    if found["beyond"]:
        count = found["beyond"]
        return (
            "beyond the grid"
            if is_ratio
            else f"at the grid's end or beyond in {count} seed{'s' * (count != 1)}"
        )
    return f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def short(mode: str) -> str:
    """Return a side's name for the table."""
    return "amp, float16" if "float16" in mode else mode


def rows(subject: Subject, sweep: dict[str, Any]) -> list[str]:
    """Return the table's rows of one network."""
    lines = []
    for window in sweep["windows"]:
        mode = short(window["mode"])
        own = window["mode"] == sweep["baseline"]
        cells = [subject.name, mode, window["said"], say(window["upper_edge"]), say(window["best"])]
        cells += (
            ["", ""]
            if own
            else [say(window[name], is_ratio=True) for name in ("upper_ratio", "best_ratio")]
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def answer(sweeps: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line on each half-precision mode: which of the two claims its intervals hold or exclude."""
    lines = []
    for name, sweep in sweeps.items():
        for window in sweep["windows"]:
            if window["mode"] == sweep["baseline"]:
                continue
            for key, what in (
                ("best_ratio", "best rate"),
                ("upper_ratio", "highest rate that trains"),
            ):
                found = window[key]
                if found["low"] is None:
                    said = "not known within this grid"
                else:
                    low, high = found["low"], found["high"]
                    lower = "possible" if low <= 0.8 and high >= 0.7 else "excluded"
                    higher = "possible" if low <= 4 and high >= 2 else "excluded"
                    said = f"20 to 30 % lower is {lower}, 2 to 4 times higher is {higher}"
                lines.append(f"- {name}, {short(window['mode'])}, {what}: {said}.")
    return lines


def main() -> int:
    """Train what is not there and print the table, or write the page."""
    parser = described(__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="where the comparisons lie, or are trained"
    )
    parser.add_argument("--only", nargs="*", default=[one.name for one in SUBJECTS])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    sweeps: dict[str, dict[str, Any]] = {}
    lines, metrics = [], []
    for subject in SUBJECTS:
        if subject.name not in options.only:
            continue
        command = subject.command(options.folder)
        subprocess.run([sys.executable, "-m", *command], check=True)
        sweep = json.loads((options.folder / subject.name / "comparison.json").read_text("utf-8"))
        sweeps[subject.name] = sweep
        lines += rows(subject, sweep)
        metrics.append(describe(subject, sweep))
    answers = answer(sweeps)
    if options.write:
        written = PAGE.read_text("utf-8").splitlines() if PAGE.is_file() else []
        names = [one.name for one in SUBJECTS]
        lines, answers, metrics = (
            in_order(
                names, own, [line for line in written if not belongs(line, options.only)], start
            )
            for own, start in ((lines, "| {} |"), (answers, "- {}, "), (metrics, "- {}: "))
        )
    heads = (
        "network",
        "mode",
        "on the grid",
        "upper edge",
        "best rate",
        "edge over fp32's",
        "best over fp32's",
    )
    table = "\n".join([f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *lines])
    print(table, *answers, sep="\n")
    if options.write:
        PAGE.write_text(page(table, metrics, answers), "utf-8")
    return 0


def belongs(line: str, names: list[str]) -> bool:
    """Return whether a line of the page is about one of some networks."""
    return any(line.startswith((f"| {name} |", f"- {name}, ", f"- {name}: ")) for name in names)


def in_order(names: list[str], own: list[str], written: list[str], start: str) -> list[str]:
    """Return the new lines and those of other networks that the page has, in the order of the networks."""
    return [
        line for name in names for line in [*own, *written] if line.startswith(start.format(name))
    ]


def describe(subject: Subject, sweep: dict[str, Any]) -> str:
    """Say what was trained, judged by what."""
    command = " ".join(
        f"'{word}'" if " " in word else word for word in subject.command(Path("DIR"))
    )
    return f"- {subject.name}: {sweep['metric']}, seeds {', '.join(map(str, sweep['seeds']))}. `{command}`"


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor()


def page(table: str, metrics: list[str], answers: list[str]) -> str:
    """Return the page around the table."""
    from importlib.metadata import version

    said, found = "\n".join(metrics), "\n".join(answers)
    return f"""# Learning rates in half precision

Written by `python scripts/quality/rate_table.py --folder DIR --write`, {made()}. Device: {processor()},
one thread of {os.cpu_count()} cores, torch {version("torch")}. Not yet run on a GPU.

One article says that half precision wants a learning rate 20 to 30 % lower, another that it bears one 2 to 4 times
higher. `mpt compare --over` trains each mode at several multiples of the shipped rate with the same seeds. A rate
trains if the metric is not worse than float32's at its best rate by more than the margin, at 5 %. Edge and best rate
are multiples of the shipped rate, interpolated seed by seed; in brackets are 90 % intervals.

{table}

Judged by these intervals:

{found}

{said}

The grids were chosen after first runs, in which edges or best rates lay at the grid's end or beyond.
DCGAN's margin is wide because its distance differs by a third between seeds: a rate trains if the distance is at most
three times that of float32's best rate (noise instead of digits has 98).

The networks are small and the trainings short, so that a CPU can make them; the float16 of a CPU rounds as a
GPU's, but its matrix products may accumulate in another order. A larger network can
differ: the command takes any configuration.
"""


if __name__ == "__main__":
    sys.exit(main())
