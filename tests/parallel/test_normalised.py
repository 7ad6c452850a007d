"""Losses divided by the total weight of a batch whose ranks weigh very differently: one normalisation for all ways.

The weights are those of classes, or 1 for samples with a label and 0 for those that are left out.

Judged by update distance: how far the weights of several ranks are from one process's, as a share of how far one
process has moved them. Weights are trained before, for those of the first step hide what is wrong.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.engine.step.rank_inputs import inputs_of
from mpt.engine.step.step import update
from mpt.parallel.local import full, is_sharded
from mpt.parallel.shard import like
from mpt.parallel.start import joined
from mpt.parallel.world import ALONE, World
from mpt.seams import IGNORED, Batch, Run
from tests.engine.parts import DIGITS

from .forked import run_ranks

BATCH = 8
TRAINED_STEPS = 20
STEPS = 3
TASKS: dict[str, dict[str, Any]] = {
    "class weights": {"class_weights": {"0": 0.01, "1": 40.0}},
    "labels left out": {},
    "focal, labels left out": {"loss": "focal"},
}
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, synchronised BatchNorm": {"sync_batchnorm": True},
    "full": {"strategy": "fsdp", "sync_batchnorm": True},
    "grad": {"strategy": "fsdp", "shard": "grad", "sync_batchnorm": True},
    "hybrid": {"strategy": "fsdp", "shard": "hybrid", "shard_ranks": 2, "sync_batchnorm": True},
}


def settings(way: str, micro_batch: int | None, task: str = "class weights") -> dict[str, Any]:
    return {
        "model": {"name": "small_cnn", "features": 4},
        "dataset": "digits",
        "precision": "fp32",
        "optimizer": {"name": "sgd", "lr": 0.05},
        "task": TASKS[task],
        "train": {"steps": 1, "batch_size": BATCH},
        "memory": {"micro_batch": micro_batch},
        "parallel": WAYS[way],
    }


def samples(step: int, task: str = "class weights") -> Batch:
    """Return a batch whose first rank has samples that hardly count or have no label, and the last one has others."""
    numbers = torch.Generator().manual_seed(step)
    image = torch.rand(BATCH, *DIGITS.fields["image"].shape, generator=numbers)
    label = torch.tensor([0] * (BATCH // 2) + [2, 1, 1, 3])
    image = image + 0.1 * label.view(-1, 1, 1, 1)
    if task != "class weights":
        label[[0, 2, 3]] = IGNORED
    return {"image": image, "label": label}


def build(
    world: World, way: str, micro_batch: int | None, has_norm: bool, task: str = "class weights"
) -> Run:
    config = load_config(settings(way, micro_batch, task))
    run = build_run(config, torch.device("cpu"), replace(DIGITS, extra={}), world=world)
    for module in [] if has_norm else list(run.task.modules["net"].modules()):
        # a rank has statistics of its own: with them nothing is equal
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return run


def weights_of(run: Run) -> Tensor:
    return torch.cat(
        [full(p).detach().flatten().clone() for p in run.task.modules["net"].parameters()]
    )


@cache
def trained(has_norm: bool) -> tuple[Tensor, ...]:
    """Return weights that one process has trained."""
    run = build(ALONE, "ddp", None, has_norm)
    for step in range(TRAINED_STEPS):
        update(run, run.phases[0], samples(step))
    return tuple(p.detach().clone() for p in run.task.modules["net"].parameters())


def go_on(run: Run, start: tuple[Tensor, ...], task: str = "class weights") -> dict[str, Any]:
    """Take some steps from trained weights; return the weights before and after, and the losses."""
    for parameter, value in zip(run.task.modules["net"].parameters(), start, strict=True):
        parameter.data.copy_(like(value, parameter) if is_sharded(parameter) else value)
    first, losses = weights_of(run), []
    for step in range(STEPS):
        whole = samples(TRAINED_STEPS + step, task)
        begin, end = run.world.place(BATCH)
        part = {name: value[begin:end] for name, value in whole.items()}
        done = update(run, run.phases[0], inputs_of(run, part, BATCH))
        losses.append(float(run.world.add(done.losses)["loss"]))
    return {"first": first.tolist(), "last": weights_of(run).tolist(), "losses": losses}


def on_rank(
    rank: int,
    way: str,
    micro_batch: int | None,
    has_norm: bool,
    start: tuple[Tensor, ...],
    task: str,
) -> dict[str, Any]:
    with joined(load_config(settings(way, micro_batch, task))) as world:
        return go_on(build(world, way, micro_batch, has_norm, task), start, task)


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return how far two trainings are apart, as a share of how far the first has moved."""
    first, last, others = (
        torch.tensor(found) for found in (one["first"], one["last"], other["last"])
    )
    return float((last - others).norm() / (last - first).norm())


