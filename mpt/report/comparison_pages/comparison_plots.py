"""A comparison as pictures: each panel is one function of a pair of axes, so that page (SVG) and file (PNG) are drawn
alike."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mpt.report.comparing.comparison import Comparison
from mpt.report.comparing.statistics import Verdict
from mpt.report.drawing import (
    COLOURS,
    INK,
    STYLE,
    add_legend,
    draw_svg,
    has_finite,
    label_steps,
    legend_columns,
    mark_bytes,
    marks_alone,
    running_mean,
    set_scale,
    thin,
    write_numbers_out,
)
from mpt.report.reading.log_values import curves
from mpt.report.reading.run_record import RunRecord
from mpt.report.run_page.plots import PART_COLOURS, memory_parts
from mpt.report.units import show_bytes, show_seconds

DARK_INK = "#1d2329"
MOST_LOSSES = 4
OUTCOME_COLOURS = {"within": "#2a9d74", "outside": "#d5524f", "undecided": "#b3902c"}


class Painter(Protocol):
    """Draws one panel."""

    def __call__(self, axes: Axes, comparison: Comparison) -> None: ...


def draw_panels(comparison: Comparison) -> dict[str, str]:
    """Draw every panel that has data as SVG: caption -> SVG."""
    height = 2.7 + room_for_labels(comparison)
    return {
        caption: draw_svg(partial(paint, comparison=comparison), caption, height=height)
        for caption, paint in panels(comparison)
    }


def draw_png(comparison: Comparison) -> bytes:
    """Draw all panels into one picture on white."""
    chosen = panels(comparison)
    rows = math.ceil(len(chosen) / 2)
    style = {key: DARK_INK if value == INK else value for key, value in STYLE.items()}
    with matplotlib.rc_context(
        {**style, "figure.facecolor": "white", "savefig.facecolor": "white"}
    ):
        figure = Figure(
            figsize=(12, (3.3 + room_for_labels(comparison)) * rows), layout="constrained"
        )
        for index, (caption, paint) in enumerate(chosen):
            axes = figure.add_subplot(rows, 2, index + 1)
            paint(axes, comparison)
            legend = axes.get_legend()
            texts = [text.get_text() for text in legend.get_texts()] if legend else []
            lines = math.ceil(len(texts) / legend_columns(axes)) * max(
                (text.count("\n") + 1 for text in texts), default=0
            )
            axes.set_title(caption, fontweight="bold", pad=8 + 15 * lines)
        target = io.BytesIO()
        figure.savefig(target, format="png", dpi=120, metadata={"Software": None})
    return target.getvalue()


def panels(comparison: Comparison) -> list[tuple[str, Painter]]:
    """Return caption and painter of every panel for which there is data."""
    runs = [record for row in comparison.rows for record in row.group.runs.values()]
    metric = comparison.metric
    wanted: Sequence[tuple[str, Painter, bool]] = (
        (f"Difference in {metric} and the margin", paint_intervals, True),
        (
            f"{metric} per seed",
            paint_finals,
            any(
                math.isfinite(value)
                for row in comparison.rows
                for value in row.group.finals.values()
            ),
        ),
        *(
            (f"Loss {name} by step", partial(paint_loss, name=name), True)
            for name in shared_losses(comparison)
        ),
        (f"{metric} by step", paint_metric, any(has_curve(run, metric) for run in runs)),
        (
            "Peak memory",
            paint_memory,
            any(math.isfinite(row.peak_bytes) for row in comparison.rows),
        ),
        (
            "Seconds per step",
            paint_seconds,
            any(math.isfinite(row.step_seconds) for row in comparison.rows),
        ),
        ("Loss scale", paint_scale, any(row.scales for row in comparison.rows)),
    )
    return [(caption, paint) for caption, paint, has_data in wanted if has_data]


def has_curve(run: RunRecord, metric: str) -> bool:
    """Return whether a run was evaluated more than once: one evaluation is a number."""
    series = curves(run.evaluations, "metrics").get(metric)
    return series is not None and len(series[0]) > 1


def room_for_labels(comparison: Comparison) -> float:
    """Return the inches that a panel is higher for labels of several lines, at its side and in its legend."""
    lines = max(short(row.group.label).count("\n") for row in comparison.rows)
    return 0.2 * lines * len(comparison.rows)


def short(label: str) -> str:
    """Return a variant's label of at most three short lines, its keys without their sections.

    Long labels leave no room for a plot.
    """
    words = [re.sub(r"^[\w.]*\.(?=\w+=)", "", word) for word in label.split()]
    return "\n".join(
        textwrap.wrap(" ".join(words), 22, max_lines=3, placeholder=" …", break_on_hyphens=False)
    )


def paint_intervals(axes: Axes, comparison: Comparison) -> None:
    """Draw each mode's 90 % interval against the margin's band."""
    margin = comparison.margin
    unit = 100.0 if margin.relative else 1.0
    others = [
        (short(row.group.label), row.verdict) for row in comparison.rows if row.verdict is not None
    ]
    axes.axvspan(-margin.size * unit, margin.size * unit, color="#2a9d74", alpha=0.16, linewidth=0)
    axes.axvline(0, color=axes.xaxis.label.get_color(), linewidth=0.8, alpha=0.6)
    reach = unit * reach_of([verdict for _, verdict in others], margin.size)
    for index, (_, verdict) in enumerate(others):
        colour = OUTCOME_COLOURS[verdict.outcome]
        low, high = (max(-reach, min(reach, end * unit)) for end in (verdict.low, verdict.high))
        axes.plot(
            [low, high],
            [index, index],
            color=colour,
            linewidth=4,
            solid_capstyle="butt",
            alpha=0.65,
        )
        if math.isfinite(verdict.difference):
            axes.plot([verdict.difference * unit], [index], "o", color=colour, markersize=7)
    axes.set_xlim(-reach, reach)
    axes.set_ylim(len(others) - 0.4, -0.6)
    axes.set_yticks(
        range(len(others)), [f"{label}\n{verdict.outcome}" for label, verdict in others]
    )
    shown = "% of the baseline" if margin.relative else "in the metric's unit"
    axes.set_xlabel(f"difference from {short(comparison.baseline.group.label)}, {shown}")
    axes.grid(axis="y", visible=False)


def reach_of(verdicts: Sequence[Verdict], margin: float) -> float:
    """Return how far from 0 a plot goes that shows the margin, and of each verdict the difference and finite ends."""
    shown = (end for one in verdicts for end in (one.low, one.high, one.difference))
    return 1.25 * max(margin, *(abs(end) for end in shown if math.isfinite(end)), 0.0)


def paint_finals(axes: Axes, comparison: Comparison) -> None:
    """Draw the final metric of every run, the runs of one seed joined."""
    labels = [short(row.group.label) for row in comparison.rows]
    for seed in comparison.seeds:
        points = [
            (at, row.group.finals[seed])
            for at, row in enumerate(comparison.rows)
            if seed in row.group.finals
        ]
        axes.plot(
            [at for at, _ in points],
            [value for _, value in points],
            color=axes.xaxis.label.get_color(),
            alpha=0.3,
            linewidth=0.9,
        )
        for at, value in points:
            axes.plot([at], [value], "o", color=COLOURS[at % len(COLOURS)], markersize=6)
    is_crowded = sum(max(map(len, label.split("\n"))) + 3 for label in labels) > 70
    axes.set_xticks(
        range(len(labels)),
        labels,
        rotation=25 if is_crowded else 0,
        ha="right" if is_crowded else "center",
    )
    axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.set_ylabel(comparison.metric)
    write_numbers_out(axes)
    axes.grid(axis="x", visible=False)


def paint_metric(axes: Axes, comparison: Comparison) -> None:
    """Draw the metric over the steps, one line per run."""
    for at, row in enumerate(comparison.rows):
        for index, record in enumerate(row.group.runs.values()):
            series = curves(record.evaluations, "metrics").get(comparison.metric, ([], []))
            label = short(row.group.label) if index == 0 else None
            # a run with one evaluation is a point and no line
            marker = "o" if len(series[0]) < 60 else ""
            colour = COLOURS[at % len(COLOURS)]
            axes.plot(
                *thin(series),
                color=colour,
                alpha=0.75,
                linewidth=1.2,
                label=label,
                marker=marker,
                markersize=3.5,
            )
    label_steps(axes, comparison.metric)
    add_legend(axes, len(comparison.rows))


def shared_losses(comparison: Comparison) -> list[str]:
    """Return the losses that every mode's first run logged more than once, with finite values: MOST_LOSSES at most."""
    found = [curves(next(iter(row.group.runs.values())).train, "losses") for row in comparison.rows]
    names = [name for name in found[0] if all(is_curve(one.get(name)) for one in found)]
    return names[:MOST_LOSSES]


