"""Lion, Adafactor, Muon and Schedule-Free AdamW: their arithmetic; each trains, resumes, plans and keeps to groups."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.engine.state.state import capture, restore
from mpt.engine.step.step import update
from mpt.optim import adafactor, lion, muon
from mpt.optim.shared.groups import group_parameters, hidden_matrices
from tests.engine import parts

pytestmark = pytest.mark.tier("fast")


NEW: list[Any] = [
    {"name": "lion", "lr": 3e-3},
    {"name": "adafactor"},
    {"name": "muon", "lr": 3e-3},
    {"name": "schedule_free", "lr": 3e-3},
]


def test_lion_is_the_papers_algorithm() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5))
    expected, momentum = weight.detach().clone(), torch.zeros(5)
    optimizer = lion.build(lion.Settings(lr=0.1, weight_decay=0.5), [weight])
    for _ in range(3):
        weight.grad = torch.randn(5)
        direction = (0.9 * momentum + 0.1 * weight.grad).sign()
        expected = expected - 0.1 * (direction + 0.5 * expected)
        momentum = 0.99 * momentum + 0.01 * weight.grad
        optimizer.step()
        assert torch.allclose(weight, expected, atol=1e-6)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_on_matrices_and_adamw_on_the_rest_are_torchs_own(adjust: str) -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(3))]
    theirs = copy.deepcopy(ours)
    settings = muon.Settings(lr=0.01, weight_decay=0.1, adjust=adjust)
    one = muon.build(
        settings, [{"params": ours[:1], "muon": True}, {"params": ours[1:], "muon": False}]
    )
    two = [
        torch.optim.Muon(theirs[:1], lr=0.01, weight_decay=0.1, adjust_lr_fn=adjust),
        torch.optim.AdamW(theirs[1:], lr=0.01, weight_decay=0.1),
    ]
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        one.step()
        for optimizer in two:
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.up, self.down, self.head = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 7)


def test_hidden_matrices_are_those_between_the_first_layer_and_the_last() -> None:
    assert hidden_matrices("net", Language(), []) == {"net.up.weight", "net.down.weight"}
    assert hidden_matrices("net", Language(), ["net.up.*"]) == {"net.down.weight"}
    stack = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2)
    )
    assert hidden_matrices("net", stack, []) == {"net.1.weight"}
    groups: Any = group_parameters(
        "net", stack, list(stack.parameters()), muon.Settings(no_decay=["bias"])
    )
    assert [(group["muon"], group.get("weight_decay")) for group in groups] == [
        (False, None),
        (False, 0.0),
        (True, None),
    ]


def state_of(run: Any) -> dict[str, Tensor]:
    return {
        f"{n}.{k}": v.clone()
        for n, m in run.task.trainable.items()
        for k, v in m.state_dict().items()
    }


@pytest.mark.parametrize("precision", ["fp32", "O2", "bf16-sr"])
@pytest.mark.parametrize("optimizer", NEW, ids=lambda o: str(o["name"]))
def test_each_resumes_to_the_bit_and_moves_every_weight(optimizer: Any, precision: str) -> None:
    run = parts.classifier(precision, optimizer=optimizer)
    before = state_of(run)
    for step in range(2):
        update(run, run.phases[0], parts.batch(step))
    saved = copy.deepcopy(capture(run))
    for step in range(2, 4):
        update(run, run.phases[0], parts.batch(step))
    again = parts.classifier(precision, optimizer=optimizer)
    restore(again, saved)
    for step in range(2, 4):
        update(again, again.phases[0], parts.batch(step))
    after = state_of(run)
    assert all(torch.equal(value, state_of(again)[key]) for key, value in after.items())
    assert not [
        key for key in after if key.endswith("weight") and torch.equal(after[key], before[key])
    ]


@pytest.mark.parametrize("optimizer", NEW, ids=lambda o: str(o["name"]))
def test_each_steps_on_fake_tensors_and_in_backward(optimizer: Any) -> None:
    sections = {
        "model": {"name": "small_cnn", "features": 4, "image_size": 16},
        "dataset": "digits",
    }
    config = load_config({**sections, "optimizer": optimizer})
    with FakeTensorMode():
        run = build_run(config, torch.device("cpu"), parts.DIGITS, fake=True)
        for _ in range(2):
            update(run, run.phases[0], parts.DIGITS.zeros(4, "cpu"))
    plain, stepping = (
        parts.classifier(optimizer=optimizer, memory=m)
        for m in ({}, {"optimizer_in_backward": True})
    )
    for each in (plain, stepping):
        for step in range(2):
            update(each, each.phases[0], parts.batch(step))
    assert all(
        torch.equal(value, state_of(stepping)[key]) for key, value in state_of(plain).items()
    )


def test_adafactor_steps_as_far_in_bfloat16_as_in_float32_where_gradients_are_small() -> None:
    moved = []
    for dtype in (torch.float32, torch.bfloat16):
        weight = nn.Parameter(torch.full((4, 4), 0.25, dtype=dtype))
        optimizer = adafactor.build(adafactor.Settings(lr=0.1), [weight])
        weight.grad = torch.full((4, 4), 1e-5, dtype=dtype)
        optimizer.step()
        moved.append(float((0.25 - weight.detach().float()).mean()))
    assert moved[0] == pytest.approx(0.025, rel=0.01)
    assert moved[1] == pytest.approx(moved[0], rel=0.05)


def test_adafactor_is_torchs_without_its_host_reads() -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(*shape)) for shape in ((6, 4), (3,), (2, 3, 3, 3))]
    theirs = copy.deepcopy(ours)
    one = adafactor.build(adafactor.Settings(lr=0.1, weight_decay=0.1), ours)
    two = torch.optim.Adafactor(theirs, lr=0.1, weight_decay=0.1, foreach=False)
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        one.step()
        two.step()
    assert all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(ours, theirs, strict=True)
    )
