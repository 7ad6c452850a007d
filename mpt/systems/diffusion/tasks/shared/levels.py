"""Test losses by level of noise, as a section of a run's page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mpt.metrics.shared.float64 import in_float64

LEVELS = 10
"""How many levels the test set is measured at."""


def section(levels: Sequence[float], losses_nl: Tensor, targets_nl: Tensor) -> dict[str, Any]:
    """Return the page's data of squared errors and mean squared targets (samples, levels), lowest noise first.

    The share that is left unexplained, error over target, is 1 for a network that answers 0.
    """
    losses, shares = means(losses_nl), unexplained(losses_nl, targets_nl)
    places = [(number + 0.5) / len(losses) for number in range(len(losses))]
    rows = [
        [f"{place:.2f}", f"{level:.4g}", f"{loss:.4f}", f"{share:.3f}"]
        for place, level, loss, share in zip(places, levels, losses, shares, strict=True)
    ]
    line = {"name": "unexplained", "x": places, "y": shares}
    return {
        "title": "Loss by noise level",
        "note": "Test images at fixed levels, which are evenly spaced quantiles of the levels that training draws. "
        "Unexplained is the squared error over the target's mean square: 1 for a network that answers 0.",
        "table": {"head": ["quantile", "level", "squared error", "unexplained"], "rows": rows},
        "charts": [
            {
                "title": "Unexplained share of the target",
                "x": "quantile of the noise level",
                "y": "",
                "lines": [line],
            }
        ],
        "matrix": {"title": "", "names": [], "counts": [], "totals": []},
    }


def means(values_nl: Tensor) -> list[float]:
    """Return the mean over the samples for each level."""
    found: list[float] = in_float64(values_nl).mean(0).tolist()
    return found


def unexplained(losses_nl: Tensor, targets_nl: Tensor) -> list[float]:
    """Return squared errors over mean squared targets for each level."""
    found: list[float] = (in_float64(losses_nl).mean(0) / in_float64(targets_nl).mean(0)).tolist()
    return found
