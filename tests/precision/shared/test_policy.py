"""Which overflows skip a step: those of a scale that will fall for the next one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import parts


@pytest.mark.parametrize(
    ("scale", "is_skipped"), [({"init_scale": 128.0}, True), ({"loss_scale": 128.0}, False)]
)
def test_an_overflow_skips_the_step_under_a_dynamic_scale_and_not_under_a_static_one(
    scale: dict[str, Any], is_skipped: bool
) -> None:
    run = parts.classifier({"mode": "amp", "dtype": "float16", **scale})
    phase = run.phases[0]
    (loss,) = phase.losses(parts.batch())
    loss.value.backward()
    next(phase.module.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
    assert run.precision.step(phase, None).skipped is is_skipped
    assert run.precision.scalers["net"].scale == (64.0 if is_skipped else 128.0)
