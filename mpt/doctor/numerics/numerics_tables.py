"""The tables of a model's numerics: parameters, operators, and each module's distance to float16's ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from mpt.doctor.measuring.instrument import Result
from mpt.doctor.numerics.numerics import Examination, operator_errors


def parameter_rows(found: Examination, step: int) -> list[dict[str, Any]]:
    """Return a row per parameter: its gradient's error and cosine, and the fate of its update."""
    rows = []
    for one in found.parameters:
        effect = found.updates.get(one.name)
        rows.append(
            {
                "step": step,
                "phase": found.phase,
                "parameter": one.name,
                "gradient_error": rounded(one.error),
                "from_rounding": rounded(one.from_rounding),
                "cosine": rounded(one.cosine, 6),
                "share_of_gradient": rounded(one.share),
                "still_after_update": rounded(effect.still) if effect is not None else None,
                "update_that_arrives": rounded(effect.arrived) if effect is not None else None,
            }
        )
    return rows


def operator_rows(found: Examination, step: int) -> list[dict[str, Any]]:
    """Return a row per operator: its range, the losses in float16, and its error in the mode."""
    return [
        {
            "step": step,
            "phase": found.phase,
            "module": one.module,
            "operator": ("backward of " if one.is_backward else "") + one.operator,
            "line": one.line,
            "relative_error": rounded(error, 6),
            "largest": rounded(one.largest, 6),
            "headroom_bits": rounded(one.headroom_bits, 2),
            "underflow": round(one.underflow, 4),
            "subnormal": round(one.subnormal, 4),
        }
        for one, error in operator_errors(found.results, found.seen)
    ]


def rounded(value: float, places: int = 4) -> float | None:
    """Return a number for a table; None for one that is not finite."""
    return round(value, places) if math.isfinite(value) else None


def ranges_of(phase: str, results: Sequence[Result], scale: float) -> list[dict[str, Any]]:
    """Return a row per module: the effects of float16 on its results and, times the loss scale, to its gradients."""
    rows: dict[str, dict[str, Any]] = {}
    for one in results:
        row = rows.setdefault(
            one.module,
            {
                "phase": phase,
                "module": one.module,
                "forward_headroom_bits": None,
                "gradient_headroom_bits": None,
                "forward_underflow": 0.0,
                "gradient_underflow": 0.0,
                "subnormal": 0.0,
            },
        )
        way = "gradient" if one.is_backward else "forward"
        bits = one.headroom_bits - (math.log2(scale) if one.is_backward else 0.0)
        if math.isfinite(bits):
            before = row[f"{way}_headroom_bits"]
            row[f"{way}_headroom_bits"] = round(bits if before is None else min(bits, before), 2)
        small = one.underflow_at(scale if one.is_backward else 1.0)
        row[f"{way}_underflow"] = round(max(row[f"{way}_underflow"], small), 4)
        row["subnormal"] = round(max(row["subnormal"], one.subnormal), 4)
    return list(rows.values())


def exponents_of(
    phase: str, step: int, results: Sequence[Result], scale: float
) -> list[dict[str, Any]]:
    """Return how often which power of two occurs among a step's values, forward and, times the loss scale, backward.

    From the samples that were kept of each result, weighted by its size. Zeros and values that are not finite are left
    out.
    """
    rows = []
    for is_backward in (False, True):
        counts: dict[int, float] = {}
        for one in results:
            if one.is_backward != is_backward:
                continue
            values = one.sample[torch.isfinite(one.sample) & (one.sample != 0)].abs()
            if not len(values):
                continue
            powers = Counter(torch.frexp(values * (scale if is_backward else 1.0))[1].tolist())
            for power, count in powers.items():
                counts[power - 1] = (
                    counts.get(power - 1, 0.0) + count * one.count / one.sample.numel()
                )
        total = sum(counts.values())
        shares = (
            {str(power): round(count / total, 6) for power, count in sorted(counts.items())}
            if total
            else {}
        )
        rows.append(
            {
                "phase": phase,
                "step": step,
                "way": "gradient" if is_backward else "forward",
                "shares": shares,
            }
        )
    return rows
