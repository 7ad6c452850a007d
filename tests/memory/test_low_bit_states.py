"""Optimizer state in 16, 8 and 4 bits: torchao's numbers, planned as it is allocated, resumed to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpt.engine.state.state import capture, restore
from mpt.errors import ConfigError
from mpt.memory.low_bit.states import LowBitAdam, LowBitMuon, map_of, quantise, restored
from mpt.optim.muon import MuonWithAdam
from mpt.run.checkpoints.state import pack, unpack
from tests.engine import parts
from tests.memory import mechanism

ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
MODEL = {"name": "dcgan", "features": 16, "image_size": 16}


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [
        nn.Parameter(torch.randn(64, 128)),
        nn.Parameter(torch.randn(100)),
        nn.Parameter(torch.randn(4096)),
    ]


def step(
    optimizers: list[torch.optim.Optimizer], sets: list[list[nn.Parameter]], steps: int = 10
) -> None:
    numbers = torch.Generator().manual_seed(1)
    for scale in range(1, steps + 1):
        for same in zip(*sets, strict=True):
            gradient = scale * torch.randn(same[0].shape, generator=numbers)
            for parameter in same:
                parameter.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_and_codes_are_torchao_s_to_the_bit(
    bits: int, decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    optim = pytest.importorskip(
        "torchao.optim", reason="the extra torchao is not installed", exc_type=ImportError
    )
    monkeypatch.setattr(torch, "compile", lambda function, **given: function)
    theirs, ours = weights(), weights()
    reference = getattr(optim, f"Adam{'W' * decoupled}{bits}bit")(theirs, **ADAM)
    own = LowBitAdam([{"params": ours, **ADAM}], bits, decoupled)
    step([reference, own], [theirs, ours])
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
    for name in ("exp_avg", "exp_avg_sq"):
        kept = reference.state[theirs[0]][name]
        assert torch.equal(kept.codes.view(-1), own.state[ours[0]][f"{name}.codes"])
        assert torch.equal(kept.scale, own.state[ours[0]][f"{name}.scale"])


@pytest.mark.parametrize(("bits", "share"), [(16, 0.03), (8, 0.05), (4, 0.5)])
def test_updates_are_near_those_of_float32(bits: int, share: float) -> None:
    full, few = weights(), weights()
    begin = torch.cat([one.detach().flatten() for one in weights()])
    step(
        [torch.optim.AdamW(full, **ADAM), LowBitAdam([{"params": few, **ADAM}], bits, True)],
        [full, few],
    )
    moved, other = (
        torch.cat([one.detach().flatten() for one in ones]) - begin for ones in (full, few)
    )
    assert 0 < float((moved - other).norm() / moved.norm()) < share


def test_a_second_moment_in_16_bits_follows_small_gradients_on_average() -> None:
    """Rounded to the nearest it would stand still: a step of 0.001 is less than half an ulp."""
    parameter = nn.Parameter(torch.zeros(8192))
    optimizer = LowBitAdam([{"params": [parameter], **ADAM}], 16, True)
    parameter.grad = torch.ones(8192)
    optimizer.step()
    optimizer.state[parameter]["exp_avg_sq"].fill_(1.0)
    parameter.grad = torch.zeros(8192)
    for _ in range(200):
        optimizer.step()
    mean = float(optimizer.state[parameter]["exp_avg_sq"].float().mean())
    assert mean == pytest.approx(0.999**200, rel=0.01)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_value_of_the_map_comes_back_and_others_are_rounded_to_the_nearest(
    bits: int, signed: bool
) -> None:
    table, packs = torch.tensor(map_of(bits, signed)), bits == 4
    codes, scale = quantise(table.clone(), table, len(table), packs)
    assert torch.equal(restored(codes, scale, table, packs), table)
    values = torch.rand(256 * 4, generator=torch.Generator().manual_seed(0))
    values[0] = 1.0
    codes, scale = quantise(values, table, len(values), packs)
    nearest = (values[:, None] - table[None]).abs().amin(1)
    assert torch.allclose((restored(codes, scale, table, packs) - values).abs(), nearest, atol=1e-6)


def bytes_of(state: dict[str, Any]) -> int:
    return sum(value.nbytes for value in state.values() if isinstance(value, Tensor))


def test_the_state_takes_the_bytes_that_its_bits_say() -> None:
    for bits, expected in ((16, 4.0), (8, 2 + 8 / 256), (4, 1 + 8 / 128)):
        parameter = nn.Parameter(torch.zeros(8192))
        parameter.grad = torch.ones(8192)
        optimizer = LowBitAdam([{"params": [parameter], **ADAM}], bits, True)
        optimizer.step()
        assert bytes_of(optimizer.state[parameter]) == 8192 * expected


@pytest.mark.parametrize("kind", ["adam", "muon"])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_run_resumes_to_the_bit(bits: int, kind: str) -> None:
    given = {
        "optimizer": {"name": kind, "lr": 1e-3},
        "memory": {"low_bit_optimizer": {"backend": "own", "bits": bits}},
    }
    run, resumed = parts.gan(model=MODEL, **given), parts.gan(model=MODEL, **given)
    mechanism.train(run, [parts.batch(), parts.batch(1)])
    kinds = {
        value.dtype
        for state in run.optimizers["gen"].state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    }
    assert (torch.bfloat16 if bits == 16 else torch.uint8) in kinds
    structure, tensors = pack(capture(run))
    restore(resumed, unpack(structure, {name: tensor.clone() for name, tensor in tensors.items()}))
    mechanism.train(run, [parts.batch(2)])
    mechanism.train(resumed, [parts.batch(2)])
    assert mechanism.same(mechanism.state(run), mechanism.state(resumed))


def test_muon_keeps_its_momentum_in_few_bits_and_moves_nearly_the_same_way() -> None:
    full, few = weights()[:1], weights()[:1]
    group = {
        **ADAM,
        "muon": True,
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "adjust": "match_rms_adamw",
    }
    plain, own = (
        MuonWithAdam([{"params": full, **group}]),
        LowBitMuon([{"params": few, **group}], 8),
    )
    begin = full[0].detach().clone()
    step([plain, own], [full, few])
    assert own.state[few[0]]["momentum_buffer.codes"].dtype == torch.uint8
    apart, moved = (full[0] - few[0]).detach().norm(), (full[0] - begin).detach().norm()
    assert 0 < float(apart / moved) < 0.1


def test_other_backends_are_refused_for_what_only_the_own_one_has() -> None:
    with pytest.raises(ConfigError, match="torchao has no 4-bit state here; use backend: own"):
        parts.gan(memory={"low_bit_optimizer": {"backend": "torchao", "bits": 4}})
