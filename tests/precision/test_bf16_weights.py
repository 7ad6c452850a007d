"""bf16-sr and bf16-kahan: bfloat16 storage that learns, resumes to the bit and plans."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import mpt.precision.shared.weight_pieces as weight_pieces
from mpt.engine.step.step import update
from mpt.errors import ConfigError
from mpt.seams import Loss, Phase
from tests.engine import parts

MODES = ["bf16-sr", "bf16-kahan"]
OPTIMIZERS: list[Any] = [
    {"name": "sgd", "lr": 0.01},
    {"name": "adam", "lr": 1e-4},
    {"name": "adamw", "lr": 1e-4},
    {"name": "rmsprop", "lr": 1e-4},
    {"name": "adamax", "lr": 1e-4},
    {"name": "adabelief", "lr": 1e-4},
]


def constant_descent(
    mode: str, make: Any, steps: int = 200, size: int = 512, **settings: Any
) -> Tensor:
    """Return weights that began at 1 after steps whose updates are each far below half an ulp."""
    torch.manual_seed(3)
    precision = parts.mode({"mode": mode, **settings})
    net = nn.Module()
    net.weight = nn.Parameter(torch.ones(size))
    task: Any = type("Task", (), {"modules": {"net": net}, "trainable": {"net": net}})
    precision.prepare(task)
    optimizer: Optimizer = make(precision.parameters(net))
    phase = Phase("net", net, optimizer, lambda batch: iter([Loss("loss", batch["x"])]))
    precision.bind([phase])
    for _ in range(steps):
        optimizer.zero_grad()
        precision.backward(net.weight.float().sum(), phase)
        precision.step(phase, None)
    tensors = [
        net.weight,
        *(v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)),
    ]
    assert {t.dtype for t in tensors if t.dim()} == {torch.bfloat16}
    return net.weight.detach().float()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=2.0**-12),
        lambda p: torch.optim.SGD(p, lr=2.0**-12 / 10, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=2.0**-12),
        lambda p: torch.optim.AdamW(p, lr=2.0**-12, weight_decay=0),
        lambda p: torch.optim.RMSprop(p, lr=2.0**-12),
    ],
    ids=["sgd", "momentum", "adam", "adamw", "rmsprop"],
)
def test_updates_below_half_an_ulp_are_lost_by_bf16_pure_alone(make: Any) -> None:
    exact = constant_descent_in_float32(make)
    # not what bfloat16 near 1 can resolve in a step: its ulp below 1 is 2^-8
    assert 0.9 < exact < 0.98
    steps = 200
    pure = constant_descent("bf16-pure", make, steps)
    stochastic = constant_descent("bf16-sr", make, steps)
    compensated = constant_descent("bf16-kahan", make, steps)
    lost = float(pure.mean())
    # RMSprop's first steps are large enough to be seen
    assert lost == 1.0 or abs(lost - exact) > 0.01
    assert float(stochastic.mean()) == pytest.approx(exact, abs=4e-3)
    assert float((compensated - exact).abs().max()) < 4e-3
    assert stochastic.unique().numel() > 1


def test_updates_that_are_all_alike_move_kahan_s_weights_as_far_as_float32_s() -> None:
    """Rounded to the nearest, what is left of each would be wrong by the same amount: 1.35 % too far after 50 steps."""

    def make(parameters: Any) -> Optimizer:
        return torch.optim.SGD(parameters, lr=1e-4)

    assert kahan_distance(make, 50) == pytest.approx(0.005, rel=2e-3)


def kahan_distance(make: Any, steps: int) -> float:
    """Return how far weights of 1 and their compensation have moved."""
    net = nn.Module()
    net.weight = nn.Parameter(torch.ones(4096))
    task: Any = type("Task", (), {"modules": {"net": net}, "trainable": {"net": net}})
    precision = parts.mode("bf16-kahan")
    precision.prepare(task)
    optimizer = make(precision.parameters(net))
    phase = Phase("net", net, optimizer, lambda batch: iter([Loss("loss", batch["x"])]))
    precision.bind([phase])
    for _ in range(steps):
        net.weight.grad = torch.ones_like(net.weight)
        precision.step(phase, None)
    return 1 - float(
        (net.weight.detach().float() + optimizer.state[net.weight]["compensation"].float()).mean()
    )


def constant_descent_in_float32(make: Any, steps: int = 200) -> float:
    weight = nn.Parameter(torch.ones(1))
    optimizer = make([weight])
    for _ in range(steps):
        weight.grad = torch.ones(1)
        optimizer.step()
    return float(weight.detach())


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: str(o["name"]))
@pytest.mark.parametrize("mode", MODES)
def test_each_optimizer_steps_with_nothing_kept_in_float32(mode: str, optimizer: Any) -> None:
    run = parts.gan(mode, optimizer=optimizer)
    for step in range(2):
        for phase in run.phases:
            assert update(run, phase, parts.batch(step)).finite
    kept = [p for module in run.task.trainable.values() for p in module.parameters()]
    for one in run.optimizers.values():
        kept += [
            v
            for state in one.state.values()
            for v in state.values()
            if isinstance(v, Tensor) and v.dim()
        ]
        assert (
            all(p in one.state for group in one.param_groups for p in group["params"])
            or optimizer["name"] == "sgd"
        )
    assert {tensor.dtype for tensor in kept} == {torch.bfloat16}


@pytest.mark.parametrize("mode", MODES)
def test_the_size_of_the_pieces_changes_nothing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(piece: int) -> list[Tensor]:
        monkeypatch.setattr(weight_pieces, "PIECE", piece)
        run = parts.classifier(mode, optimizer={"name": "adam", "lr": 1e-3})
        for step in range(3):
            update(run, run.phases[0], parts.batch(step))
        state = run.optimizers["net"].state_dict()["state"]
        tensors = [v for _, own in sorted(state.items()) for _, v in sorted(own.items())]
        return [p.detach().clone() for p in run.task.modules["net"].parameters()] + tensors

    whole = trained(1 << 30)
    # vectors of sixteen: elsewhere torch's own kernels round their ends otherwise
    for piece in (64, 256):
        assert all(torch.equal(a, b) for a, b in zip(trained(piece), whole, strict=True))


@pytest.mark.parametrize("mode", [*MODES, "fp32", "bf16-pure"])
def test_steps_during_backward_give_the_same_bits(mode: str) -> None:
    states = []
    for memory in ({}, {"optimizer_in_backward": True}):
        run = parts.gan(
            mode, optimizer={"name": "adabelief", "lr": 1e-3, "lr_cos": 4}, memory=memory
        )
        torch.manual_seed(1)
        for step in range(3):
            for phase in run.phases:
                update(run, phase, parts.batch(step))
        states.append({n: m.state_dict() for n, m in run.task.trainable.items()})
    for name, state in states[0].items():
        assert all(torch.equal(value, states[1][name][key]) for key, value in state.items())


def test_gradients_of_micro_batches_add_up_in_float32_where_asked() -> None:
    run = parts.classifier({"mode": "bf16-sr", "accumulate": "float32"}, memory={"micro_batch": 1})
    update(run, run.phases[0], parts.batch())
    weight = run.task.modules["net"].stages[1][0].weight
    assert weight.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())


def test_a_float32_module_is_updated_in_float32() -> None:
    run = parts.classifier(
        {"mode": "bf16-sr", "keep_fp32": ["net.stages.1"]}, optimizer={"name": "adam", "lr": 1e-3}
    )
    weight = run.task.modules["net"].stages[1][0].weight
    before = weight.detach().clone()
    update(run, run.phases[0], parts.batch())
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())
    assert not torch.equal(weight, before)
    assert run.optimizers["net"].state[weight]["exp_avg"].dtype == torch.float32


def single_number(mode: str) -> tuple[Any, Any, Phase]:
    """Return a network of one weight without dimensions, its precision mode and its phase."""
    net = nn.Module()
    net.scale = nn.Parameter(torch.ones(()))
    task: Any = type("Task", (), {"modules": {"net": net}, "trainable": {"net": net}})
    precision = parts.mode(mode)
    precision.prepare(task)
    optimizer = torch.optim.Adam(precision.parameters(net), lr=0.1)
    phase = Phase("net", net, optimizer, lambda batch: iter([Loss("loss", batch["x"])]))
    precision.bind([phase])
    return net, precision, phase


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_without_dimensions_learns(mode: str) -> None:
    net, precision, phase = single_number(mode)
    for _ in range(2):
        precision.backward(net.scale.float() ** 2, phase)
        precision.step(phase, None)
    assert net.scale.dtype == torch.bfloat16
    assert 0.7 < float(net.scale.detach()) < 0.9


@pytest.mark.parametrize("mode", [*MODES, "bf16-24bit", "fp16-24bit"])
def test_the_state_of_a_parameter_without_dimensions_is_loaded_as_it_was(mode: str) -> None:
    """StyleGAN2's strengths of noise are such: a resumed run rounded their means to half."""
    net, precision, phase = single_number(mode)
    precision.backward(net.scale.float() ** 2 / 3, phase)
    precision.step(phase, None)
    optimizer = phase.optimizer
    optimizer.zero_grad()
    (kept,) = ({**state} for state in optimizer.state.values())
    assert "exp_avg" in kept
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    (loaded,) = optimizer.state.values()
    assert {key: (value.dtype, value) for key, value in loaded.items()} == {
        key: (value.dtype, value) for key, value in kept.items()
    }


