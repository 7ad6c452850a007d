"""Communication hooks of DistributedDataParallel are planned with what they hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpt.planner.client.session import Session
from tests.planner.own import reduced_steps
from tests.planner.own.own_plans import plan_of

STEPS = Path(reduced_steps.__file__)


@pytest.mark.parametrize("kind", ["none", "fp16", "power"])
def test_hooks_hold_as_much_as_a_process_of_gloo(kind: str) -> None:
    """They were refused for a logger that the stand-in lacks."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.planner.own.reduced_steps", kind],
        cwd=STEPS.parents[3], capture_output=True, text=True, check=True,
    )  # fmt: skip
    planned, real = map(int, done.stdout.split())
    if kind == "none":
        assert planned == real
    else:  # a thread of gloo lets go of a bucket's products sooner or later, at the latest after all are exchanged
        assert 0.8 * planned < real <= planned


def test_power_keeps_an_error_as_large_as_the_gradients(session: Session) -> None:
    none, power = (
        plan_of(session, STEPS, "compressed", {"kind": kind}, with_changes=False).allocated
        for kind in ("none", "power")
    )
    assert power - none > 5 * 1536 * 1536 * 4


def test_checkpoints_in_parts_of_all_cards_are_not_written(
    session: Session, tmp_path: Path
) -> None:
    """They were refused for NCCL's version, which a build for CPUs has not, and for what lay in a fake file."""
    plan = plan_of(session, STEPS, "saved_in_parts", {"folder": str(tmp_path)})
    assert plan.by_category["optimizer state"] > 256 * 256 * 4
    assert not list(tmp_path.iterdir())