CASES = [
    ("class weights", "ddp", 2, None),
    ("class weights", "ddp", 3, 2),
    ("class weights", "ddp, synchronised BatchNorm", 2, None),
    ("class weights", "full", 2, None),
    ("class weights", "full", 2, 2),
    ("class weights", "grad", 2, 3),
    ("labels left out", "ddp", 4, 1),
    ("focal, labels left out", "ddp", 2, 3),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("class weights", "ddp", 2, 1),
            ("labels left out", "ddp", 2, None),
            ("labels left out", "full", 2, 2),
            ("focal, labels left out", "full", 2, None),
        )
    ),
    *(
        pytest.param(task, way, 4, None, marks=pytest.mark.slow)
        for task in TASKS
        for way in ("hybrid", "ddp", "full")
    ),
]


@pytest.mark.parametrize(("task", "way", "size", "micro_batch"), CASES)
def test_ranks_of_very_unequal_weight_train_what_one_process_trains(
    task: str, way: str, size: int, micro_batch: int | None
) -> None:
    has_norm = way != "ddp" and micro_batch is None
    start = trained(has_norm)
    ranks = run_ranks(size, on_rank, way, micro_batch, has_norm, start, task)
    torch.set_num_threads(1)
    assert all(isinstance(one, dict) for one in ranks), ranks
    alone = go_on(build(ALONE, "ddp", None, has_norm, task), start, task)
    assert distance(alone, ranks[0]) < 1e-5
    assert ranks[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert all(one["last"] == ranks[0]["last"] for one in ranks)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("micro_batch", [1, 3, 4])
def test_micro_batches_of_very_unequal_weight_train_what_the_whole_batch_trains(
    micro_batch: int, task: str
) -> None:
    start = trained(False)
    alone = go_on(build(ALONE, "ddp", None, False, task), start, task)
    parts = go_on(build(ALONE, "ddp", micro_batch, False, task), start, task)
    assert distance(alone, parts) < 1e-5
    assert parts["losses"] == pytest.approx(alone["losses"], rel=1e-5)


def fail_on_rank(rank: int, micro_batch: int | None, fails_at: int) -> str:
    """Fail in the forward of one part on the last rank, and return what the update raised; then go on."""
    with joined(load_config(settings("ddp", micro_batch))) as world:
        run = build(world, "ddp", micro_batch, False)
        phase, calls = run.phases[0], [0]

        def losses(part: Batch) -> Any:
            calls[0] += 1
            if rank == 1 and calls[0] == fails_at:
                raise ArithmeticError("a mistake of the program")
            return phase.losses(part)

        part = {name: value[slice(*world.place(BATCH))] for name, value in samples(0).items()}
        said = ""
        try:
            update(run, replace(phase, losses=losses), inputs_of(run, part, BATCH))
        except Exception as error:
            said = type(error).__name__
        done = update(run, phase, inputs_of(run, part, BATCH))
        return f"{said}, {float(world.add(done.losses)['loss']):.3f}"


@pytest.mark.parametrize(("micro_batch", "fails_at"), [(None, 1), (2, 1), (2, 2)])
def test_a_rank_that_fails_before_its_weight_is_known_leaves_nobody_waiting(
    micro_batch: int | None, fails_at: int
) -> None:
    told = run_ranks(2, fail_on_rank, micro_batch, fails_at)
    assert [one.split(", ")[0] for one in told] == ["PeerFaultError", "ArithmeticError"]
    assert told[0].split(", ")[1] == told[1].split(", ")[1]
