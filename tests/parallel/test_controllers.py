"""Controllers that a task steers by what it sees of the samples follow the whole batch on several ranks too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.engine.state.moving_averages import follow_step
from mpt.engine.step.rank_inputs import inputs_of
from mpt.engine.step.step import update
from mpt.parallel.start import joined
from mpt.parallel.world import ALONE, World
from tests.engine.parts import DIGITS, batch

from .forked import run_ranks

SETTINGS: dict[str, Any] = {
    "model": {"name": "began", "image_size": 16},
    "task": {"balance_rate": 0.02, "balance": 0.7},
    "dataset": "digits",
    "precision": "fp32",
    "optimizer": {"name": "sgd", "lr": 1e-3},
    "train": {"steps": 3, "batch_size": 8},
}


def balances(world: World) -> list[float]:
    """Return BEGAN's balance after each of three steps. Some samples raise it, and some would lower it below 0."""
    run = build_run(load_config(SETTINGS), torch.device("cpu"), DIGITS, world=world)
    found = []
    for step in range(3):
        whole = batch(step)
        whole["image"] *= torch.tensor([0.1, 0.0, 1.0, 1.0, 0.0, 0.1, 0.2, 1.0]).view(-1, 1, 1, 1)
        start, stop = world.place(8)
        part = inputs_of(run, {name: value[start:stop] for name, value in whole.items()}, 8)
        torch.manual_seed(step)
        for phase in run.phases:
            update(run, phase, part)
        follow_step(run, step)
        found.append(float(run.task.state_dict()["balance"]))
    return found


def on_rank(rank: int) -> list[float]:
    with joined(load_config(SETTINGS)) as world:
        return balances(world)


@pytest.mark.parametrize("size", [2, 4])
def test_began_s_balance_is_that_of_the_whole_batch(size: int) -> None:
    ranks = run_ranks(size, on_rank)
    torch.set_num_threads(1)
    alone = balances(ALONE)
    assert 0 < alone[-1] < 1
    assert all(one == pytest.approx(alone, abs=1e-6) for one in ranks), (alone, ranks)
