"""Every stable form is the number that the poor form would be in exact arithmetic, in value and in gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mpt.config.load import load_config
from mpt.config.options import STABLE_FORMS
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.step.step import back_propagate
from mpt.errors import ConfigError
from mpt.precision.stable.stable_forms import StableForms
from mpt.seams import Batch, Run

WINDOW = torch.full((1, 1, 5), 0.2)
CASES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "log(softmax)": ("log", lambda x: torch.log(torch.softmax(x, 1))),
    "softmax, epsilon, log": ("log", lambda x: (functional.softmax(x, dim=-1) + 1e-3).log()),
    "chosen probabilities": (
        "log",
        lambda x: -x.softmax(1).gather(1, torch.ones(4, 1, dtype=torch.long)).log(),
    ),
    "indexed probabilities": (
        "log",
        lambda x: -torch.log(torch.nn.Softmax(1)(x)[torch.arange(4), torch.arange(4)]),
    ),
    "log(sigmoid)": ("log", lambda x: x.sigmoid().float().log()),
    "log of the complement": ("log", lambda x: torch.log(1 - torch.sigmoid(x) + 1e-3)),
    "log1p of the complement": ("log", lambda x: torch.log1p(-torch.sigmoid(x))),
    "clamped": ("log", lambda x: torch.sigmoid(x).clamp(1e-2, 0.9).log()),
    "log of a sum": ("log", lambda x: torch.exp(x).sum(1, keepdim=True).log()),
    "log of a mean": ("log", lambda x: x.exp().mean().log()),
    "softplus": ("log", lambda x: torch.log(1 + torch.exp(x))),
    "log1p(exp)": ("log", lambda x: torch.log1p(x.exp())),
    "log of a quotient": ("log", lambda x: torch.log(x.exp() / (2 * x.exp() + 3))),
    "log of a power": ("log", lambda x: torch.log(x.sigmoid() ** 3).view(-1)),
    "log of two": ("log", lambda x: torch.log(x.exp() + (2 * x).exp())),
    "cross entropy": (
        "cross_entropy",
        lambda x: functional.binary_cross_entropy(x.sigmoid().view(-1), torch.full((32,), 0.3)),
    ),
    "BCELoss": (
        "cross_entropy",
        lambda x: torch.nn.BCELoss(reduction="sum")(torch.sigmoid(x), torch.ones(4, 8)),
    ),
    "softmax by hand": ("softmax", lambda x: x.exp() / x.exp().sum(1, keepdim=True)),
    "sigmoid by hand": ("softmax", lambda x: 1 / (1 + torch.exp(-x))),
    "swish by hand": ("softmax", lambda x: x / (1 + torch.exp(-x))),
    "reciprocal": ("softmax", lambda x: torch.reciprocal(1 + torch.exp(-x))),
    "large logits": ("softmax", lambda x: torch.softmax(3.0 * x.half(), 1)),
    "shifted by hand": (
        "softmax",
        lambda x: 3 * (h := x.half()) - (3 * h).max(1, keepdim=True).values,
    ),
    "norm": ("norm", lambda x: ((x.half() ** 2).sum(1) + 1e-3).sqrt()),
    "norm of all": ("norm", lambda x: (x.half() * 1.0).square().sum().sqrt()),
    "RMSNorm by hand": (
        "norm",
        lambda x: torch.rsqrt(x.half().pow(2).mean(-1, keepdim=True) + 1e-3),
    ),
    "hypotenuse": ("norm", lambda x: torch.sqrt(x.half().square() + 0.25)),
    "mean of squares": ("norm", lambda x: x.half().square().mean()),
    "variance": ("variance", lambda x: (x * x).mean(1) - x.mean(1) ** 2),
    "covariance": ("variance", lambda x: (x * (y := x.exp())).mean(1) - x.mean(1) * y.mean(1)),
    "wrong means": ("variance", lambda x: (x * x.exp()).mean(1) - x.mean(1) * x.mean(1)),
    "written over": ("log", lambda x: torch.log((x.sigmoid() + 0.1).mul_(2))),
    "local variance": ("variance", lambda x: conv((y := x[:, None]) ** 2) - conv(y) ** 2),
    "distance": (
        "distance",
        lambda x: (x**2).sum(1) + (y := x.flip(0)).square().sum(1) - 2 * (x * y).sum(1),
    ),
    "sum": ("divide_first", lambda x: x.half().sum() / 32),
    "sum of rows": ("divide_first", lambda x: x.half().sum(1, keepdim=True) * 0.25),
    "matrix product": ("divide_first", lambda x: x.half() @ x.half().T / 8),
    "product": ("divide_first", lambda x: ((h := x.half()) * h.exp()) ** 2 / 7),
    "numbers": ("divide_first", lambda x: 1e-2 * (1e-1 * x.half()).float() * 1e3),
}
NOT_THESE = ("wrong means", "written over")
NEAR_FORMS = {
    "areas": lambda x: (a := x * x.exp()) + (b := x.flip(0) * x) - a * b,
    "a tensor for a power": lambda x: (
        (x.half().abs() + 0.1).square().sum(1).pow(torch.full((4,), 0.5).half())
    ),
    "dimensions in a list": lambda x: (
        (x**2).sum([0, 1]) + (y := x.flip(0)).square().sum([0, 1]) - 2 * (x * y).sum([1])
    ),
    "a convolution's bias": lambda x: biased((y := x[:, None]) ** 2) - biased(y) ** 2,
    "tensors for numbers": lambda x: (
        torch.log((x.sigmoid() + torch.tensor(0.1)).clamp(torch.tensor(0.2))) / x.exp()
    ),
}
"""What begins like a form and has tensors or lists where a form has numbers."""


def conv(value: Tensor) -> Tensor:
    return functional.conv1d(value, WINDOW)


def biased(value: Tensor) -> Tensor:
    return functional.conv1d(value, WINDOW, torch.full((1,), 0.5))


def both(function: Callable[[Tensor], Tensor], forms: Any) -> tuple[Tensor, Tensor, list[str]]:
    found: list[str] = []
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3), requires_grad=True)
    with StableForms(
        forms, lambda form, rewrite: found.append(f"{form}: {rewrite.was} -> {rewrite.instead}")
    ):
        value = function(x)
    (gradient,) = torch.autograd.grad(value.float().square().sum(), x)
    return value, gradient, found


@pytest.mark.parametrize("name", CASES)
def test_a_form_is_replaced_by_the_same_number(name: str) -> None:
    form, function = CASES[name]
    value, gradient, found = both(function, [form])
    plain, true, nothing = both(function, [])
    assert not nothing
    assert [one.split(":")[0] for one in found] == ([] if name in NOT_THESE else [form])
    half = "half" in str(function.__code__.co_names)
    close = {"rtol": 2e-2, "atol": 4e-3} if half else {"rtol": 1e-4, "atol": 1e-5}
    assert value.dtype == plain.dtype
    torch.testing.assert_close(value, plain, **close)
    torch.testing.assert_close(gradient, true, **close)


@pytest.mark.parametrize("name", NEAR_FORMS)
def test_what_only_begins_like_a_form_is_the_same_number(name: str) -> None:
    value, gradient, _ = both(NEAR_FORMS[name], STABLE_FORMS)
    plain, true, _ = both(NEAR_FORMS[name], [])
    torch.testing.assert_close(value, plain, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(gradient, true, rtol=1e-2, atol=1e-2)


def test_a_step_whose_blocks_are_recomputed_takes_the_same_forms_and_gradients() -> None:
    gradients, found = [], []
    for memory in ({}, {"recompute": {"modules": ["net.planted"]}}):
        run, batch = built(
            {"memory": memory, "precision": {"mode": "fp32", "stable_forms": ["log"]}}
        )
        (phase,) = run.phases
        forms = StableForms(["log"], lambda form, rewrite: found.append(rewrite.instead))
        run = replace(run, stable_forms=forms)
        back_propagate(run, phase, batch)
        gradients.append([parameter.grad for parameter in run.task.modules["net"].parameters()])
    assert found == ["softplus(x)"] * 3  # once, and once more where it is recomputed
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_what_made_a_tensor_is_forgotten_with_the_forward() -> None:
    x = torch.randn(3, 3)
    forms = StableForms(["log"])
    with forms:
        p = torch.softmax(x, 1)
        held = weakref.ref(forms.graph.made(p))
    assert held() is None
    with forms, forms:  # an evaluation inside of a forward
        assert torch.equal(torch.log(torch.softmax(x, 1)), torch.log_softmax(x, 1))
    with forms:
        assert torch.equal(torch.log(p), p.log())


def test_a_compiled_network_and_stable_forms_are_refused_together() -> None:
    with pytest.raises(
        ConfigError, match=r"memory.compile: precision.stable_forms .* leave one of the two out"
    ):
        built(
            {
                "memory": {"compile": {"backend": "aot_eager"}},
                "precision": {"mode": "amp", "stable_forms": ["log"]},
            }
        )


def built(settings: dict[str, Any]) -> tuple[Run, Batch]:
    model = {
        "name": "scripts.doctor.planted_faults:plant_softplus_by_hand",
        "image_size": 16,
        "channels": 1,
    }
    data = {"model": model, "dataset": "digits", "train": {"steps": 1, "batch_size": 8}, **settings}
    config = load_config(data, allow=["scripts"])
    dataset, _ = build_datasets(config)
    run = build_run(config, torch.device("cpu"), dataset.spec)
    return run, dataset.spec.as_floats(dataset.fetch(list(range(8)), 0))
