"""Sample grids of runs, embedded into pages: evenly chosen over a run, and the modes of a comparison side by side."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from mpt.foreign.files import LARGEST_PICTURE_BYTES, open_foreign
from mpt.report.comparing.comparison import Comparison
from mpt.report.reading.run_record import RunRecord

MOST_SAMPLES = 8
MOST_MOMENTS = 3
SAMPLE_PIXELS = 512
"""A picture has as many pixels as a square of this side at most."""
LONGEST_SIDE = 1600
WIDE = 2.5
"""A strip that is that many times as wide as high gets the page's whole width, as a detector's pictures."""


@dataclass(frozen=True)
class Picture:
    """A picture for a page; `source` is a data address, empty if the file could not be read."""

    label: str
    source: str
    pixelated: bool
    wide: bool = False


def embed(path: Path, label: str) -> Picture:
    """Read a picture as a data address, made smaller if it has more pixels than a page should hold."""
    try:
        with open_foreign(path, LARGEST_PICTURE_BYTES) as file, Image.open(file) as image:
            image.load()
            width, height = image.size
            small = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return Picture(label, "", False)
    scale = min(1.0, SAMPLE_PIXELS / math.sqrt(width * height), LONGEST_SIDE / max(width, height))
    small.thumbnail((math.ceil(width * scale), math.ceil(height * scale)))
    target = io.BytesIO()
    small.save(target, "PNG", optimize=True)
    source = "data:image/png;base64," + base64.b64encode(target.getvalue()).decode("ascii")
    return Picture(label, source, max(width, height) < 256, width >= WIDE * height)


def embed_samples(record: RunRecord) -> list[Picture]:
    """Return sample images over time, evenly chosen."""
    return [embed(path, path.stem) for path in choose(record.samples, MOST_SAMPLES)]


def choose(paths: Sequence[Path], most: int) -> list[Path]:
    """Return at most that many, evenly chosen, the first and the last among them."""
    if len(paths) <= most:
        return list(paths)
    return [paths[round(index * (len(paths) - 1) / (most - 1))] for index in range(most)]


def side_by_side(comparison: Comparison) -> tuple[int, list[list[Picture]]] | None:
    """Return the first seed that all modes have samples of, and the rows of pictures: a mode each, moments alongside.

    The moments are those that all these runs have; None if there are none. The runs of one seed start from the same
    weights and random inputs, so pictures above each other show the same samples.
    """
    for seed in comparison.seeds:
        runs = [(row.group.label, row.group.runs.get(seed)) for row in comparison.rows]
        found = [
            (label, {path.name: path for path in run.samples})
            for label, run in runs
            if run is not None
        ]
        if len(found) < len(runs):
            continue
        shared = sorted(set.intersection(*(set(paths) for _, paths in found)))
        chosen = choose([Path(name) for name in shared], MOST_MOMENTS)
        if chosen:
            rows = [
                [embed(paths[at.name], f"{label}, {at.stem}") for at in chosen]
                for label, paths in found
            ]
            return seed, [[replace(picture, wide=False) for picture in row] for row in rows]
    return None
