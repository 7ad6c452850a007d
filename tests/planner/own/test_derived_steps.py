"""Derivatives of derivatives are planned as real tensors hold them."""

from __future__ import annotations

from pathlib import Path

import mpt
from scripts.plans.live_bytes import live_bytes
from tests.planner.own import derived_steps

STEPS = Path(derived_steps.__file__)


def test_hessians_of_each_sample_hold_as_much_as_real_ones() -> None:
    """Views of zeros without memory came out on a device of their own, which was refused."""
    given = [({"where": str(STEPS), "function": "bent"}, {"layers": one}) for one in (1, 2)]
    for planned, measured in live_bytes(*given):
        assert planned == measured > 0
    assert mpt.plan_step(derived_steps.bent, gpu="rtx3060").plan.allocated > 0