def is_curve(series: tuple[list[int], list[float]] | None) -> bool:
    """Return whether there is a line to draw: more than one value, one of them finite."""
    return series is not None and len(series[1]) > 1 and has_finite(series[1])


def paint_loss(axes: Axes, comparison: Comparison, name: str) -> None:
    """Draw one loss over the steps: the running mean of each mode's first seed."""
    drawn = []
    for at, row in enumerate(comparison.rows):
        steps, values = thin(curves(next(iter(row.group.runs.values())).train, "losses")[name])
        if len(steps) > 30:
            values = running_mean(values, weight=min(0.98, 1 - 12 / len(steps)))
        drawn += values
        colour, label = COLOURS[at % len(COLOURS)], short(row.group.label)
        axes.plot(steps, values, color=colour, label=label, alpha=0.8, **marks_alone(values))
    set_scale(axes, drawn, wanted=False)
    label_steps(axes, name)
    add_legend(axes, len(comparison.rows))


def paint_memory(axes: Axes, comparison: Comparison) -> None:
    """Draw the peak, in parts if they are known."""
    names: list[str] = []
    for at, row in enumerate(comparison.rows):
        if not math.isfinite(row.peak_bytes):
            continue
        parts = memory_parts(row.group.any_run.memory) or {"peak": row.peak_bytes}
        left = 0.0
        for part, size in parts.items():
            if part not in names:
                names.append(part)
            axes.barh([at], [size], left=left, color=PART_COLOURS[part], height=0.62)
            left += size
        axes.text(left, at, f"  {show_bytes(row.peak_bytes)}", va="center", fontsize=8)
    for name in names:
        axes.barh([0], [0], color=PART_COLOURS[name], label=name.replace("_", " "))
    name_bars(axes, comparison)
    most = max(row.peak_bytes for row in comparison.rows if math.isfinite(row.peak_bytes))
    mark_bytes(axes, most)
    axes.set_xlim(0, 1.18 * most)
    if names != ["peak"]:
        add_legend(axes, len(names))


