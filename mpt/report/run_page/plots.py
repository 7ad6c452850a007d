"""Curves of one run, each drawn if the run has data for it (see `mpt.report.drawing`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from mpt.report.drawing import (
    COLOURS,
    RED,
    add_legend,
    cycle_colours,
    draw_svg,
    has_finite,
    label_steps,
    mark_bytes,
    marks_alone,
    running_mean,
    set_scale,
    thin,
)
from mpt.report.reading.log_values import curve, curves, number, whole
from mpt.report.reading.run_record import RunRecord
from mpt.report.units import counted, show_bytes

MEMORY_PARTS = ("parameters", "gradients", "optimizer_state", "activations", "rest", "other")
PART_COLOURS = dict(zip((*MEMORY_PARTS, "peak"), COLOURS, strict=False))
"""The colour of each part of the peak in all plots; `peak` is one whose parts are not known."""


def draw_run(record: RunRecord) -> dict[str, str]:
    """Draw every curve of a run for which it has data: section -> SVG."""
    drawn = {
        "metric": draw_metric(record),
        "losses": draw_losses(record),
        "logged": draw_curves(record, "logged", "logged figure", "Logged figures", smooth=True),
        "learning_rate": ""
        if constant_rates(record)
        else draw_curves(record, "lr", "learning rate", "Learning rate", logarithmic=True),
        "loss_scale": draw_scale(record),
        "gradient_norm": draw_curves(
            record, "grad_norm", "gradient norm", "Gradient norms", smooth=True, logarithmic=True
        ),
        "memory": draw_memory(record.memory),
        "memory_over_time": draw_memory_curve(record),
        "throughput": draw_throughput(record),
        "device_use": draw_device_use(record),
    }
    return {name: svg for name, svg in drawn.items() if svg}


def constant_rates(record: RunRecord) -> dict[str, float]:
    """Return each optimizer's learning rate if none of them ever changes, which is a figure and no plot."""
    values = {name: set(series[1]) for name, series in curves(record.train, "lr").items()}
    return (
        {name: next(iter(own)) for name, own in values.items()}
        if all(len(own) == 1 for own in values.values())
        else {}
    )


def draw_metric(record: RunRecord) -> str:
    """Draw the evaluation figure that chooses the best checkpoint, its best value marked; one alone is a number."""
    series = curves(record.evaluations, "metrics").get(record.metric)
    if not series or not has_finite(series[1]) or len(series[1]) < 2:
        return ""

    def build(axes: Axes) -> None:
        steps, values = thin(series)
        axes.plot(
            steps, values, color=COLOURS[0], marker="o" if len(steps) < 60 else "", markersize=3.5
        )
        best = record.best
        at = next((step for step, value in zip(*series, strict=True) if value == best), None)
        if at is not None and math.isfinite(best):
            axes.plot(
                [at],
                [best],
                "o",
                color=COLOURS[1],
                markersize=7,
                fillstyle="none",
                markeredgewidth=1.8,
            )
            axes.annotate(
                f"best {best:.4g} at {at}",
                (at, best),
                xytext=(0, 8 if record.higher_is_better else -15),
                textcoords="offset points",
                ha=aligned((at - steps[0]) / (steps[-1] - steps[0])),
            )
            axes.margins(y=0.2)
        label_steps(axes, record.metric)

    return draw_svg(build, f"{record.metric} by step")


def aligned(share: float) -> str:
    """Return how words are aligned at a place, as a share of the axis, so that they do not leave the plot."""
    return "left" if share < 0.1 else "right" if share > 0.9 else "center"


def draw_losses(record: RunRecord) -> str:
    """Draw every loss: the logged values faintly, their running mean strongly."""
    return draw_curves(record, "losses", "loss", "Losses", smooth=True)


def draw_curves(
    record: RunRecord,
    key: str,
    label: str,
    name: str,
    *,
    smooth: bool = False,
    logarithmic: bool = False,
) -> str:
    """Draw one line per name that the training lines hold under `key`."""
    found = {
        line: series for line, series in curves(record.train, key).items() if has_finite(series[1])
    }
    if not found:
        return ""

    def build(axes: Axes) -> None:
        for colour, (line, series) in zip(cycle_colours(), found.items(), strict=False):
            steps, values = thin(series)
            if smooth and len(steps) > 30:
                axes.plot(steps, values, color=colour, alpha=0.22, linewidth=0.8)
                values = running_mean(values, weight=min(0.98, 1 - 12 / len(steps)))
            axes.plot(steps, values, color=colour, label=line, **marks_alone(values))
        set_scale(
            axes, [value for _, values in found.values() for value in values], wanted=logarithmic
        )
        label_steps(axes, label)
        add_legend(axes, len(found))

    return draw_svg(build, name)


