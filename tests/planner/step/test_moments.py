"""What a run does beside its steps is planned too: evaluation, samples, preview."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.planner.answers.plan import PlannedMoment
from mpt.planner.client.session import Session
from mpt.planner.recipes.beside import make_room, moments_that_do_not_fit
from mpt.planner.recipes.words import describe_too_large
from mpt.planner.step.moments import Moment, trace_moments
from mpt.planner.trace.recorder import Recorder
from mpt.tasks.classify import Classify
from tests.engine import parts
from tests.planner.configs import UNET, make
from tests.planner.made_plans import make_plan


def test_an_evaluation_of_a_whole_batch_exceeds_the_steps_of_small_micro_batches(
    session: Session,
) -> None:
    config = make(UNET, batch_size=256, micro_batch=8)
    plan = session.plan([config], whole_run=True)[0].get()
    found = plan.moments["evaluation"]
    assert found.allocated > plan.allocated
    assert found.grown > 0
    assert found.fits is None
    budget = plan.context_bytes + plan.reserved + found.grown // 2
    plan = session.plan([config], whole_run=True, budget_bytes=budget)[0].get()
    assert plan.fits
    assert moments_that_do_not_fit(plan) == ["evaluation"]


def test_the_steps_are_planned_as_without_it_and_an_evaluation_holds_less_than_training(
    session: Session,
) -> None:
    config = make(UNET, batch_size=256)
    whole, steps = (session.plan([config], whole_run=wanted)[0].get() for wanted in (True, False))
    for name in (
        "allocated",
        "reserved",
        "by_category",
        "by_module",
        "moment",
        "step_seconds",
        "timeline",
    ):
        assert getattr(whole, name) == getattr(steps, name)
    assert steps.moments == {}
    assert list(whole.moments) == [
        "evaluation",
        "saving",
        "resume",
    ]  # a classifier has no preview, and makes no samples
    assert whole.moments["evaluation"].allocated < whole.allocated


def test_samples_and_previews_are_named(session: Session) -> None:
    config = load_config(
        {
            "model": {"name": "dcgan", "features": 4, "image_size": 16},
            "dataset": "digits",
            "train": {"batch_size": 8},
        }
    )
    found = session.plan([config], whole_run=True)[0].get().moments
    assert list(found) == [
        "evaluation",
        "samples for the evaluation",
        "preview",
        "saving",
        "resume",
    ]
    assert all(one.allocated > 0 for one in found.values())
    assert not any(one.reads_values for one in found.values())


def peek(self: Classify, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Look at values, which a fake tensor does not have."""
    image = batch["image"]
    assert image[:, 0, 0, 0].tolist() == [0.0] * len(image)
    assert image.cpu().numpy().sum() == 0
    return {} if image.sum().item() > 0 else {"image": image}


def count(self: Classify, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Make a tensor whose size depends on values."""
    return {"image": batch["image"][batch["image"] > 0]}


@pytest.mark.parametrize(
    ("method", "problem"), [(peek, ""), (count, "DynamicOutputShapeException")]
)
def test_values_that_are_read_are_zeros_and_shapes_that_depend_on_them_are_not_planned(
    monkeypatch: pytest.MonkeyPatch, method: Callable[..., Any], problem: str
) -> None:
    monkeypatch.setattr(Classify, "evaluate_batch", method)
    config = load_config(
        {
            "model": {"name": "small_cnn", "features": 4, "image_size": 16},
            "dataset": "digits",
            "train": {"steps": 1},
        }
    )
    recorder = Recorder("cpu")
    with FakeTensorMode(), recorder.recording():
        run = build_run(config, torch.device("cpu"), parts.DIGITS, fake=True)
        found = list(trace_moments(run, recorder, 4, lambda error: type(error).__name__))
    assert found[0] == Moment("evaluation", found[0].start, found[0].stop, problem, not problem)
    assert found[1].name == "saving"


def test_state_that_is_parked_makes_room_for_an_evaluation(session: Session) -> None:
    settings = {
        "model": {"name": "small_cnn", "features": 256, "image_size": 16},
        "dataset": {"name": "digits", "image_size": 16},
        "optimizer": "adamw",
        "precision": "fp32",
        "train": {"batch_size": 256},
        "memory": {"micro_batch": 8},
    }
    config = load_config(settings)
    free, parked = (
        session.plan([load_config({**settings, "memory": memory})], whole_run=True)[0].get()
        for memory in ({"micro_batch": 8}, {"micro_batch": 8, "park_optimizer": True})
    )
    assert (free.allocated, free.reserved) == (parked.allocated, parked.reserved)
    saved = free.moments["evaluation"].allocated - parked.moments["evaluation"].allocated
    assert saved == pytest.approx(free.by_category["optimizer state"], rel=0.02)
    budget = (
        free.context_bytes
        + (free.moments["evaluation"].allocated + parked.moments["evaluation"].allocated) // 2
    )
    plan = session.plan([config], whole_run=True, budget_bytes=budget)[0].get()
    assert plan.fits
    assert moments_that_do_not_fit(plan) == ["evaluation"]
    room = make_room(session, config, plan, budget)
    assert room is not None
    assert room.patch == {"memory": {"park_optimizer": True}}
    (said,) = describe_too_large(plan, room)
    assert "; memory.park_optimizer=true makes room for it" in said
    (said,) = describe_too_large(plan, None)
    assert "use a smaller train.batch_size" in said


def planned_by_batch(bytes_of: Callable[[int], int], budget: int) -> Any:
    """Return a session whose steps fit, and whose evaluations take so many bytes by their batch."""

    def plan(configs: list[Any], **_: Any) -> list[Any]:
        batch = configs[0].train.batch_size
        size = bytes_of(batch)
        found = make_plan(
            batch_size=batch,
            fits=True,
            budget_bytes=budget,
            moments={"evaluation": PlannedMoment(reserved=size, fits=size <= budget)},
        )
        return [SimpleNamespace(found=found)]

    return SimpleNamespace(plan=plan)


@pytest.mark.parametrize(
    ("fixed", "batch", "said"),
    [
        (100, 64, "train.batch_size=55 makes room for it"),
        # as of cuBLAS's workspace
        (1000, 64, "no train.batch_size makes room for it: 0 MiB even with one sample"),
        (1000, 1, "no train.batch_size makes room for it"),
    ],
)
def test_a_smaller_batch_is_advised_only_if_one_makes_room(
    fixed: int, batch: int, said: str
) -> None:
    config = make("small_cnn", batch_size=batch)
    session = planned_by_batch(lambda samples: fixed + 10 * samples, 680)
    plan = session.plan([config])[0].found
    (sentence,) = describe_too_large(plan, make_room(session, config, plan, 680))
    assert said in sentence
