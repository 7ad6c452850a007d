"""`train.freeze`: what stays as it was, what it saves, and how a run goes on with other parts frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpt.engine.state.state import capture, restore
from mpt.errors import ConfigError
from mpt.run.checkpoints.state import pack, unpack
from mpt.seams import Run
from tests.engine.parts import batch, classifier, gan
from tests.memory import mechanism


def run_with(freeze: list[str], mode: str = "fp32", **train: Any) -> Run:
    return classifier(
        mode,
        model={"name": "torchvision:resnet18", "channels": 1, "image_size": 16, "small_stem": True},
        optimizer={"name": "adam", "lr": 1e-2},
        train={"steps": 4, "batch_size": 8, "freeze": freeze, **train},
    )


def state(run: Run) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in run.task.modules["net"].state_dict().items()}


FROZEN = ["net.conv1.*", "net.bn1.*", "net.layer[123].*"]


@pytest.mark.parametrize("mode", ["fp32", "O2"])
def test_what_is_frozen_stays_bit_for_bit_and_the_rest_is_trained(mode: str) -> None:
    run = run_with(FROZEN, mode)
    before = state(run)
    mechanism.train(run, [batch(0, 4)])
    for name, value in state(run).items():
        is_frozen = name.startswith(("conv1", "bn1", "layer1", "layer2", "layer3"))
        if is_frozen:
            assert torch.equal(value, before[name]), name
    assert not torch.equal(state(run)["fc.weight"], before["fc.weight"])
    assert not torch.equal(
        state(run)["layer4.0.bn1.running_mean"], before["layer4.0.bn1.running_mean"]
    )
    assert "2,773,952 of 11,172,810 parameters stay as they are; 15 BatchNorm" in " ".join(
        run.messages
    )


def test_frozen_batchnorm_uses_the_batch_where_that_is_asked_for() -> None:
    run = run_with(FROZEN, frozen_norm="train")
    before = state(run)
    mechanism.train(run, [batch(0, 4)])
    after = state(run)
    assert not torch.equal(after["bn1.running_mean"], before["bn1.running_mean"])
    assert torch.equal(after["bn1.weight"], before["bn1.weight"])


def test_nothing_is_kept_for_the_backward_of_what_is_frozen() -> None:
    whole, frozen = run_with([]), run_with(FROZEN)
    saved = [mechanism.saved_bytes_of_losses(run, batch(0, 4)) for run in (whole, frozen)]
    assert saved[1] < saved[0] / 2


def test_a_run_goes_on_with_other_parts_frozen() -> None:
    first, second = run_with(FROZEN), run_with(["net.conv1.*"])
    mechanism.train(first, [batch(0, 4)])
    saved = unpack(*pack(capture(first)))
    restore(second, saved)
    states = second.optimizers["net"].state
    head, thawed = second.task.modules["net"].get_parameter("fc.weight"), "layer1.0.conv1.weight"
    assert states[head]["step"] == 1
    assert second.task.modules["net"].get_parameter(thawed) not in states
    mechanism.train(second, [batch(1, 4)])
    # And back, from a run of which nothing was frozen.
    every = run_with([])
    mechanism.train(every, [batch(0, 4)])
    again = run_with(FROZEN)
    restore(again, unpack(*pack(capture(every))))
    assert len(again.optimizers["net"].state) == sum(
        p.requires_grad for p in again.task.modules["net"].parameters()
    )


def test_one_network_of_two_may_be_frozen_in_part() -> None:
    run = gan(train={"steps": 4, "batch_size": 8, "freeze": ["gen.*0.*"]})
    gen = run.task.trainable["gen"]
    frozen = [name for name, parameter in gen.named_parameters() if not parameter.requires_grad]
    mechanism.train(run, [batch()])
    assert frozen
    assert [
        name for name, parameter in gen.named_parameters() if not parameter.requires_grad
    ] == frozen


def test_globs_that_match_nothing_or_everything_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"train.freeze: 'net.layer9.\*' matches no trained parameter"
    ):
        run_with(["net.layer9.*"])
    with pytest.raises(ConfigError, match="nothing of 'net' is left to train"):
        run_with(["net.*"])


def test_modules_of_a_frozen_part_are_in_evaluation_mode_after_an_evaluation_too() -> None:
    from mpt.engine.state.evaluation import apart_from_training

    run = run_with(FROZEN)
    with apart_from_training(run):
        pass
    norms = [m for m in run.task.modules["net"].modules() if isinstance(m, nn.BatchNorm2d)]
    assert sum(norm.training for norm in norms) == len(norms) - 15
