"""Optimizers whose running means are stored in 16, 8 or 4 bits, in plain PyTorch: any device, planned as they run.

A mean in 8 or 4 bits is a code per value and a float32 scale per block (256 and 128 values), its absolute maximum; what
the codes represent is the dynamic map of Dettmers et al. (8 bits, and 4 bits with a sign) and a linear one without zero
for second moments in 4 bits (Li et al.). Tensors of less than 4096 values, and those that are no multiple of a block,
stay float32. In 16 bits the first moment is bfloat16, rounded to nearest, and the second is rounded at random: at a
decay of 0.999 each step moves it by less than half an ulp.

The update is computed in float32, a million values at a time. Source: Dettmers et al., "8-bit optimizers via block-wise
quantization", 2022; Li et al., "Memory efficient optimizers with 4-bit states", 2023; torchao's `AdamW8bit` and
`AdamW4bit`, with which results are compared.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import Optimizer

from mpt.optim.muon import MuonWithAdam, step_matrix
from mpt.optim.shared.own_update import OwnUpdate
from mpt.precision.shared.rounding import BLOCK, make_table, random_halves, round_at_random
from mpt.precision.shared.saved_dtypes import put_back_dtypes

BLOCKS = {8: 256, 4: 128}
SMALLEST = 4096
AT_ONCE = 1 << 20
"""Values of a tensor that are updated together, so that the temporaries of a large one are bounded."""
LEAST_SCALE = 1e-12


@functools.cache
def dynamic_map(signed: bool, exponents: int, bits: int) -> tuple[float, ...]:
    """Return the values of a dynamic map's codes in ascending order, the largest 1.

    Each decade below 1 has half as many values as the one above it.
    """
    rest = bits - 1 - exponents
    values = [0.0, 1.0]
    for decade in range(exponents):
        count = 2 ** (decade + rest) if signed else 2 ** (decade + rest + 1)
        values += decade_values(count, 10.0 ** (decade - exponents + 1), signed)
    if rest:
        values += decade_values(2**rest - 1, 1.0, signed)
    return tuple(sorted(values))


def decade_values(count: int, scale: float, signed: bool) -> list[float]:
    """Return the middles of `count` equal parts of 0.1 to 1, scaled."""
    edges = torch.linspace(0.1, 1, count + 1, device="cpu")
    middles: list[float] = (scale * ((edges[:-1] + edges[1:]) / 2.0)).tolist()
    return middles + ([-one for one in middles] if signed else [])


def map_of(bits: int, signed: bool) -> tuple[float, ...]:
    """Return the values of all codes."""
    if bits == 8:
        return dynamic_map(signed, 7, 8)
    if signed:
        return dynamic_map(True, 3, 4)
    return tuple(torch.linspace(0, 1, 17, device="cpu")[1:].tolist())


def quantise(values: Tensor, table: Tensor, block: int, packs: bool) -> tuple[Tensor, Tensor]:
    """Return the codes (uint8, two in a byte if `packs`) and the scales of flat float32 values."""
    parts = values.view(-1, block)
    scale = parts.abs().amax(-1).clip(LEAST_SCALE)
    scaled = (parts / scale.view(-1, 1)).view(-1)
    codes = torch.searchsorted(table, scaled, right=True, out_int32=True).sub_(1).clamp_(0)
    above = (codes + 1).clamp_(max=len(table) - 1)
    low = table[codes]
    codes = torch.where(scaled - low >= (table[above] - low) * 0.5, above, codes).to(torch.uint8)
    return ((codes[::2] << 4) | codes[1::2] if packs else codes), scale


def restored(codes: Tensor, scale: Tensor, table: Tensor, packs: bool) -> Tensor:
    """Return the flat float32 values of codes."""
    if packs:
        codes = torch.stack([codes >> 4, codes & 0b1111], dim=-1).view(-1)
    return (table[codes.int()].view(len(scale), -1) * scale.view(-1, 1)).view(-1)


class Means:
    """Running means of one optimizer in few bits, as plain tensors in its state.

    A mean `m` of few bits is `m.codes` and `m.scale`, else `m` itself, in bfloat16 or float32.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.tables: dict[tuple[bool, torch.device], Tensor] = {}
        self.random: dict[torch.device, Tensor] = {}

    def begin(self, state: dict[str, Any], name: str, parameter: Tensor) -> None:
        """Make a mean of zeros."""
        count = parameter.numel()
        if self.bits in BLOCKS and count >= SMALLEST and count % BLOCKS[self.bits] == 0:
            device = parameter.device
            state[f"{name}.codes"] = torch.zeros(
                count * self.bits // 8, dtype=torch.uint8, device=device
            )
            state[f"{name}.scale"] = torch.zeros(count // BLOCKS[self.bits], device=device)
        else:
            dtype = torch.bfloat16 if self.bits == 16 else torch.float32
            state[name] = torch.zeros(count, dtype=dtype, device=parameter.device)

    def table(self, signed: bool, device: torch.device) -> Tensor:
        """Return the values of the codes on a device."""
        if (signed, device) not in self.tables:
            with unset_fake_temporarily():
                values = map_of(self.bits, signed)
            self.tables[signed, device] = torch.tensor(values, device=device)
        return self.tables[signed, device]

    def read(self, state: dict[str, Any], name: str, signed: bool, part: slice) -> Tensor:
        """Return a part of a mean in float32, a tensor of its own."""
        if name in state:
            return torch.empty_like(state[name][part], dtype=torch.float32).copy_(state[name][part])
        codes, scale = self.pieces(state, name, part)
        return restored(codes, scale, self.table(signed, codes.device), self.bits == 4)

    def write(
        self, state: dict[str, Any], name: str, signed: bool, part: slice, values: Tensor, key: Any
    ) -> None:
        """Store a part of a mean; `key` chooses the random bits of a second moment in 16 bits."""
        if name not in state:
            codes, scale = self.pieces(state, name, part)
            new, sizes = quantise(
                values, self.table(signed, values.device), BLOCKS[self.bits], self.bits == 4
            )
            codes.copy_(new)
            scale.copy_(sizes)
        elif self.bits == 16 and not signed:
            halves = torch.empty(len(values), dtype=torch.int32, device=values.device)
            random_halves(self.random_table(values.device), key, part.start, halves)
            state[name][part].copy_(round_at_random(values.clone(), halves))
        else:
            state[name][part].copy_(values)

    def random_table(self, device: torch.device) -> Tensor:
        """Return the table of random numbers on a device."""
        if device not in self.random:
            self.random[device] = make_table(BLOCK, device)
        return self.random[device]

    def pieces(self, state: dict[str, Any], name: str, part: slice) -> tuple[Tensor, Tensor]:
        """Return the codes and scales of a part, which begins at a block."""
        block = BLOCKS[self.bits]
        codes = slice(part.start * self.bits // 8, part.stop * self.bits // 8)
        return state[f"{name}.codes"][codes], state[f"{name}.scale"][
            part.start // block : part.stop // block
        ]


def parts_of(count: int) -> Iterator[slice]:
    """Yield the parts of a flat tensor that are updated together."""
    for start in range(0, count, AT_ONCE):
        yield slice(start, min(start + AT_ONCE, count))


class KeepsDtypes(Optimizer):
    """An optimizer whose state is loaded in the dtypes that it was saved in."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load, and put back the tensors that torch casts to the parameters' dtype."""
        super().load_state_dict(state_dict)
        put_back_dtypes(self, state_dict)


class LowBitAdam(KeepsDtypes, OwnUpdate):
    """Adam and AdamW with means in few bits. State `exp_avg` and `exp_avg_sq`, and a count of steps."""

    def __init__(self, groups: Any, bits: int, decoupled: bool) -> None:
        super().__init__(groups, {"bits": bits})
        self.means, self.decoupled = Means(bits), decoupled

    def update(self) -> None:
        """Perform one update."""
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                if parameter.grad is not None:
                    step_of_adam(
                        self.means, self.state[parameter], parameter, group, self.decoupled, number
                    )


def step_of_adam(
    means: Means,
    state: dict[str, Any],
    parameter: Tensor,
    group: dict[str, Any],
    decoupled: bool,
    number: int,
) -> None:
    """Update one parameter."""
    if not state:
        state["count"] = 0
        means.begin(state, "exp_avg", parameter)
        means.begin(state, "exp_avg_sq", parameter)
    state["count"] += 1
    gradient = parameter.grad
    assert gradient is not None
    flat, slope = parameter.detach().contiguous().view(-1), gradient.contiguous().view(-1)
    first, second = group["betas"]
    rate, decay, of_mean, of_square = factors(group, state["count"])
    for part in parts_of(flat.numel()):
        weights, slopes = flat[part].float(), slope[part].float()
        if decoupled:
            weights = weights - decay * weights
        else:
            slopes = slopes + group["weight_decay"] * weights
        mean = means.read(state, "exp_avg", True, part).lerp_(slopes, 1 - first)
        square = means.read(state, "exp_avg_sq", False, part).lerp_(slopes.square(), 1 - second)
        means.write(state, "exp_avg", True, part, mean, None)
        means.write(state, "exp_avg_sq", False, part, square, (number, state["count"]))
        spread = square.sqrt_() / of_square + group["eps"]
        flat[part].copy_(weights - rate * (mean / of_mean) / spread)
    if not parameter.is_contiguous():
        parameter.copy_(flat.view(parameter.shape))


def factors(group: dict[str, Any], steps: int) -> tuple[float, float, float, float]:
    """Return the rate, the rate times the decay, and the divisors of both means: in float32, as torchao has them.

    They are no tensors of the step: a plan's have no values.
    """
    first, second = group["betas"]
    with unset_fake_temporarily():
        count, rate = torch.tensor(float(steps)), torch.tensor(float(group["lr"]))
        found = (rate, rate * group["weight_decay"], 1 - first**count, (1 - second**count).sqrt())
        return tuple(float(one) for one in found)  # type: ignore[return-value]


class LowBitMuon(KeepsDtypes, MuonWithAdam):
    """Muon with its momentum in few bits; parameters that AdamW updates have their means in few bits too."""

    def __init__(self, groups: Any, bits: int) -> None:
        super().__init__(groups, bits=bits)
        self.means = Means(bits)

    def update(self) -> None:
        """Perform one update."""
        number = 0
        for group in self.param_groups:
            if group["muon"]:
                self._step_matrices(group)
                number += len(group["params"])
                continue
            for parameter in group["params"]:
                number += 1
                if parameter.grad is not None:
                    step_of_adam(self.means, self.state[parameter], parameter, group, True, number)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                self.means.begin(state, "momentum_buffer", parameter)
            whole, gradient = slice(0, parameter.numel()), parameter.grad.float()
            momentum = self.means.read(state, "momentum_buffer", True, whole).view(gradient.shape)
            momentum.lerp_(gradient, 1 - group["momentum"])
            update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
            self.means.write(state, "momentum_buffer", True, whole, momentum.view(-1), None)
            step_matrix(parameter, update, group)
