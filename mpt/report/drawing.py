"""Drawing for pages: SVG that can be read on light and on dark paper, and the parts that all plots share.

Everything that is not data (axes, ticks, words) is drawn in one stand-in colour that becomes `currentColor` in the SVG,
so it takes the colour of the text around it; the data's colours have a middle lightness and stand out on both. Words
stay words (`svg.fonttype: none`): they can be searched and take the page's font. Labels are never parsed as formulas,
since a run's name may hold a dollar sign. `Figure` is used without pyplot: no global state, no display.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from mpt.report.reading.log_values import Series

INK = "#010203"
"""Stand-in for the colour of the surrounding text."""
COLOURS = ("#3f86d8", "#e07b26", "#2a9d74", "#c65b9b", "#8b7bd8", "#b3902c", "#d5524f", "#4aa7b5")
RED = "#d5524f"
LEGEND_LETTERS = 60
"""Letters that a line of a legend has room for."""
PIXELS_PER_INCH = 85
"""The most that an inch of a plot takes on a page: letters of all plots then have one size, that of a full column."""
MOST_POINTS = 1200
"""More points than pixels only make the page heavy."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.unicode_minus": False,
    "font.size": 9.0,
    "font.family": ["DejaVu Sans"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.0,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "lines.linewidth": 1.6,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.prop_cycle": cycler(color=COLOURS),
}


UNSAID = {"svg": ("Date", "Creator"), "pdf": ("CreationDate", "Creator"), "png": ("Software",)}
"""Entries that a plot's file leaves out, by its suffix: it would differ from one time or version to the next."""


@dataclass(frozen=True)
class Plot:
    """A drawing, to be drawn again for another medium."""

    build: Callable[[Axes], None]
    name: str
    width: float
    height: float


_kept: ContextVar[list[Plot] | None] = ContextVar("kept plots", default=None)
PAPER = {key: "black" if value == INK else value for key, value in STYLE.items()}


@contextmanager
def kept_plots() -> Iterator[list[Plot]]:
    """Yield a list to which every plot that is drawn within the block is added."""
    plots: list[Plot] = []
    token = _kept.set(plots)
    try:
        yield plots
    finally:
        _kept.reset(token)


def save_plot(plot: Plot, suffix: str) -> bytes:
    """Return a plot as a file of its own, `svg`, `pdf` or `png`, black on white; the same bytes for the same plot."""
    target = io.BytesIO()
    with matplotlib.rc_context({**PAPER, "svg.hashsalt": plot.name, "pdf.fonttype": 42}):
        figure = Figure(figsize=(plot.width, plot.height), layout="constrained")
        plot.build(figure.add_subplot())
        figure.savefig(
            target, format=suffix, facecolor="white", metadata=dict.fromkeys(UNSAID[suffix])
        )
    return target.getvalue()


def draw_svg(
    build: Callable[[Axes], None], name: str, width: float = 6.4, height: float = 2.7
) -> str:
    """Draw one pair of axes and return it as an `<svg>` element for a page."""
    plot = Plot(build, name, width, height)
    if (kept := _kept.get()) is not None:
        kept.append(plot)
    return drawn(plot)


def drawn(plot: Plot) -> str:
    """Return a plot as an `<svg>` element for a page."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": plot.name}):
        figure = Figure(figsize=(plot.width, plot.height), layout="constrained")
        plot.build(figure.add_subplot())
        return as_svg(figure, plot.name)


def as_svg(figure: Figure, name: str) -> str:
    """Return a figure as an `<svg>` element whose ink is `currentColor`. `name` keeps its ids apart from other
    plots'."""
    target = io.StringIO()
    figure.savefig(target, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = target.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", text, count=1)
    # Ids of groups repeat from plot to plot; ids that are referred to carry the salt already.
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    width = round(figure.get_figwidth() * PIXELS_PER_INCH)
    about = f'role="img" aria-label="{html.escape(name)}" style="max-width: {width}px"'
    return text.replace("<svg", f"<svg {about}", 1)


def mark_bytes(axes: Axes, most: float) -> None:
    """Mark an axis of bytes at round numbers of a binary unit, which are no round numbers of bytes."""
    power = min(3, max(0, int(math.log(max(most, 1), 1024))))
    unit, name = 1024.0**power, ("B", "KiB", "MiB", "GiB")[power]
    axes.set_xticks([mark * unit for mark in MaxNLocator(5).tick_values(0, most / unit)])
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value / unit:g} {name}" if value else "0")
    )


