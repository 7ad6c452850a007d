"""bf16-24bit and fp16-24bit: half weights with a byte for what their rounding leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpt.precision.shared.weight_pieces as weight_pieces
from mpt.engine.state.state import capture, restore
from mpt.engine.step.step import update
from mpt.errors import ConfigError
from mpt.planner.recipes.lighter_modes import find_mode, read_lighter
from mpt.precision.shared.rounding import code_remainder, coded_remainder, spacing, with_remainder
from mpt.run.checkpoints.state import pack, unpack
from mpt.seams import Loss, Phase
from tests.engine import parts
from tests.memory import mechanism

MODES = ["bf16-24bit", "fp16-24bit"]
HALF = {"bf16-24bit": torch.bfloat16, "fp16-24bit": torch.float16}
SCALED = {"init_scale": 16.0}
"""So small that no first step is skipped."""
SMALL = {"name": "dcgan", "features": 4, "image_size": 16, "latent_size": 8}


@pytest.mark.tier("fast")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_spacing_is_that_to_the_next_number_of_larger_magnitude(dtype: torch.dtype) -> None:
    positive = torch.tensor([1.0, 1.5, 1.9921875, 2.0, 3e-5, 6.2e-5, 500.0], dtype=dtype)
    above = (positive.view(torch.int16) + 1).view(dtype)
    assert torch.equal(spacing(positive), above.float() - positive.float())
    assert torch.equal(spacing(-positive), spacing(positive))
    assert float(spacing(torch.zeros(1, dtype=torch.float16))) == 2.0**-24


@pytest.mark.tier("fast")
@pytest.mark.parametrize(("dtype", "unit"), [(torch.float16, 2.0**-18), (torch.bfloat16, 2.0**-15)])
def test_a_byte_adds_eight_bits_and_is_right_on_average(dtype: torch.dtype, unit: float) -> None:
    numbers = 1 + 0.99 * torch.rand(1 << 16, generator=torch.Generator().manual_seed(0))
    nearest, rest = with_remainder(numbers, dtype)
    random = torch.randint(
        -(1 << 31), 1 << 31, numbers.shape, generator=torch.Generator().manual_seed(1)
    )
    codes = code_remainder(rest, nearest, random.to(torch.int32))
    wrong = nearest.float() + coded_remainder(codes, nearest) - numbers
    assert codes.dtype == torch.int8
    assert float(wrong.abs().max()) <= unit
    assert abs(float(wrong.mean())) < 0.02 * unit


def test_what_is_not_finite_has_no_remainder() -> None:
    nearest, rest = with_remainder(torch.tensor([float("nan"), float("inf"), 1e6]), torch.float16)
    assert code_remainder(rest, nearest, torch.zeros(3, dtype=torch.int32)).tolist() == [0, 0, 0]


def descended(mode: str, steps: int, rate: float = 1e-4) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return weights that began at 1 after updates that are all alike, each below half an ulp of half."""
    torch.manual_seed(3)
    net = nn.Module()
    net.weight = nn.Parameter(torch.ones(4096))
    task: Any = type("Task", (), {"modules": {"net": net}, "trainable": {"net": net}})
    precision = parts.mode({"mode": mode, **SCALED})
    precision.prepare(task)
    optimizer = torch.optim.SGD(precision.parameters(net), lr=rate)
    phase = Phase("net", net, optimizer, lambda batch: iter([Loss("loss", batch["x"])]))
    precision.bind([phase])
    for _ in range(steps):
        precision.backward(net.weight.float().sum(), phase)
        assert not precision.step(phase, None).skipped
        net.weight.grad = None
    return net, optimizer


@pytest.mark.parametrize("mode", MODES)
def test_small_updates_move_weights_as_far_as_float32_s(mode: str) -> None:
    net, optimizer = descended(mode, 50)
    weight = net.weight.detach()
    assert weight.dtype == HALF[mode]
    kept = optimizer.state[net.weight]["compensation"]
    assert kept.dtype == torch.int8
    whole = weight.float() + coded_remainder(kept, weight)
    assert 1 - float(whole.mean()) == pytest.approx(0.005, rel=2e-3)


