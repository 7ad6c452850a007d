"""A sweep as files: `comparison.md`, `.json` and one self-contained `.html`, and as lines for a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from mpt.report.comparing.sweep import Estimate, Point, Sweep, Window, allowed
from mpt.report.drawing import COLOURS, RED, add_legend, draw_svg, set_scale, write_numbers_out
from mpt.report.run_page.page import environment, plain
from mpt.report.units import counted, show_figure
from mpt.run.process.files import write_atomically

MARKERS = "osD^vP"
MARKS_APART = 0.01
"""By which share of the axis marks of two modes at one value are apart, so that they do not cover each other."""


def write_sweep(folder: Path, sweep: Sweep, *, multiples: bool) -> None:
    """Write the three files. Raises InputOutputError."""
    content = {
        "name": folder.resolve().name,
        "sweep": sweep,
        "multiples": multiples,
        "rows": [(window, describe_row(window, sweep)) for window in sweep.windows],
        "lines": sweep_lines(sweep),
        "failed": failures(sweep),
    }
    template = environment()
    write_atomically(
        folder / "comparison.json",
        json.dumps(plain(as_json(sweep)), indent=1, allow_nan=False) + "\n",
    )
    write_atomically(
        folder / "comparison.md", template.get_template("sweep.md.j2").render(**content)
    )
    plot = Markup(draw_sweep(sweep))
    page = template.get_template("sweep.html.j2").render(**content, plot=plot)
    write_atomically(folder / "comparison.html", page)


def sweep_lines(sweep: Sweep) -> list[str]:
    """Return a line for each mode: its window, edges and best value, and their ratios to the baseline's."""
    lines = []
    for window in sweep.windows:
        words = [f"{window.mode}: {say_window(window)}"]
        words.append(f"upper edge {say(window.upper_edge, 'beyond the grid')}")
        words.append(f"best at {say(window.best, 'an end of the grid')}")
        if window is not sweep.baseline:
            base = sweep.baseline.mode
            words.append(f"upper edge {say_ratio(window.upper_ratio, base)}")
            words.append(f"best value {say_ratio(window.best_ratio, base)}")
        lines.append("; ".join(words))
    lines.append(
        f"A value trains if {sweep.metric} is not worse by more than {sweep.margin} than {sweep.baseline.mode} at "
        f"{sweep.reference.label} ({show_figure(sweep.reference.final.mean)}), at 5 %; {len(sweep.seeds)} paired seeds."
    )
    return lines


def say_window(window: Window) -> str:
    """Name the values of the grid at which a mode trains."""
    if window.lowest is None or window.highest is None:
        return "no value is seen to train"
    said = f"trains from {window.lowest.label} to {window.highest.label}"
    if window.lowest is window.highest:
        said = f"trains at {window.lowest.label}"
    unsure = [point.label for point in window.points if point.state == "not decided"]
    return said + (f" ({', '.join(unsure)} not decided)" if unsure else "")


def say(found: Estimate, beyond: str) -> str:
    """Write a value with its 90 % interval."""
    if math.isnan(found.value):
        return "unknown"
    if found.beyond:
        return f"{beyond} in {counted(found.beyond, 'seed')}"
    return f"{show_figure(found.value)} ({show_figure(found.low)} to {show_figure(found.high)})"


def say_ratio(found: Estimate, base: str) -> str:
    """Write a ratio to the baseline's with its 90 % interval."""
    if math.isnan(found.value) or found.beyond:
        return f"against {base}'s not known within this grid"
    return f"{found.value:.2f} times {base}'s ({found.low:.2f} to {found.high:.2f})"


def describe_row(window: Window, sweep: Sweep) -> dict[str, str]:
    """Return a mode's cells."""
    own = window is sweep.baseline
    return {
        "window": say_window(window),
        "lower": say(window.lower_edge, "beyond the grid"),
        "upper": say(window.upper_edge, "beyond the grid"),
        "best": say(window.best, "an end of the grid"),
        "upper_ratio": "–" if own else say_ratio(window.upper_ratio, sweep.baseline.mode),
        "best_ratio": "–" if own else say_ratio(window.best_ratio, sweep.baseline.mode),
    }


