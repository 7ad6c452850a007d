"""Compare planned step times with timm's tables of training speeds on an RTX 3090.

    python scripts/plans/check_timm_times.py CONTIGUOUS.csv CHANNELS_LAST.csv [-o docs/benchmarks/timm_times.md]

The tables are `results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv` and `...-nhwc-...` of timm's repository, which
are not shipped here: images per second of a whole step (amp, SGD, no data loading). Constants of the time model are
fitted to the models whose name's CRC-32 is even; the figures are of the others. Models that the installed timm does not
have are left out.
"""

from __future__ import annotations

import csv
import statistics
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

from mpt.config.load import load_config
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.facts.time_band import range_of
from mpt.planner.server.worker import find_data, preload
from mpt.planner.step.run_fake import trace_config
from mpt.planner.trace.time_model import Work
from mpt.vision_ops import import_torchvision
from scripts.command_line import described
from scripts.provenance import made

GPU = "rtx3090"


@dataclass(frozen=True)
class Row:
    """One published speed."""

    model: str
    images_per_second: float
    batch: int
    size: int
    channels_last: bool

    @property
    def is_held_out(self) -> bool:
        """Whether no constant was fitted to this model."""
        return zlib.crc32(self.model.encode()) % 2 == 1


@dataclass(frozen=True)
class Found:
    """A row and what was planned for it."""

    row: Row
    seconds: float
    band: float

    @property
    def ratio(self) -> float:
        """Planned over published time."""
        return self.seconds * self.row.images_per_second / self.row.batch

    @property
    def is_inside(self) -> bool:
        """Whether the published time lies in the range that is printed beside the planned one."""
        least, most = range_of(self.band)
        return least <= 1 / self.ratio <= most


def read(path: Path, channels_last: bool) -> list[Row]:
    """Return the rows of one of timm's tables whose models the installed timm has."""
    import_torchvision("models")
    import timm

    known = set(timm.list_models())
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] in known]
    return [
        Row(
            row["model"],
            float(row["train_samples_per_sec"]),
            int(row["train_batch_size"]),
            int(row["train_img_size"]),
            channels_last,
        )
        for row in rows
    ]


def plan(row: Row) -> Found:
    """Plan a step of a row."""
    config = load_config(
        {
            "model": {"name": f"timm:{row.model}", "image_size": row.size, "channels": 3},
            "dataset": {"name": "image_folder", "root": "nowhere", "image_size": row.size},
            "precision": {"mode": "amp"},
            "memory": {"channels_last": row.channels_last},
            "optimizer": {"name": "sgd", "momentum": 0.9},
            "train": {"batch_size": row.batch, "deterministic": False},
        }
    )
    data = find_data(config)[1]
    gpu = find_gpu(GPU)
    work: Work = trace_config(config, data, row.batch, gpu, None).work
    return Found(row, work.seconds(gpu), work.band(gpu))


def rank_correlation(found: Sequence[Found]) -> float:
    """Return Spearman's correlation of planned and published time per image."""
    planned = ranks([one.seconds / one.row.batch for one in found])
    return statistics.correlation(planned, ranks([1 / one.row.images_per_second for one in found]))


def ranks(values: Sequence[float]) -> list[float]:
    """Return each value's place in their order."""
    places = {
        place: float(rank)
        for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__))
    }
    return [places[place] for place in range(len(values))]


def summary(name: str, found: Sequence[Found]) -> str:
    """Return one line of the table."""
    errors = sorted(abs(one.ratio - 1) for one in found)
    inside = sum(one.is_inside for one in found) / len(found)
    nine_tenths = errors[int(0.9 * (len(errors) - 1))]
    return (
        f"| {name} | {len(found)} | {statistics.median(errors):.1%} | {nine_tenths:.0%} | {inside:.0%} | "
        f"{rank_correlation(found):.3f} |"
    )


def report(found: Sequence[Found]) -> str:
    """Return the page's tables."""
    lines = [
        "| Models | Rows | Median error | Nine in ten within | In the printed band | Rank correlation |"
    ]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for heading, is_held_out in (("held out", True), ("fitted to", False)):
        for layout, channels_last in (("contiguous", False), ("channels_last", True)):
            some = [
                one
                for one in found
                if (one.row.is_held_out, one.row.channels_last) == (is_held_out, channels_last)
            ]
            if len(some) > 1:
                lines.append(summary(f"{heading}, {layout}", some))
    worst = sorted(
        (one for one in found if one.row.is_held_out), key=lambda one: -abs(one.ratio - 1)
    )[:15]
    lines += ["", "The fifteen largest errors of the models held out:", ""]
    lines += [
        "| Model | Layout | Batch | Published ms | Planned ms | Ratio |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for one in worst:
        layout = "channels_last" if one.row.channels_last else "contiguous"
        published = one.row.batch / one.row.images_per_second
        lines.append(
            f"| {one.row.model} | {layout} | {one.row.batch} | {published * 1000:,.0f} | {one.seconds * 1000:,.0f} | "
            f"{one.ratio:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Plan all rows and print, or save, the tables."""
    parser = described(__doc__)
    parser.add_argument("contiguous", type=Path)
    parser.add_argument("channels_last", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="write a page in Markdown")
    parser.add_argument("--every", type=int, default=1, help="plan each N-th row only")
    arguments = parser.parse_args()
    preload()
    rows = [*read(arguments.contiguous, False), *read(arguments.channels_last, True)][
        :: arguments.every
    ]
    text = report([plan(row) for row in rows])
    print(text)
    if arguments.output:
        today, some = made(), f" --every {arguments.every}" if arguments.every > 1 else ""
        heading = (
            "# Planned step times and timm's training speeds\n\n"
            f"Written by `python scripts/plans/check_timm_times.py{some}`, {today}, torch {torch.__version__}. "
            "Published speeds are timm's, measured on an RTX 3090 with torch 1.12 in amp; planned times are of the "
            f"same card with the operators of the torch named here. {len(rows)} rows of models that the installed "
            "timm has. Constants are fitted to one half of the models and judged by the other."
        )
        arguments.output.write_text(f"{heading}\n\n{text}\n", "utf-8")


if __name__ == "__main__":
    main()
