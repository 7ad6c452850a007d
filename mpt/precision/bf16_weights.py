"""Weights, gradients and optimizer state in bfloat16 that learn: `bf16-sr` and `bf16-kahan`.

Nothing is kept in float32. The optimizer is any: a piece of the weights and its state is lifted to float32, the
optimizer takes its step there, and the results are written back to bfloat16. `bf16-sr` rounds them at random, so that
updates below half an ulp are not lost on average; `bf16-kahan` keeps what the weights' rounding leaves as a second
bfloat16 number and adds it the next time. The state of the optimizer is rounded at random in both: with a decay of
.999, averages that are rounded to the nearest would never fall.

Per weight with Adam: 8 bytes, or 10 with the compensation, against 16 of float32 and 8 of `bf16-pure`, which loses the
small updates. Beside them stands one piece in float32 while the optimizer steps.

The random numbers are a function of the seed, the phase, its count of updates, the parameter and the element: a resume
continues them, and neither the size of the pieces nor the device changes them. Sources: see `mpt.precision.rounding`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpt.config.options import PrecisionOptions
from mpt.precision.choice import choose_dtype
from mpt.precision.master import HalfWeights
from mpt.precision.policy import Policy
from mpt.precision.rounding import STREAMS, make_key, random_bits, round_at_random, stream, with_remainder
from mpt.seams import Phase, StepStats, Task

NAMES: dict[str, dict[str, object]] = {"bf16-sr": {"loss_scale": 1.0}, "bf16-kahan": {"loss_scale": 1.0}}

PIECE = 2**21
"""Elements that are in float32 at a time, where the optimizer can be applied to parts of a tensor."""
ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.RMSprop, torch.optim.SGD)
"""Optimizers of torch that update each element by itself; one of ours says so by an attribute `elementwise`."""
COMPENSATION = "compensation"


class Settings(PrecisionOptions):
    dtype: Literal["auto", "bfloat16"] = "bfloat16"
    accumulate: Literal["bfloat16", "float32"] = "bfloat16"
    """What gradients are summed in over micro-batches and losses; float32 costs 2 more bytes per weight."""


class Piece:
    """Some elements of a parameter, lifted to float32 with their gradient and optimizer state, and put back."""

    def __init__(self, parameter: nn.Parameter, start: int, stop: int, before: dict[str, Any] | None = None) -> None:
        self.parameter, self.start, self.stop = parameter, start, stop
        self.before = before
        """The parameter's state before its first piece: what is counted in it must look the same to every piece."""
        self.is_whole = stop - start == parameter.numel()

    def part(self, tensor: Tensor) -> Tensor:
        """Return this piece of a tensor of the parameter's shape."""
        return tensor if self.is_whole else tensor.view(-1)[self.start : self.stop]

    def belongs(self, value: Any) -> bool:
        """Return whether a value of the optimizer's state has an entry per element."""
        return isinstance(value, Tensor) and value.shape == self.parameter.shape and value.dim() > 0

    def lift(self, state: dict[str, Any]) -> tuple[nn.Parameter, dict[str, Any]]:
        """Return the piece and its state in float32. Single numbers are copied: each piece counts for itself."""
        weights = self.part(self.parameter.detach()).to(torch.float32, memory_format=torch.contiguous_format)
        if COMPENSATION in state:
            weights += self.part(state[COMPENSATION])
        lifted = nn.Parameter(weights)
        assert self.parameter.grad is not None
        lifted.grad = self.part(self.parameter.grad).float()
        wide: dict[str, Any] = {}
        for name, value in state.items():
            if name == COMPENSATION:
                continue
            if self.belongs(value):
                value = self.part(value)
            if isinstance(value, Tensor):
                value = value.float() if value.dtype == torch.bfloat16 else value.clone()
            wide[name] = value
        return lifted, wide

    def put_back(
        self, lifted: nn.Parameter, wide: Mapping[str, Any], state: dict[str, Any], rounding: Rounding
    ) -> None:
        """Round the stepped piece and its state into the parameter and into `state`, in place where there is one."""
        weights = lifted.detach()
        if rounding.compensates:
            nearest, remainder = with_remainder(weights)
            self.part(self.parameter.detach()).copy_(nearest)
            self._store(state, COMPENSATION, remainder, is_part=True)
        else:
            self.part(self.parameter.detach()).copy_(rounding.round(weights, self.start, 0))
        number = 0
        for name, value in sorted(wide.items()):
            if isinstance(value, Tensor) and value.dtype == torch.float32 and value.dim() > 0:
                number += 1
                is_part = value.shape == lifted.shape
                rounded = rounding.round(value.contiguous(), self.start if is_part else 0, number)
                self._store(state, name, rounded, is_part)
            else:
                state[name] = value

    def _store(self, state: dict[str, Any], name: str, value: Tensor, is_part: bool) -> None:
        if not isinstance(state.get(name), Tensor):
            like = self.parameter if is_part else value
            state[name] = torch.empty_like(like, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
        (self.part(state[name]) if is_part else state[name]).copy_(value)


class Rounding:
    """How the results of one parameter's update are rounded; the random bits of its elements are shared."""

    def __init__(self, compensates: bool, *key: int | str) -> None:
        self.compensates, self.parts = compensates, key
        self.made: dict[tuple[int, int, int], Tensor] = {}

    def round(self, numbers: Tensor, start: int, number: int) -> Tensor:
        """Return a tensor, the `number`-th of the update's results, rounded at random; `numbers` is used up."""
        place = (numbers.numel(), start, number // STREAMS)
        if place not in self.made:
            key = make_key(*self.parts, number // STREAMS)
            self.made[place] = random_bits(numbers.numel(), key, start, numbers.device)
        return round_at_random(numbers, stream(self.made[place], number))


class LearningBfloat16(HalfWeights):
    """bfloat16 throughout, with the optimizer's steps taken in float32 piece by piece."""

    settings: Settings
    replaces_step = True

    def __init__(self, name: str, settings: Settings, device: torch.device, dtype: torch.dtype, reason: str) -> None:
        super().__init__(name, settings, device, dtype, reason)
        self.compensates = name == "bf16-kahan"
        self.seed = torch.initial_seed()  # the run's: everything is seeded before a mode is built
        self.updates: dict[str, int] = {}
        self.places: dict[nn.Parameter, int] = {}

    def prepare(self, task: Task) -> None:
        """Convert the weights; let gradients add up in float32 where that is asked."""
        super().prepare(task)
        if self.settings.accumulate == "float32":
            for module in task.trainable.values():
                for parameter in module.parameters():
                    if parameter.dtype == torch.bfloat16:
                        parameter.grad_dtype = torch.float32

    def bind(self, phases: Sequence[Phase]) -> None:
        """Number the parameters, by which their random numbers differ."""
        super().bind(phases)
        for phase in phases:
            for group in phase.optimizer.param_groups:
                for parameter in group["params"]:
                    self.places.setdefault(parameter, len(self.places))

    def step(self, phase: Phase, clip_norm: float | None) -> StepStats:
        """Clip and step, and count the update."""
        stats = super().step(phase, clip_norm)
        if not stats.skipped:
            self.updates[phase.name] = self.updates.get(phase.name, 0) + 1
        return stats

    @torch.no_grad()
    def optimize(self, phase: Phase) -> None:
        """Let the optimizer step, a few pieces at a time, on what has a gradient in its groups now."""
        optimizer = phase.optimizer
        members = [list(group["params"]) for group in optimizer.param_groups]
        settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        try:
            for group, parameters in zip(optimizer.param_groups, members, strict=True):
                group["params"] = [parameter for parameter in parameters if is_float32(parameter)]
            optimizer.step()  # also on none at all: it may count its steps
            for bucket in buckets(optimizer, members):
                # What an optimizer counts in its groups, it counts once per update.
                for group, before in zip(optimizer.param_groups, settings, strict=True):
                    group.update(before)
                self._step_on(phase, bucket, members)
        finally:
            for group, parameters in zip(optimizer.param_groups, members, strict=True):
                group["params"] = parameters

    def _step_on(self, phase: Phase, bucket: list[Piece], members: list[list[nn.Parameter]]) -> None:
        """Step on some pieces, with the optimizer's groups and state narrowed to them."""
        optimizer, number = phase.optimizer, self.updates.get(phase.name, 0)
        stored = {piece.parameter: optimizer.state.pop(piece.parameter, {}) for piece in bucket}
        lifted: dict[nn.Parameter, nn.Parameter] = {}
        for piece in bucket:
            state = stored[piece.parameter] if piece.before is None else piece.before
            lifted[piece.parameter], wide = piece.lift(state)
            if wide:
                optimizer.state[lifted[piece.parameter]] = wide
        for group, parameters in zip(optimizer.param_groups, members, strict=True):
            group["params"] = [lifted[parameter] for parameter in parameters if parameter in lifted]
        try:
            optimizer.step()
        finally:
            for piece in bucket:
                parameter = piece.parameter
                key = (self.seed, phase.name, number, self.places.get(parameter, -1))
                wide = optimizer.state.pop(lifted[parameter], {})
                piece.put_back(lifted[parameter], wide, stored[parameter], Rounding(self.compensates, *key))
                optimizer.state[parameter] = stored[parameter]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of any mode, and the counts on which the random numbers depend."""
        return {**super().state_dict(), "updates": dict(self.updates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; a run of another mode has counted nothing."""
        super().load_state_dict(state)
        self.updates = {name: int(count) for name, count in state.get("updates", {}).items()}


def is_float32(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a `Float32Module`'s, which is updated as it stands."""
    return parameter.dtype == torch.float32 and parameter.grad is not None


def buckets(optimizer: Optimizer, members: list[list[nn.Parameter]]) -> Iterator[list[Piece]]:
    """Yield the parameters that have gradients, small ones together, large ones in pieces if the optimizer allows."""
    divisible = isinstance(optimizer, ELEMENTWISE) or bool(getattr(optimizer, "elementwise", False))
    bucket: list[Piece] = []
    size = 0
    halves = [p for parameters in members for p in parameters if p.grad is not None and not is_float32(p)]
    for parameter in halves:
        count = parameter.numel()
        if divisible and count > PIECE and parameter.is_contiguous():
            before = dict(optimizer.state.get(parameter, {}))
            for start in range(0, count, PIECE):
                yield [Piece(parameter, start, min(start + PIECE, count), before)]
            continue
        if bucket and size + count > PIECE:
            yield bucket
            bucket, size = [], 0
        bucket.append(Piece(parameter, 0, count))
        size += count
    if bucket:
        yield bucket


def build(name: str, settings: Settings, device: torch.device) -> Policy:
    """Build the mode."""
    dtype, reason = choose_dtype(settings, device, "bfloat16")
    how = {
        "bf16-sr": "rounded at random after each step",
        "bf16-kahan": "with a bfloat16 compensation of what rounding leaves",
    }
    return LearningBfloat16(name, settings, device, dtype, f"{reason}; weights in bfloat16, {how[name]}")