@pytest.mark.parametrize(
    ("mode", "expected"), [("bf16-24bit", 2 + 1 + 4), ("fp16-24bit", 2 + 1 + 4)]
)
def test_a_weight_and_its_state_take_seven_bytes_and_gradients_are_summed_as_said(
    mode: str, expected: int
) -> None:
    run = parts.classifier({"mode": mode, **SCALED}, optimizer={"name": "adam", "lr": 1e-3})
    update(run, run.phases[0], parts.batch())
    weight = run.task.modules["net"].stages[1][0].weight
    state = run.optimizers["net"].state[weight]
    held = [
        weight,
        *(value for value in state.values() if isinstance(value, Tensor) and value.dim()),
    ]
    assert sum(tensor.nbytes for tensor in held) == expected * weight.numel()
    assert weight.grad.dtype == (torch.float32 if mode == "fp16-24bit" else torch.bfloat16)


@pytest.mark.parametrize("mode", MODES)
def test_the_size_of_the_pieces_changes_nothing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(piece: int) -> dict[str, Tensor]:
        monkeypatch.setattr(weight_pieces, "PIECE", piece)
        run = parts.classifier({"mode": mode, **SCALED}, optimizer={"name": "adam", "lr": 1e-3})
        for step in range(2):
            update(run, run.phases[0], parts.batch(step))
        return mechanism.state(run)

    assert mechanism.same(trained(64), trained(1 << 30))


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_resumes_to_the_bit(mode: str, optimizer: str) -> None:
    given = {"model": SMALL, "optimizer": {"name": optimizer, "lr": 1e-3}}
    run, resumed = (parts.gan({"mode": mode, **SCALED}, **given) for _ in range(2))
    mechanism.train(run, [parts.batch(), parts.batch(1)])
    structure, tensors = pack(capture(run))
    restore(resumed, unpack(structure, {name: tensor.clone() for name, tensor in tensors.items()}))
    states = [state for one in resumed.optimizers.values() for state in one.state.values()]
    assert {state["compensation"].dtype for state in states} == {torch.int8}
    mechanism.train(run, [parts.batch(2)])
    mechanism.train(resumed, [parts.batch(2)])
    assert mechanism.same(mechanism.state(run), mechanism.state(resumed))
    for name, one in run.optimizers.items():
        again = resumed.optimizers[name].state_dict()["state"]
        for key, own in one.state_dict()["state"].items():
            for entry, value in own.items():
                assert not isinstance(value, Tensor) or torch.equal(value, again[key][entry])


@pytest.mark.parametrize("other", ["bf16-kahan", "bf16-sr", "fp32"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_goes_on_in_another_mode_and_back(mode: str, other: str) -> None:
    given = {"model": SMALL, "optimizer": {"name": "adam", "lr": 1e-3}}
    states = capture(parts.gan({"mode": mode, **SCALED}, **given))
    for each in (mode, other, mode):
        run = parts.gan({"mode": each, **SCALED}, **given)
        restore(run, states)
        mechanism.train(run, [parts.batch()])
        assert all(value.isfinite().all() for value in mechanism.state(run).values())
        states = capture(run)
    codes = [
        state["compensation"] for one in run.optimizers.values() for state in one.state.values()
    ]
    assert {code.dtype for code in codes} == {torch.int8}


def test_dtypes_and_sums_of_other_modes_are_refused() -> None:
    with pytest.raises(ConfigError, match="bf16-24bit is bfloat16; leave it out"):
        parts.classifier({"mode": "bf16-24bit", "dtype": "float16"})
    with pytest.raises(ConfigError, match="fp16-24bit sums scaled gradients in float32"):
        parts.classifier({"mode": "fp16-24bit", "accumulate": "bfloat16"})


def test_it_is_proposed_where_bfloat16_is_not_computed_alone() -> None:
    lighter = read_lighter(find_mode("fp16-24bit"))
    assert lighter.usable(has_bfloat16=True) == "bf16-sr"
    assert lighter.usable(has_bfloat16=False) == "fp16-24bit"
    assert lighter.usable(has_bfloat16=False, unscaled=True) is None