def failures(sweep: Sweep) -> list[str]:
    """Return why runs diverged, a line for each."""
    return [
        f"{window.mode} at {point.label}, seed {seed}: {why}"
        for window in sweep.windows
        for point in window.points
        for seed, why in sorted(point.failed.items())
    ]


def as_json(sweep: Sweep) -> dict[str, Any]:
    """Return a sweep as plain data."""
    return {
        "over": sweep.key,
        "metric": sweep.metric,
        "higher_is_better": sweep.higher_is_better,
        "margin": {"size": sweep.margin.size, "relative": sweep.margin.relative},
        "seeds": list(sweep.seeds),
        "baseline": sweep.baseline.mode,
        "reference": sweep.reference.label,
        "windows": [{**asdict(window), "said": say_window(window)} for window in sweep.windows],
    }


def draw_sweep(sweep: Sweep) -> str:
    """Draw the metric over the values: a line per mode through the means, a mark per seed, the margin's line."""
    return draw_svg(
        lambda axes: paint(axes, sweep), f"{sweep.metric} over {sweep.key}", width=11.0, height=4.2
    )


def paint(axes: Axes, sweep: Sweep) -> None:
    """Paint the sweep. Runs that diverged are crosses at the plot's worse edge."""
    axes.set_xscale("log")
    finals = [
        value
        for window in sweep.windows
        for point in window.points
        for value in point.finals.values()
    ]
    threshold = sweep.reference.final.mean - (1 if sweep.higher_is_better else -1) * allowed(
        sweep.margin, sweep.reference.final.mean
    )
    set_scale(axes, [value for value in finals if math.isfinite(value)], wanted=False)
    points = sweep.baseline.points
    values = [point.value for point in points]
    apart = max(max(values) / min(values), 2.0) ** MARKS_APART
    for index, window in enumerate(sweep.windows):
        shift = apart ** (index - (len(sweep.windows) - 1) / 2)
        paint_mode(axes, window, index, shift, 0.0 if sweep.higher_is_better else 1.0)
    axes.axhline(
        threshold,
        color=axes.xaxis.label.get_color(),
        linewidth=0.9,
        linestyle="--",
        alpha=0.6,
        label=f"{sweep.margin} worse than the best of {sweep.baseline.mode}",
    )
    labels = {point.value: point.label for point in points}
    axes.xaxis.set_major_locator(FixedLocator(list(labels)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: labels.get(value, "")))
    axes.set_xlabel(sweep.key)
    axes.set_ylabel(sweep.metric)
    write_numbers_out(axes)
    add_legend(axes, len(sweep.windows) + 1)


def paint_mode(axes: Axes, window: Window, index: int, shift: float, worse_edge: float) -> None:
    """Paint one mode; values that do not train or are not decided have open marks."""
    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
    means = [(point.value * shift, mean_of(point)) for point in window.points]
    axes.plot(
        [at for at, _ in means],
        [mean for _, mean in means],
        color=colour,
        alpha=0.9,
        label=window.mode,
    )
    for point in window.points:
        good = [value for value in point.finals.values() if math.isfinite(value)]
        face = colour if point.state == "trains" else "none"
        at = [point.value * shift] * len(good)
        axes.plot(at, good, marker, color=colour, markerfacecolor=face, markersize=5, linestyle="")
        for _ in range(len(point.finals) - len(good)):
            axes.plot(
                [point.value * shift],
                [worse_edge],
                "x",
                color=RED,
                transform=axes.get_xaxis_transform(),
                clip_on=False,
            )


def mean_of(point: Point) -> float:
    """Return the mean of the runs that did not diverge; NaN if all did."""
    values: Sequence[float] = [value for value in point.finals.values() if math.isfinite(value)]
    return math.fsum(values) / len(values) if values else math.nan
