"""Drawings of the page over all runs: curves to lay over each other, the last sample of each run, settings that differ.

Of the runs last trained, `MOST_DRAWN` at most, and of each curve about `MOST_POINTS` points: a page of hundreds of runs
stays one that a browser opens at once.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from mpt.config.differences import flatten
from mpt.foreign.files import LARGEST_PICTURE_BYTES, open_foreign
from mpt.report.reading.log_values import curves
from mpt.report.reading.read_run import last_of_each_step
from mpt.report.reading.run_files import parse_config, read_lines, read_text
from mpt.report.runs.run_rows import RunRow

MOST_DRAWN = 100
MOST_POINTS = 120
MOST_LINES = 1200
"""Of a log that are read, evenly chosen."""
SECTIONS = (
    ("evaluate", "metrics", ""),
    ("train", "losses", "loss "),
    ("train", "grad_norm", "gradient norm "),
)
"""Kind of line, its figure, and the beginning of its curves' names."""
THUMBNAIL_SIDE = 160
UNTOLD = ("name", "seed", "train.device")
"""Settings that do not distinguish configurations."""
SHOWN = ("model.name", "dataset.name", "precision.mode")
"""Settings that have columns of their own."""
MOST_TOLD = 4
"""Settings that a run's row names."""
LONGEST_TOLD = 30
"""Letters of a value in it."""


def read_overlay(rows: Sequence[RunRow]) -> dict[str, dict[str, Any]]:
    """Return by run: `curves` (name -> steps, values), `thumbnail`, `settings` that differ, `group` and `told`."""
    problems: list[str] = []
    found: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, str]] = {}
    for row in rows[:MOST_DRAWN]:
        config = parse_config(read_text(row.path / "config.yaml", problems), problems)
        settings[row.name] = {
            key: show_value(value)
            for key, value in flatten(config).items()
            if key.partition(".")[0] not in UNTOLD and key not in UNTOLD
        }
        found[row.name] = {
            "curves": read_curves(row.path),
            "thumbnail": read_thumbnail(row.path),
            "group": group_of(settings[row.name]) if settings[row.name] else "",
        }
    for row in rows[:MOST_DRAWN]:
        found[row.name]["settings"] = differing(settings[row.name], settings.values())
        peers = [
            settings[one.name]
            for one in rows[:MOST_DRAWN]
            if one.model == row.model and one.dataset == row.dataset
        ]
        found[row.name]["told"] = tell(differing(settings[row.name], peers), peers)
    return found


def show_value(value: Any) -> str:
    """Write a setting without the point of a whole number."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def group_of(settings: Mapping[str, str]) -> str:
    """Return a name for a configuration that runs of several seeds share."""
    return hashlib.sha256(json.dumps(sorted(settings.items())).encode()).hexdigest()[:8]


def differing(own: Mapping[str, str], others: Any) -> dict[str, str]:
    """Return the settings in which not all runs agree."""
    return {
        key: value for key, value in own.items() if any(other.get(key) != value for other in others)
    }


def tell(settings: Mapping[str, str], peers: Sequence[Mapping[str, str]]) -> str:
    """Return a run's own settings in a few words: first those that fewest other runs share."""
    told = {
        key: value
        for key, value in settings.items()
        if key not in SHOWN and value not in ("None", "")
    }
    rare = sorted(told, key=lambda key: sum(peer.get(key) == told[key] for peer in peers))
    words = [f"{key.removesuffix('.name').rpartition('.')[2]} {shorten(told[key])}" for key in rare]
    return ", ".join(words[:MOST_TOLD]) + (
        f" and {len(words) - MOST_TOLD} more" if len(words) > MOST_TOLD else ""
    )


def shorten(value: str) -> str:
    """Cut a list or a mapping, whose full text is in the table of settings that differ."""
    return value if len(value) <= LONGEST_TOLD else f"{value[: LONGEST_TOLD - 1]}…"


def read_curves(run: Path) -> dict[str, tuple[list[int], list[float | None]]]:
    """Return a run's evaluations and losses by name, as JSON can hold them."""
    lines = read_lines(run / "metrics.jsonl", [], MOST_LINES)
    found: dict[str, tuple[list[int], list[float | None]]] = {}
    for kind, key, prefix in SECTIONS:
        series = curves(
            last_of_each_step([line for line in lines if line.get("kind") == kind]), key
        )
        for name, (steps, values) in series.items():
            every = -(-len(steps) // MOST_POINTS)
            kept = [*range(0, len(steps) - 1, every), len(steps) - 1]  # the last one always
            finite = [values[at] if math.isfinite(values[at]) else None for at in kept]
            found[prefix + name] = [steps[at] for at in kept], finite
    return found


def read_thumbnail(run: Path) -> str:
    """Return the run's last sample as a small data address; "" if there is none that can be read."""
    samples = sorted(path for path in (run / "samples").glob("*.png") if path.is_file())
    if not samples:
        return ""
    try:
        with open_foreign(samples[-1], LARGEST_PICTURE_BYTES) as file, Image.open(file) as image:
            image.load()
            small = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return ""
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    target = io.BytesIO()
    small.save(target, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(target.getvalue()).decode("ascii")


def as_script_data(overlay: Mapping[str, Any]) -> str:
    """Return JSON that is safe inside a script element, which nothing executes."""
    return (
        json.dumps(overlay, allow_nan=False)
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026")
    )