def label_steps(axes: Axes, label: str) -> None:
    """Label a plot over steps. Call when all is drawn and the scale is set."""
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    low, high = axes.get_xlim()
    if high - low < 2:  # one step alone: no fractions of a step around it
        axes.set_xlim((low + high) / 2 - 1, (low + high) / 2 + 1)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    # around a curve that stays 0 matplotlib would mark -0.05 to 0.05
    if axes.get_autoscaley_on() and axes.dataLim.y0 == axes.dataLim.y1 == 0:
        axes.set_ylim(-0.05, 1.05)
    write_numbers_out(axes)


def write_numbers_out(axes: Axes) -> None:
    """Write the numbers of a linear vertical axis in full: a common factor or offset would hide in the legend."""
    if axes.get_yscale() == "linear":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.9g}"))


def marks_alone(values: Sequence[float]) -> dict[str, Any]:
    """Return how `plot` marks the points of a curve that no line reaches: its only one, those between NaNs."""
    finite = [False, *map(math.isfinite, values), False]
    alone = [
        at
        for at, (before, own, after) in enumerate(zip(finite, finite[1:], finite[2:], strict=False))
        if own and not (before or after)
    ]
    return {"marker": "o", "markevery": alone} if alone else {}


def add_legend(axes: Axes, count: int) -> None:
    """Put a legend above the plot, so that it hides no data."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=min(count, legend_columns(axes)),
        borderaxespad=0,
    )


def legend_columns(axes: Axes) -> int:
    """Return the number of labels of this plot in one row."""
    longest = max(
        (len(line) for label in axes.get_legend_handles_labels()[1] for line in label.split("\n")),
        default=0,
    )
    return max(1, min(4, LEGEND_LETTERS // (longest + 6)))


def set_scale(axes: Axes, values: Sequence[float], *, wanted: bool) -> None:
    """Use a logarithmic axis if values are positive and span so much that a linear one hides the small ones."""
    finite = [value for value in values if math.isfinite(value)]
    spans = min(finite) > 0 and max(finite) > (3 if wanted else 100) * min(finite)
    if spans:
        axes.set_yscale("log")
        # powers of ten alone could leave the axis with one number or none
        if max(finite) < 100 * min(finite):
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        # The usual formatter writes formulas, which are never parsed here.
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def cycle_colours() -> Iterable[str]:
    """Yield the data's colours without end."""
    while True:
        yield from COLOURS


def has_finite(values: Sequence[float]) -> bool:
    """Is there anything to draw?"""
    return any(math.isfinite(value) for value in values)


def thin(series: Series) -> Series:
    """Keep at most MOST_POINTS points, each the mean of its neighbours; values that are not finite stay a gap."""
    steps, values = series
    size = math.ceil(len(steps) / MOST_POINTS)
    if size <= 1:
        return list(steps), [value if math.isfinite(value) else math.nan for value in values]
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    means = [
        math.fsum(group) / len(group) if all(map(math.isfinite, group)) else math.nan
        for group in groups
    ]
    return [steps[min(start + size, len(steps)) - 1] for start in range(0, len(steps), size)], means


def running_mean(values: Sequence[float], weight: float) -> list[float]:
    """Return the exponential running mean, without the pull towards zero at its beginning."""
    total, share, means = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            total, share = weight * total + (1 - weight) * value, weight * share + (1 - weight)
        means.append(total / share if math.isfinite(value) and share else math.nan)
    return means
