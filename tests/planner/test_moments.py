"""What a run does beside its steps is planned too: evaluation, samples, preview."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mpt.commands.plan_tables import moments_that_do_not_fit
from mpt.config.load import load_config
from mpt.engine.build import build_run
from mpt.planner.moments import trace_moments
from mpt.planner.session import Session
from mpt.planner.trace import Recorder
from mpt.tasks.classify import Classify
from tests.engine import parts
from tests.planner.configs import UNET, make


def test_an_evaluation_of_a_whole_batch_exceeds_the_steps_of_small_micro_batches(session: Session) -> None:
    config = make(UNET, batch_size=1024, micro_batch=4)
    plan = session.plan([config], whole_run=True)[0].get()
    found = plan["moments"]["evaluation"]
    assert found["allocated"] > plan["allocated"]
    assert found["grown"] > 0
    assert found["fits"] is None
    budget = plan["context_bytes"] + plan["reserved"] + found["grown"] // 2
    plan = session.plan([config], whole_run=True, budget_bytes=budget)[0].get()
    assert plan["fits"]
    assert moments_that_do_not_fit(plan) == ["evaluation"]


def test_the_steps_are_planned_as_without_it_and_an_evaluation_holds_less_than_training(session: Session) -> None:
    config = make(UNET, batch_size=256)
    whole, steps = (session.plan([config], whole_run=wanted)[0].get() for wanted in (True, False))
    for name in ("allocated", "reserved", "by_category", "by_module", "moment", "step_seconds", "timeline"):
        assert whole[name] == steps[name]
    assert steps["moments"] == {}
    assert list(whole["moments"]) == ["evaluation"]  # a classifier has no preview, and makes no samples
    assert whole["moments"]["evaluation"]["allocated"] < whole["allocated"]


def test_samples_and_previews_are_named(session: Session) -> None:
    config = load_config(
        {"model": {"name": "dcgan", "features": 4, "image_size": 16}, "dataset": "digits", "train": {"batch_size": 8}}
    )
    found = session.plan([config], whole_run=True)[0].get()["moments"]
    assert list(found) == ["evaluation", "samples for the evaluation", "preview"]
    assert all(one["allocated"] > 0 for one in found.values())


def peek(self: Classify, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Look at a value, which a fake tensor does not have."""
    return {} if batch["image"].sum().item() > 0 else {"image": batch["image"]}


def test_an_evaluation_that_looks_at_values_is_named_and_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Classify, "evaluate_batch", peek)
    config = load_config(
        {"model": {"name": "small_cnn", "features": 4, "image_size": 16}, "dataset": "digits", "train": {"steps": 1}}
    )
    recorder = Recorder("cpu")
    with FakeTensorMode(), recorder.recording():
        run = build_run(config, torch.device("cpu"), parts.DIGITS, fake=True)
        found = list(trace_moments(run, recorder, 4, lambda error: type(error).__name__))
    assert [(one.name, one.problem) for one in found] == [("evaluation", "DataDependentOutputException")]
