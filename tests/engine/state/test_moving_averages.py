"""The engine keeps moving averages of the weights, for any task, and evaluates by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpt.config.load import load_config
from mpt.config.schema import MovingAverage
from mpt.engine.state.evaluation import apart_from_training
from mpt.engine.state.moving_averages import (
    add_averages,
    averages_in_place,
    decay_at,
    fill_averages,
    follow,
    follow_step,
    make_twin,
)
from mpt.engine.state.state import capture, restore
from mpt.engine.step.step import update
from mpt.errors import ConfigError
from mpt.seams import Phase, Task
from tests.engine import parts

CNN = {"model": {"name": "small_cnn", "features": 4}, "dataset": "digits"}


class TwoHeads(Task):
    """A task that knows nothing of averages: it holds its networks in three ways."""

    metric, higher_is_better = "error", False

    def __init__(self) -> None:
        self.body, heads = nn.Linear(2, 2), [nn.Linear(2, 1), nn.Linear(2, 1)]
        self.heads = heads
        self.by_name = {"body": self.body}
        self.modules = {"body": self.body, "first": heads[0], "second": heads[1]}
        self.trainable = {"all": nn.ModuleDict(self.modules)}

    def phases(self, optimizers: Mapping[str, Optimizer]) -> Sequence[Phase]:
        return []


class Built:
    """What of a run the averages look at."""

    def __init__(self, task: Task, averages: Mapping[str, nn.Module]) -> None:
        self.task, self.averages = task, averages


def test_a_task_that_knows_nothing_of_averages_is_evaluated_by_them() -> None:
    task: Any = TwoHeads()
    own = {**task.modules}
    twins = add_averages(task, MovingAverage(decay=0.9))
    assert set(task.modules) == {"body", "first", "second", "body_ema", "first_ema", "second_ema"}
    run: Any = Built(task, twins)
    with averages_in_place(run):
        assert task.body is task.by_name["body"] is task.modules["body"] is twins["body"]
        assert task.heads == [twins["first"], twins["second"]]
    assert task.body is task.by_name["body"] is own["body"]
    assert task.heads == [own["first"], own["second"]]


def test_weights_are_averaged_saved_and_restored_for_a_task_without_a_setting_for_it() -> None:
    config = {
        "model": {"name": "vae", "image_size": 16},
        "train": {"ema": 0.5, "batch_size": 8, "steps": 2},
    }
    run = parts.classifier(model=config["model"], train=config["train"])
    batch = parts.batch()
    for step in range(2):
        update(run, run.phases[0], batch)
        follow_step(run, step)
    assert set(run.averages) == {"encoder", "decoder"}
    saved = capture(run)
    mean, own = (
        next(saved["modules"][name][k] for k in saved["modules"][name])
        for name in ("decoder_ema", "decoder")
    )
    assert not torch.equal(mean, own)
    restored = parts.classifier(model=config["model"], train=config["train"])
    restore(restored, saved)
    for mine, theirs in zip(
        run.averages["decoder"].parameters(), restored.averages["decoder"].parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)
    with apart_from_training(run):
        assert run.task.modules["decoder"] is run.averages["decoder"]


def test_an_average_that_is_switched_on_later_begins_with_the_weights() -> None:
    before = parts.classifier(train={"batch_size": 8, "steps": 2})
    update(before, before.phases[0], parts.batch())
    run = parts.classifier(train={"batch_size": 8, "steps": 2, "ema": 0.5})
    assert not restore(run, capture(before))
    (twin,) = run.averages.values()
    (network,) = before.task.modules.values()
    assert all(
        torch.equal(*pair) for pair in zip(twin.parameters(), network.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("settings", "step", "expected"),
    [
        ({"decay": 0.9}, 0, 0.1),
        ({"decay": 0.9}, 10_000, 0.9),
        ({"decay": 0.9, "ramp_steps": 10.0}, 9, 0.9 * (1 - 0.36787944117144233)),
        ({"decay": 0.9, "ramp_steps": 0}, 0, 0.9),
        ({"half_life_kimg": 1.0}, 0, 0.5 ** (8 / 1000)),
        ({"half_life_kimg": 1.0, "rampup": 0.05}, 10, 0.5 ** (8 / 4)),
        ({"half_life_kimg": 1.0, "rampup": 0.05}, 0, 0.0),
    ],
)
def test_the_decay_at_a_step(settings: dict[str, Any], step: int, expected: float) -> None:
    assert decay_at(MovingAverage(**settings), step, 8) == pytest.approx(expected, rel=1e-12)


def test_an_average_that_a_file_gave_does_not_rise_again_nor_after_a_resume() -> None:
    settings = {"train": {"batch_size": 8, "steps": 2, "ema": 0.999}}
    run, other = parts.classifier(**settings), parts.classifier(**settings)
    (name,), (twin,) = run.averages.keys(), run.averages.values()
    file = {f"{name}_ema.{key}": value + 1 for key, value in twin.state_dict().items()}
    rest = dict(list(file.items())[1:])
    assert (
        fill_averages(run.averages, rest) == []
    )  # a head of other classes, say, is new and has to rise
    assert fill_averages(run.averages, file) == [name]
    run.given_averages.append(name)
    before = [weight.clone() for weight in twin.parameters()]
    follow_step(run, 0)
    for weight, first in zip(twin.parameters(), before, strict=True):
        torch.testing.assert_close(weight, first - 0.001, atol=1e-5, rtol=0)
    restore(other, capture(run))
    assert other.given_averages == [name]
    restore(run, capture(parts.classifier(**settings)))
    assert run.given_averages == []


def test_buffers_are_copied_or_averaged() -> None:
    net = nn.BatchNorm1d(2)
    copies, means = make_twin(net), make_twin(net)
    net(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    follow(copies, net, 0.9)
    follow(means, net, 0.9, averages_buffers=True)
    new: Tensor = net.running_mean  # type: ignore[assignment]
    assert torch.equal(copies.running_mean, new)  # type: ignore[arg-type]
    torch.testing.assert_close(means.running_mean, 0.1 * new)
    assert means.num_batches_tracked == 1


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ({"ema": 0.99}, {"decay": 0.99, "ramp_steps": 2000.0, "buffers": "average"}),
        ({"ema_ramp": 50}, {"decay": 0.9999, "ramp_steps": 50.0, "buffers": "average"}),
        ({"ema": None}, None),
        ({}, {"decay": 0.9999, "ramp_steps": 2000.0, "buffers": "average"}),
    ],
)
def test_settings_of_before_are_read_as_what_they_are_now(
    task: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    config = load_config({"model": "yolofuse", "dataset": "rgb_ir_scenes", "task": task})
    said = None if config.train.ema is None else config.train.ema.model_dump(exclude_none=True)
    assert said == expected
    spelt = {
        "ema": "task.ema is train.ema.decay now",
        "ema_ramp": "task.ema_ramp is train.ema.ramp_steps now",
    }
    assert [note.split(";")[0] for note in config.notes] == [spelt[name] for name in task]
    again = load_config(config.to_data())
    assert again.train.ema == config.train.ema
    assert not again.notes


def test_a_number_and_a_mapping_are_laid_over_the_average_that_a_task_has() -> None:
    def average(**train: Any) -> Any:
        return load_config({"model": "stylegan2", "train": train}).train.ema

    assert average() == MovingAverage(half_life_kimg=10.0, rampup=0.05)
    assert average(ema={"half_life_kimg": 5.0}) == MovingAverage(half_life_kimg=5.0, rampup=0.05)
    assert average(ema=0.99) == MovingAverage(decay=0.99)
    assert average(ema=None) is None
    assert load_config(CNN, ["train.ema=0.9"]).train.ema == MovingAverage(decay=0.9)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"train": {"ema": 0.9}, "task": {"ema": 0.8}},
            "task.ema is train.ema.decay now, and both are given",
        ),
        ({"train": {"ema": 1.5}}, "allowed: a number below 1"),
        ({"train": {"ema": {"buffers": "average"}}}, "either a decay or a half_life_kimg"),
        (
            {"train": {"ema": {"half_life_kimg": 1.0, "ramp_steps": 3}}},
            "ramp_steps belongs to a decay",
        ),
    ],
)
def test_averages_that_are_none_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config({**CNN, **settings})
