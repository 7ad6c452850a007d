"""Schedule-Free AdamW: the arithmetic of its authors, and that averages are what a run is evaluated and saved with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpt.engine.state.averages import averaged
from mpt.engine.state.evaluation import inferring
from mpt.engine.state.state import capture, restore, restore_modules
from mpt.engine.step.step import update
from mpt.errors import ConfigError
from mpt.optim import schedule_free
from mpt.precision.shared.module_state import module_state
from tests.engine import parts

pytestmark = pytest.mark.tier("fast")


OPTIMIZER: dict[str, Any] = {"name": "schedule_free", "lr": 1e-2}
MODES: list[Any] = ["fp32", {"mode": "amp", "loss_scale": "dynamic"}, "O2", "bf16-sr", "bf16-kahan"]


def trained(precision: Any = "fp32", steps: int = 3, **sections: Any) -> Any:
    run = parts.classifier(precision, optimizer=OPTIMIZER, **sections)
    for step in range(steps):
        update(run, run.phases[0], parts.batch(step))
    return run


def weights_of(run: Any) -> dict[str, Tensor]:
    return {key: p.detach().clone() for key, p in run.task.trainable["net"].named_parameters()}


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_every_step_is_the_authors(foreach: bool, decay: float) -> None:
    library = pytest.importorskip(
        "schedulefree", reason="the authors' package is the other side: pip install schedulefree"
    )
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((6, 4), (3,), ())]
    theirs = copy.deepcopy(ours)
    settings = schedule_free.Settings(lr=0.01, weight_decay=decay, r=0.5, foreach=foreach)
    one: Any = schedule_free.build(settings, ours)
    two = library.AdamWScheduleFree(theirs, lr=0.01, weight_decay=decay, r=0.5, foreach=foreach)
    two.train()
    for step in range(20):
        for group in (*one.param_groups, *two.param_groups):
            group["lr"] = 0.01 * min(1, (step + 1) / 5)
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        one.step()
        two.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    two.eval()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(one.average(a, one.param_groups[0]), b)


def test_what_is_evaluated_is_the_mean_of_the_steps() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer: Any = schedule_free.build(schedule_free.Settings(lr=0.1), [weight])
    assert optimizer.average(weight, optimizer.param_groups[0]) is None
    steps = []
    for _ in range(6):
        weight.grad = weight.detach() * 2
        optimizer.step()
        steps.append(optimizer.state[weight]["z"].clone())
    average = optimizer.average(weight, optimizer.param_groups[0])
    assert torch.allclose(average, torch.stack(steps).mean(0), atol=1e-6)
    assert not torch.allclose(average, weight, atol=1e-3)


@pytest.mark.parametrize(
    "precision", MODES, ids=lambda m: str(m if isinstance(m, str) else m["mode"])
)
def test_evaluation_has_the_averages_and_training_its_own_weights_back_to_the_bit(
    precision: Any,
) -> None:
    run = trained(precision)
    optimizer = run.optimizers["net"]
    before = weights_of(run)
    (group,) = optimizer.param_groups
    expected = {p: optimizer.average(p, group) for p in group["params"]}
    with inferring(run):
        inside = weights_of(run)
        for key, weight in run.task.trainable["net"].named_parameters():
            assert torch.equal(
                weight, expected[run.precision.masters.get(weight, weight)].to(weight.dtype)
            ), key
    assert any(not torch.equal(value, before[key]) for key, value in inside.items())
    assert all(torch.equal(value, before[key]) for key, value in weights_of(run).items())


@pytest.mark.parametrize(
    "precision", MODES, ids=lambda m: str(m if isinstance(m, str) else m["mode"])
)
def test_a_checkpoint_has_the_averages_in_its_modules_and_resumes_to_the_bit(
    precision: Any,
) -> None:
    run = trained(precision, memory={"micro_batch": 3})
    saved = copy.deepcopy(capture(run))
    with averaged(run):
        inside = {
            key: value.clone()
            for key, value in module_state(run.precision, run.task.modules["net"]).items()
        }
    assert all(torch.equal(value, inside[key]) for key, value in saved["modules"]["net"].items())
    again = parts.classifier(precision, optimizer=OPTIMIZER, memory={"micro_batch": 3})
    restore(again, saved)
    for step in (3, 4):
        update(run, run.phases[0], parts.batch(step))
        update(again, again.phases[0], parts.batch(step))
    assert all(torch.equal(value, weights_of(again)[key]) for key, value in weights_of(run).items())
    end, other = capture(run)["modules"]["net"], capture(again)["modules"]["net"]
    assert all(torch.equal(value, other[key]) for key, value in end.items())
    inference = parts.classifier(precision)  # as `mpt infer` builds it: without the optimizer
    restore_modules(inference, saved)
    kept = module_state(inference.precision, inference.task.modules["net"])
    assert all(torch.equal(value, kept[key]) for key, value in saved["modules"]["net"].items())


def test_groups_average_by_themselves() -> None:
    run = parts.classifier(
        optimizer={**OPTIMIZER, "parts": {"net.head.*": {"lr_scale": 0.1, "weight_decay": 0.1}}}
    )
    for step in range(2):
        update(run, run.phases[0], parts.batch(step))
    first, second = run.optimizers["net"].param_groups
    assert second["lr_max"] == pytest.approx(first["lr_max"] / 10)
    assert (
        capture(run)["training_weights"]["net"].keys()
        == dict(run.task.modules["net"].named_parameters()).keys()
    )


def test_a_user_is_told_of_what_does_not_follow_the_average() -> None:
    run = trained(task={"ema": 0.9}, steps=0)
    assert ["BatchNorm's running statistics" in note for note in run.notes] == [True, False]
    assert "is a moving average of the training weights" in run.notes[1]
    assert not parts.classifier().notes


@pytest.mark.parametrize("trick", ["cpu_optimizer", "low_bit_optimizer"])
def test_optimizers_elsewhere_are_refused(trick: str) -> None:
    with pytest.raises(ConfigError, match="averages from its state on the device"):
        trained(memory={trick: True}, steps=0)


def test_a_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="schedule"):
        parts.classifier(optimizer={**OPTIMIZER, "schedule": "cosine"})
