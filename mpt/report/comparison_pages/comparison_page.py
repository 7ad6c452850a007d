"""A comparison as files: `comparison.md`, `.json`, `.png` and one self-contained `.html`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mpt.errors import InputOutputError
from mpt.report.comparing.comparison import Comparison, Row
from mpt.report.comparing.statistics import Verdict
from mpt.report.comparison_pages.comparison_plots import draw_panels, draw_png
from mpt.report.run_page.page import environment, plain
from mpt.report.run_page.pictures import side_by_side
from mpt.report.units import counted, show_figure
from mpt.run.process.files import write_atomically


def write_comparison(path: Path, comparison: Comparison) -> None:
    """Write the four files into a folder, making it. Raises InputOutputError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputOutputError(
            f"{path} could not be made: {error.strerror}. Name a folder that can be written."
        ) from error
    content = describe_comparison(path.resolve().name, comparison)
    template = environment()
    write_atomically(
        path / "comparison.json",
        json.dumps(plain(as_json(comparison)), indent=1, allow_nan=False) + "\n",
    )
    write_atomically(
        path / "comparison.md", template.get_template("comparison.md.j2").render(**content)
    )
    plots = {caption: Markup(svg) for caption, svg in draw_panels(comparison).items()}
    page = template.get_template("comparison.html.j2").render(
        **content, plots=plots, grids=side_by_side(comparison)
    )
    write_atomically(path / "comparison.html", page)
    write_atomically(path / "comparison.png", draw_png(comparison))


def describe_comparison(name: str, comparison: Comparison) -> dict[str, Any]:
    """Return everything that the templates say."""
    baseline = comparison.baseline
    example = baseline.group.any_run
    return {
        "name": name,
        "comparison": comparison,
        "model": example.model,
        "dataset": example.dataset,
        "steps": example.steps,
        "verdicts": [
            (row.group.label, row.verdict, say_verdict(row, comparison))
            for row in comparison.rows
            if row.verdict
        ],
        "spread": say_spread(comparison),
        "reasons": [
            (row.group.label, row.group.any_run.dtype, row.group.any_run.reason)
            for row in comparison.rows
        ],
        "environment": example.environment,
    }


def say_verdict(row: Row, comparison: Comparison) -> str:
    """Say one verdict in one line."""
    verdict = row.verdict
    assert verdict is not None
    seeds = counted(verdict.seeds, "paired seed")
    return (
        f"{row.group.label} against {comparison.baseline.group.label}, {comparison.metric}, {seeds}: "
        f"{verdict.headline}. {verdict.reason}"
    )


def say_spread(comparison: Comparison) -> str:
    """Say how far the baseline's own seeds lie apart."""
    base, label = comparison.baseline.final, comparison.baseline.group.label
    if base.count < 2:
        return f"{label} was run with one seed, so its own spread between seeds is not known."
    if not math.isfinite(base.mean):
        return f"{label} has no finite {comparison.metric} for every seed, so its own spread is not known."
    share = f" ({100 * base.deviation / abs(base.mean):.2g} % of the mean)" if base.mean else ""
    return (
        f"{label}'s own spread over {base.count} seeds: mean {show_figure(base.mean)}, standard deviation "
        f"{show_figure(base.deviation)}{share}, from {show_figure(base.low)} to {show_figure(base.high)}."
    )


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain data."""
    return {
        "metric": comparison.metric,
        "higher_is_better": comparison.higher_is_better,
        "margin": {"size": comparison.margin.size, "relative": comparison.margin.relative},
        "seeds": list(comparison.seeds),
        "baseline": comparison.baseline.group.label,
        "passes": comparison.passes,
        "notes": list(comparison.notes),
        "modes": [row_as_json(row) for row in comparison.rows],
    }


def row_as_json(row: Row) -> dict[str, Any]:
    """Return one mode as plain data."""
    example = row.group.any_run
    return {
        "mode": row.group.label,
        "dtype": example.dtype,
        "reason": example.reason,
        "peak_bytes": row.peak_bytes,
        "peak_ratio": row.peak_ratio,
        "memory": dict(example.memory),
        "step_seconds": row.step_seconds,
        "step_ratio": row.step_ratio,
        "samples_per_second": row.samples_per_second,
        "throughput_ratio": row.throughput_ratio,
        "skipped": row.skipped,
        "loss_scale": {
            phase: dict(zip(("first", "lowest", "last"), ends))
            for phase, ends in row.scales.items()
        },
        "final": {**asdict(row.final), "ratio": row.final_ratio},
        "best": {**asdict(row.best), "ratio": row.best_ratio},
        "runs": {
            seed: {"path": str(record.path), "final": row.group.finals[seed], "best": record.best}
            for seed, record in row.group.runs.items()
        },
        "verdict": None if row.verdict is None else verdict_as_json(row.verdict),
    }


def verdict_as_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as plain data."""
    return {
        **{key: value for key, value in asdict(verdict).items() if key != "margin"},
        "headline": verdict.headline,
    }