def paint_seconds(axes: Axes, comparison: Comparison) -> None:
    """Draw the median step of every mode, and of every seed that was timed as a dot."""
    for at, row in enumerate(comparison.rows):
        axes.barh(
            [at], [row.step_seconds], color=COLOURS[at % len(COLOURS)], height=0.62, alpha=0.8
        )
        seconds = [record.step_seconds for record in row.group.timed.values()]
        axes.plot(
            seconds, [at] * len(seconds), ".", color=axes.xaxis.label.get_color(), markersize=5
        )
    name_bars(axes, comparison)
    axes.margins(x=0.14)
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: show_seconds(value) if value else "0")
    )
    axes.xaxis.set_major_locator(MaxNLocator(5))


def name_bars(axes: Axes, comparison: Comparison) -> None:
    """Label horizontal bars, one per mode."""
    axes.set_yticks(
        range(len(comparison.rows)), [short(row.group.label) for row in comparison.rows]
    )
    axes.set_ylim(len(comparison.rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)


def paint_scale(axes: Axes, comparison: Comparison) -> None:
    """Draw the loss scale of every phase over the steps, for the first seed."""
    lines = 0
    for row in comparison.rows:
        record = next(iter(row.group.runs.values()))
        for phase, series in curves(record.train, "scale").items():
            if phase in row.scales:
                steps, values = thin(series)
                colour = COLOURS[lines % len(COLOURS)]
                label = f"{short(row.group.label)} {phase}"
                axes.step(steps, values, where="post", color=colour, label=label, alpha=0.85)
                lines += 1
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    label_steps(axes, "loss scale")
    add_legend(axes, lines)
