"""A picture of memory over one step: live bytes at every moment, stacked by category, one panel per recipe.

The horizontal axis counts allocations and releases, not seconds: the order matters.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpt.run.process.files import write_atomically

COLOURS = {
    "parameters": "#4c72b0",
    "buffers": "#8c8c8c",
    "optimizer state": "#55a868",
    "gradients": "#c44e52",
    "batch": "#937860",
    "cast cache": "#da8bc3",
    "whole batch": "#c9b08f",
    "gathered parameters": "#8da0cb",
    "reduce buffers": "#e78ac3",
    "activations": "#dd8452",
    "temporaries": "#ccb974",
    "workspace": "#64b5cd",
}
GIB = 2**30
TITLE_CHARACTERS = 105
"""Letters of a panel's title that fit in a line."""

AXIS = (
    "tensors over the allocations and releases of building and two steps, in order;\n"
    "the figures above count the context and the allocator's reserve as well"
)


def write_timeline(
    path: Path,
    panels: Sequence[tuple[str, Mapping[str, Sequence[int]]]],
    budget_bytes: int | None,
    title: str = "",
) -> None:
    """Write a PNG with one panel per recipe; `budget_bytes`, less the context, is drawn as a line.

    Raises InputOutputError when the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(
        len(panels),
        1,
        figsize=(9, 1.2 + 2.3 * len(panels)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    highest = max(
        sum(values) for _, lines in panels for values in zip(*lines.values(), strict=True)
    )
    limit = max(highest, budget_bytes or 0)
    unit, unit_bytes, decimals = ("GiB", GIB, 2) if limit >= GIB else ("MiB", 2**20, 0)
    if title:
        figure.suptitle(title, fontsize=11)
    for axes, (recipe, lines) in zip(rows[:, 0], panels, strict=True):
        names = [name for name in COLOURS if name in lines]
        count = len(next(iter(lines.values())))
        axes.stackplot(
            range(count),
            [[value / unit_bytes for value in lines[name]] for name in names],
            labels=names,
            colors=[COLOURS[name] for name in names],
        )
        if budget_bytes is not None:
            budget = budget_bytes / unit_bytes
            said = f"budget less the context: {budget:.{decimals}f} {unit}"
            axes.axhline(budget, color="black", linestyle="--", linewidth=1, label=said)
        axes.set_title(textwrap.fill(recipe, TITLE_CHARACTERS), fontsize=10, loc="left")
        axes.set_ylabel(unit)
        axes.set_xlim(0, count - 1)
        axes.set_xticks([])
    rows[0, 0].set_ylim(0, limit / unit_bytes * 1.08)
    rows[-1, 0].set_xlabel(AXIS)
    handles: dict[str, Any] = {}
    for axes in rows[:, 0]:
        handles.update(
            {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        )
    ordered = [
        *(name for name in COLOURS if name in handles),
        *(name for name in handles if name not in COLOURS),
    ]
    figure.legend(
        [handles[name] for name in ordered],
        ordered,
        loc="outside lower center",
        ncols=5,
        fontsize=8,
    )
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as PNG and drop it. Raises InputOutputError if it cannot be written."""
    from matplotlib import pyplot

    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    pyplot.close(figure)
    write_atomically(path, picture.getvalue(), durable=False)
