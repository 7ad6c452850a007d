"""The section that a task gives to a run's page: a table, charts and a confusion matrix, from `evaluation.json`.

A task describes it as plain data under `section` of its details (`Task.details`), so that pages need to know nothing of
the kind of network:

    {"title": str, "note": str,
     "table": {"head": [str, ...], "rows": [[str, ...], ...]},     the first column is left-aligned
     "charts": [{"title": str, "x": str, "y": str, "lines": [{"name": str, "x": [...], "y": [...]}]}],     from 0 to 1
     "matrix": {"title": str, "names": [str, ...], "counts": [[int, ...], ...], "totals": [int, ...]}}

A matrix may be empty; its rows are the truth, and a cell is the darker the larger its share of the row's total.

The file is a run's and may be damaged or forged: numbers are read as numbers, everything else is text that is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes

from mpt.report.drawing import COLOURS, INK, add_legend, draw_svg
from mpt.report.run_page.classification import cells
from mpt.run.records.ending import read_json_object

MOST_ROWS = 200


def read_section(run_path: Path) -> dict[str, Any] | None:
    """Return the template's data of a run's last evaluation, or None if its task gave no section."""
    content = read_json_object(run_path / "evaluation.json")
    try:
        return show_section(content["section"], int(content["step"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def show_section(section: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Return the template's data. Raises for malformed data: KeyError, TypeError, ValueError."""
    rows, matrix = section["table"]["rows"], section["matrix"]
    names = [str(name) for name in matrix["names"]]
    return {
        "title": str(section["title"]),
        "step": step,
        "note": str(section["note"]),
        "head": [str(name) for name in section["table"]["head"]],
        "rows": [[str(cell) for cell in row] for row in rows[:MOST_ROWS]],
        "left_out": max(0, len(rows) - MOST_ROWS),
        "charts": [
            (str(one["title"]), Markup(draw_chart(one, n)))
            for n, one in enumerate(section["charts"])
        ],
        "matrix_title": str(matrix["title"]),
        "names": names,
        "matrix": cells(matrix["counts"], len(names), matrix["totals"]),
    }


def draw_chart(chart: Mapping[str, Any], number: int) -> str:
    """Draw curves between 0 and 1; matplotlib escapes the words. A last line named mean is drawn in ink."""
    lines = [(str(one["name"]), finite(one["x"]), finite(one["y"])) for one in chart["lines"]]

    def build(axes: Axes) -> None:
        for place, (name, x, y) in enumerate(lines):
            is_mean = name == "mean" and place == len(lines) - 1
            colour, width = (INK, 2.2) if is_mean else (COLOURS[place % len(COLOURS)], 1.4)
            axes.plot(x, y, color=colour, linewidth=width, label=name)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel(str(chart["x"]))
        axes.set_ylabel(str(chart["y"]))
        if len(lines) > 1:
            add_legend(axes, len(lines))

    return draw_svg(build, f"chart {number + 1} of the evaluation", width=5.0, height=3.6)


def finite(values: Any) -> list[float]:
    """Return numbers, NaN if one is not finite, which leaves a gap."""
    return [value if math.isfinite(value) else math.nan for value in map(float, values)]
