"""Plans through the planning process: what they say, what modes and tricks change, and what cannot be planned."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from mpt.config.load import load_config
from mpt.planner.client.forks import CAN_FORK
from mpt.planner.client.session import PlanError, Session
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.recipes.recipe import fits_surely
from tests.planner.configs import UNET, VIT, make

MIB = 2**20


def test_a_plan_says_where_memory_goes_and_when_it_peaks(session: Session) -> None:
    plan = session.plan([make("dcgan", "amp", 64)], budget_bytes=2**30)[0].get()
    parts = plan.by_category
    assert {"parameters", "optimizer state", "activations", "cast cache"} <= set(parts)
    assert sum(parts.values()) <= plan.allocated <= plan.reserved
    assert parts["optimizer state"] == pytest.approx(2 * parts["parameters"], rel=0.3)
    assert plan.moment.startswith("phase ")
    assert len(plan.by_module) > 10
    assert plan.by_module[0][0].split(".")[0] in ("gen", "disc")
    assert plan.fits is True
    assert plan.step_seconds > 0


def test_every_precision_mode_and_system_can_be_planned(session: Session) -> None:
    modes = ["fp32", "amp", "bf16", "O1", "O2", {"mode": "bf16-pure"}]
    configs = [make(model, mode, 8) for model in ("dcgan", UNET) for mode in modes]
    answers = session.plan(configs)
    assert [answer.error for answer in answers] == [""] * len(configs)


def test_lower_precision_recomputation_and_small_batches_each_hold_less(session: Session) -> None:
    plain, amp, recomputed, split = (
        answer.get().allocated
        for answer in session.plan(
            [
                make(UNET, "fp32", 64),
                make(UNET, "amp", 64),
                make(UNET, "fp32", 64, recompute="all"),
                make(UNET, "fp32", 64, micro_batch=16),
            ]
        )
    )
    assert amp < 0.75 * plain
    assert recomputed < plain
    assert split < 0.6 * plain


@pytest.mark.parametrize(
    ("model", "batch_size"), [(UNET, 16), ("tests.planner.models:Compares", 128)]
)
def test_the_largest_batch_fits_and_the_next_does_not(
    session: Session, model: str, batch_size: int
) -> None:
    configs, budget = partial(make, model, "amp"), 700 * MIB
    found = session.plan([configs(batch_size)], budget_bytes=budget, largest_batch=True)[0].get()
    largest, surely = found.largest_batch, found.largest_surely
    assert largest >= surely > batch_size
    sizes = (surely, largest, largest + 1)
    sure, fitting, beyond = (
        answer.get()
        for answer in session.plan([configs(one) for one in sizes], budget_bytes=budget)
    )
    assert fits_surely(sure)
    assert fitting.fits
    assert not beyond.fits


def test_planning_twice_gives_the_same_plan(session: Session) -> None:
    first, second = (answer.get() for answer in session.plan([make(VIT, "amp")] * 2))
    assert replace(first, planning_seconds=0) == replace(second, planning_seconds=0)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("LooksAtValues", "looks at a tensor's value"),
        ("Branches", "looks at a tensor's value"),
        ("Selects", "depends on tensor values"),
        ("MovesItself", "moves itself to a GPU"),
        ("LooksInHook", "looks at a tensor's value"),
        ("Prints", "looks at a tensor's value"),
        ("StaysOnCpu", "tensors of the CPU and of the GPU meet"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line_with_its_place(
    session: Session, model: str, words: str
) -> None:
    with pytest.raises(PlanError) as refused:
        session.plan([make(f"tests.planner.models:{model}")])[0].get()
    message = str(refused.value)
    assert words in message
    assert message.startswith("cannot plan: ")
    assert "models.py:" in message
    assert "\n" not in message


def test_a_sparse_gradient_is_planned_for_an_optimizer_that_takes_it(session: Session) -> None:
    sparse = make("tests.planner.models:SparseEmbedding")
    chosen = [
        load_config(
            {**sparse.to_data(), "optimizer": {"name": "sgd", "momentum": momentum}},
            allow=["tests"],
        )
        for momentum in (0.0, 0.9)
    ]
    found, *refused = session.plan([*chosen, sparse], timeline=True)
    # a row for each token; the table has 256
    assert max(found.get().timeline["gradients"]) == 8 * 256 * 10 * 4
    assert "sparse gradients were taken as if all tokens of a batch differed" in found.get().notes
    assert "momentum, grows with every step; use momentum=0" in refused[0].error
    assert "Adam does not support sparse gradients" in refused[1].error


def test_constants_outside_the_modules_and_builders_that_need_values_are_planned(
    session: Session,
) -> None:
    plan = session.plan([make("tests.planner.models:Constants")])[0].get()
    assert plan.by_category["parameters"] == 4 * 256 * 10 + 512  # the bias takes a whole block


def test_a_worker_that_dies_costs_one_plan_only() -> None:
    with Session(find_gpu("t4"), Calibration(), ["tests"]) as session:
        session._started[0].process.kill()
        session._started[0].process.wait()
        assert "ended" in session.plan([make("small_cnn")])[0].error
        assert session.plan([make("small_cnn")])[0].get().allocated > 0


@pytest.mark.skipif(not CAN_FORK, reason="workers are forked on Linux only")
def test_what_json_cannot_hold_costs_no_worker() -> None:
    with Session(find_gpu("rtx2060"), Calibration()) as session:
        with pytest.raises(TypeError):
            session.plan_own({"function": object()}, {})
        assert session.submit(make("small_cnn")).result(timeout=60).get().allocated > 0


def test_a_fork_of_a_worker_plans_as_it_does_and_dies_alone(session: Session) -> None:
    original = session._idle.get()
    pair = Session(session.gpu, session.calibration, session.allow, workers=2)
    pair._started, pair._missing = [original], 1
    pair._idle.put(original)
    config = make("small_cnn", "amp")
    plans = [answer.get() for answer in [*pair.plan([config]), *pair.plan([config] * 2)]]
    assert len({str(replace(one, planning_seconds=0)) for one in plans}) == 1
    fork = pair._started[1]
    fork.process.kill()
    errors = sorted(answer.error for answer in pair.plan([config] * 2))
    assert errors[0] == ""
    assert "the planning process ended" in errors[1]
    fork.stop()
    assert original.process.poll() is None
    session._idle.put(original)
