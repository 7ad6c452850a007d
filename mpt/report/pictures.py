"""Sample grids of runs, embedded into pages: evenly chosen over a run, and the modes of a comparison side by side."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from mpt.report.comparison import Comparison
from mpt.report.run_record import RunRecord

MOST_SAMPLES = 8
MOST_MOMENTS = 3
SAMPLE_PIXELS = 512


@dataclass(frozen=True)
class Picture:
    """A picture for a page; `source` is a data address, empty where the file could not be read."""

    label: str
    source: str
    pixelated: bool


def embed(path: Path, label: str) -> Picture:
    """Read a picture as a data address, made smaller where its sides exceed SAMPLE_PIXELS."""
    try:
        with Image.open(path) as image:
            image.load()
            width, height = image.size
            small = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return Picture(label, "", False)
    small.thumbnail((SAMPLE_PIXELS, SAMPLE_PIXELS))
    target = io.BytesIO()
    small.save(target, "PNG", optimize=True)
    source = "data:image/png;base64," + base64.b64encode(target.getvalue()).decode("ascii")
    return Picture(label, source, max(width, height) < 256)


def embed_samples(record: RunRecord) -> list[Picture]:
    """Return sample images over time, evenly chosen."""
    return [embed(path, path.stem) for path in choose(record.samples, MOST_SAMPLES)]


def choose(paths: Sequence[Path], most: int) -> list[Path]:
    """Return at most so many, evenly chosen, the first and the last among them."""
    if len(paths) <= most:
        return list(paths)
    return [paths[round(index * (len(paths) - 1) / (most - 1))] for index in range(most)]


def side_by_side(comparison: Comparison) -> tuple[int, list[list[Picture]]] | None:
    """Return the first seed that all modes have samples of, and the rows of pictures: a mode each, moments beside.

    The moments are those that all these runs have; None where there are none. The runs of one seed start from the same
    weights and random inputs, so pictures above each other show the same samples.
    """
    for seed in comparison.seeds:
        runs = [(row.group.label, row.group.runs.get(seed)) for row in comparison.rows]
        found = [(label, {path.name: path for path in run.samples}) for label, run in runs if run is not None]
        if len(found) < len(runs):
            continue
        shared = sorted(set.intersection(*(set(paths) for _, paths in found)))
        chosen = choose([Path(name) for name in shared], MOST_MOMENTS)
        if chosen:
            return seed, [[embed(paths[at.name], f"{label}, {at.stem}") for at in chosen] for label, paths in found]
    return None