@pytest.mark.parametrize("trick", ["cpu_optimizer", "low_bit_optimizer"])
def test_tricks_that_replace_the_optimizer_are_refused(trick: str) -> None:
    with pytest.raises(ConfigError, match="takes the optimizer's steps on bfloat16 state itself"):
        parts.classifier("bf16-sr", optimizer={"name": "adam"}, memory={trick: True})


@pytest.mark.parametrize("mode", ["bf16-pure", "O3", "bf16-sr"])
def test_weights_without_masters_reach_the_device_in_half(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mpt.engine.building.build as build

    seen: list[torch.dtype] = []
    original = build.place

    def place(module: nn.Module, *args: Any) -> nn.Module:
        seen.extend(parameter.dtype for parameter in module.parameters())
        return original(module, *args)

    monkeypatch.setattr(build, "place", place)
    run = parts.classifier(
        {"mode": mode, "dtype": "bfloat16", "keep_fp32": ["net.stages.0"]}, task={"ema": 0.9}
    )
    assert set(seen) == {torch.bfloat16, torch.float32}
    assert {p.dtype for p in run.task.modules["net"].stages[1].parameters()} == {torch.bfloat16}
    assert {p.dtype for p in run.task.modules["net"].stages[0].parameters()} == {torch.float32}
    (average,) = [module for name, module in run.task.modules.items() if name != "net"]
    assert {p.dtype for p in average.parameters()} == {torch.float32}
