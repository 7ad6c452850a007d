"""The part of a run's page on a classifier's last evaluation, from the run's `evaluation.json`.

The file is a run's and may be damaged or forged: numbers are read as numbers, pictures only as PNG data, and everything
else is text that the template escapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes

from mpt.report.drawing import COLOURS, INK, draw_svg
from mpt.run.records.ending import read_json_object

PICTURE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+={0,2}")
MOST_CLASSES = 200


@dataclass(frozen=True)
class Cell:
    """One count of the confusion matrix and how much of its row it is."""

    count: int
    share: float
    is_right: bool

    @property
    def colour(self) -> str:
        """A background: blue on the diagonal, red off it, the stronger the larger its share."""
        colour = "var(--accent)" if self.is_right else "var(--bad)"
        return f"color-mix(in srgb, {colour} {round(70 * math.sqrt(self.share))}%, transparent)"


def read_classification(run_path: Path) -> dict[str, Any] | None:
    """Return the template's data, or None if the run has no such evaluation."""
    try:
        return show_classification(read_json_object(run_path / "evaluation.json"))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def show_classification(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's data. Raises for malformed data: KeyError, TypeError, ValueError."""
    names = [str(name) for name in content["classes"]]
    return {
        "step": int(content["step"]),
        "samples": int(content["samples"]),
        "macro_f1": float(content["macro_f1"]),
        "classes": names,
        "matrix": cells(content["matrix"], len(names)),
        "per_class": [
            (
                str(row["name"]),
                int(row["samples"]),
                *(float(row[key]) for key in ("precision", "recall", "f1")),
            )
            for row in content["per_class"][:MOST_CLASSES]
        ],
        "left_out": max(0, len(content["per_class"]) - MOST_CLASSES),
        "pairs": [
            (str(one["truth"]), str(one["label"]), int(one["count"])) for one in content["pairs"]
        ],
        "expected_error": float(content["calibration"]["expected_error"]),
        # drawn here: no text of the file
        "calibration": Markup(draw_calibration(content["calibration"]["bins"])),
        "worst": [read_sample(one) for one in content["worst"]],
        "examples": [read_sample(one) for one in content.get("examples", [])],
    }


def read_sample(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's data of one test sample."""
    return {
        "name": str(one.get("name", one["index"])),
        "label": str(one["label"]),
        "truth": str(one["truth"]),
        "probability": float(one["probability"]),
        "picture": one["picture"] if PICTURE.fullmatch(str(one.get("picture", ""))) else "",
    }


def cells(matrix: Any, size: int, totals: Any = None) -> list[list[Cell]]:
    """Return the matrix's cells; none if it was left out. `totals` are the rows' sums, which shares refer to."""
    if not matrix or len(matrix) != size:
        return []
    of = (
        [sum(map(int, row)) for row in matrix]
        if totals is None
        else [int(total) for total in totals]
    )
    return [
        [
            Cell(int(count), min(1.0, int(count) / max(1, of[number])), place == number)
            for place, count in enumerate(row)
        ]
        for number, row in enumerate(matrix)
    ]


def draw_calibration(bins: Sequence[Mapping[str, Any]]) -> str:
    """Draw accuracy over confidence alongside the line on which they would be equal."""
    places = [
        (float(one["confidence"]), float(one["accuracy"]), int(one["samples"])) for one in bins
    ]
    most = max((count for _, _, count in places), default=1)

    def build(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], color=INK, alpha=0.4, linewidth=1)
        axes.plot(
            [x for x, _, _ in places], [y for _, y, _ in places], color=COLOURS[0], linewidth=1
        )
        sizes = [12 + 120 * count / most for _, _, count in places]
        xs, ys = [x for x, _, _ in places], [y for _, y, _ in places]
        axes.scatter(xs, ys, s=sizes, color=COLOURS[0], clip_on=False)
        axes.set_xlim(0, 1.02)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("confidence")
        axes.set_ylabel("share of right answers")

    return draw_svg(build, "calibration", width=4.2, height=3.4)
