"""A language model from outside of the package: token ids, no pictures; trained small, planned with wide blocks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import mpt

PARTS = Path(__file__).parent / "outside_parts"
LARGE = PARTS / "gpt2_xl.yaml"


@pytest.fixture(autouse=True)
def no_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPT_PARTS", "")


@pytest.mark.parametrize("precision", ["bf16-sr", "O2"])
def test_it_learns_which_tokens_may_follow(tmp_path: Path, precision: str) -> None:
    small = {
        "model": "decoder",
        "dataset": "letters",
        "optimizer": {"name": "schedule_free", "lr": 1e-2},
    }
    training = {"steps": 40, "batch_size": 32, "evaluate_every": 0, "checkpoint_every": 0}
    config = mpt.load({**small, "precision": precision, "train": training}, parts=[PARTS])
    run = mpt.train(config, runs=tmp_path)
    assert math.log(2) < run.figures["nats"] < 0.8 * math.log(31)  # every other token is a coin's


@pytest.mark.slow
def test_half_weights_are_planned_once_with_the_peak_in_the_step() -> None:
    """The peak is the weights and a copy of the largest, which the shared embedding is: building takes no more."""
    config = mpt.load(LARGE, "model.layers=6", "precision=bf16-sr", parts=[PARTS])
    plan = mpt.plan(config).plan
    width, vocabulary, length = 1600, 50257, 513
    embedding = vocabulary * width
    block = 12 * width**2 + 13 * width
    weights = 2 * (6 * block + embedding + length * width + 2 * width)
    assert plan.moment.startswith("phase net, backward")
    # and the table of random numbers, and a batch
    assert 0 <= plan.held_throughout - weights < 32 * 2**20
    assert plan.allocated < weights + 4 * 2 * embedding