def draw_scale(record: RunRecord) -> str:
    """Draw the loss scale of every phase and a mark at every step that was skipped."""
    found = {
        name: series
        for name, series in curves(record.train, "scale").items()
        if has_finite(series[1])
    }
    skipped = skipped_steps(record)
    if not found or all(set(values) == {1.0} for _, values in found.values()):
        return ""

    def build(axes: Axes) -> None:
        for colour, (phase, series) in zip(cycle_colours(), found.items(), strict=False):
            steps, values = thin(series)
            axes.step(steps, values, where="post", color=colour, label=phase)
        if skipped:
            axes.plot(
                skipped,
                [0.02] * len(skipped),
                "|",
                color=RED,
                markersize=11,
                markeredgewidth=1.4,
                label=f"skips at {counted(len(skipped), 'step')}",
                transform=axes.get_xaxis_transform(),
                clip_on=False,
            )
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        label_steps(axes, "loss scale")
        add_legend(axes, len(found) + bool(skipped))

    return draw_svg(build, "Loss scale and skipped steps")


def skipped_steps(record: RunRecord) -> list[int]:
    """Return the steps at which an update was left out: from the events or, without them, from the counters."""
    steps = {
        whole(event.get("step"), -1) for event in record.events if event.get("kind") == "overflow"
    }
    if not steps:
        for counts in curves(record.train, "skipped").values():
            before = 0.0
            for step, count in zip(*counts, strict=True):
                if count > before:
                    steps.add(step)
                before = count
    return sorted(step for step in steps if step >= 0)


def draw_throughput(record: RunRecord) -> str:
    """Draw samples per second over the run."""
    series = curve(record.train, "samples_per_second")
    if not has_finite(series[1]):
        return ""

    def build(axes: Axes) -> None:
        steps, values = thin(series)
        axes.plot(steps, values, color=COLOURS[2], **marks_alone(values))
        axes.set_ylim(bottom=0)
        label_steps(axes, "samples per second")

    return draw_svg(build, "Throughput")


def draw_device_use(record: RunRecord) -> str:
    """Draw the sampled device utilisation, if there are samples to draw."""
    series = curve(record.train, "device_utilization")
    if len(series[1]) < 2 or not has_finite(series[1]):
        return ""

    def build(axes: Axes) -> None:
        steps, values = thin(series)
        axes.plot(steps, [100 * value for value in values], color=COLOURS[1], **marks_alone(values))
        axes.set_ylim(0, 100)
        label_steps(axes, "device utilisation (%)")

    return draw_svg(build, "Device utilisation")


def draw_memory_curve(record: RunRecord) -> str:
    """Draw the peak memory up to each logged step, if it was measured more than once."""
    series = curves(record.train, "memory").get("peak_bytes")
    if series is None or len({value for value in series[1] if math.isfinite(value)}) < 2:
        return ""

    def build(axes: Axes) -> None:
        steps, values = thin(series)
        axes.plot(steps, values, color=COLOURS[4], **marks_alone(values))
        axes.set_ylim(bottom=0)
        label_steps(axes, "peak memory")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show_bytes(value)))

    return draw_svg(build, "Peak memory by step")


def draw_memory(memory: Mapping[str, Any]) -> str:
    """Draw the parts of the peak, as one bar."""
    parts = memory_parts(memory)
    if not parts:
        return ""

    def build(axes: Axes) -> None:
        left = 0.0
        for part, size in parts.items():
            axes.barh(
                [0],
                [size],
                left=left,
                color=PART_COLOURS[part],
                label=f"{part.replace('_', ' ')}  {show_bytes(size)}",
            )
            left += size
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(axis="y", visible=False)
        mark_bytes(axes, left)
        axes.set_xlim(0, left)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.02), ncols=3, borderaxespad=0)

    return draw_svg(build, "Peak memory in parts", height=1.8)


def memory_parts(memory: Mapping[str, Any]) -> dict[str, float]:
    """Return the known parts of the peak in bytes, those of no size left out."""
    parts = {part: number(memory.get(part)) for part in MEMORY_PARTS}
    return {part: size for part, size in parts.items() if math.isfinite(size) and size > 0}
