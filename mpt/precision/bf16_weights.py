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
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpt.config.options import PrecisionOptions
from mpt.precision.choice import choose_dtype
from mpt.precision.master import HalfWeights
from mpt.precision.policy import Policy
from mpt.precision.rounding import BLOCK, make_table, random_halves, round_at_random, with_remainder
from mpt.seams import Phase, StepStats, Task

NAMES: dict[str, dict[str, object]] = {"bf16-sr": {"loss_scale": 1.0}, "bf16-kahan": {"loss_scale": 1.0}}
PROPOSALS = NEEDS_BFLOAT16 = ("bf16-sr",)
LOSSY = True
"""There are no float32 weights: of the modes with so few bytes per weight, this one also learns at small rates."""

PIECE = 2**21
"""Elements that are in float32 at a time, where the optimizer can be applied to parts of a tensor."""
ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.RMSprop, torch.optim.SGD)
"""Optimizers of torch that update each element by itself; one of ours says so by an attribute `elementwise`."""
COMPENSATION = "compensation"


class Settings(PrecisionOptions):
    dtype: Literal["auto", "bfloat16"] = "bfloat16"
    accumulate: Literal["bfloat16", "float32"] = "bfloat16"
    """What gradients are summed in over micro-batches and losses; float32 costs 2 more bytes per weight."""


@dataclass(frozen=True)
class Piece:
    """Some elements of a parameter, from `start` to `stop`."""

    parameter: nn.Parameter
    start: int
    stop: int
    before: dict[str, Any] | None = None
    """The parameter's state before its first piece: what is counted in it must look the same to every piece."""

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole parameter."""
        return len(self) == self.parameter.numel()

    def part(self, tensor: Tensor) -> Tensor:
        """Return this piece of a tensor of the parameter's shape."""
        return tensor if self.is_whole else tensor.view(-1)[self.start : self.stop]

    def belongs(self, value: Any) -> bool:
        """Return whether a value of the optimizer's state has an entry per element."""
        return isinstance(value, Tensor) and value.shape == self.parameter.shape and value.dim() > 0


class Bucket:
    """Pieces that are lifted to float32 together, with their gradients and optimizer state, and put back.

    What has an entry per element is lifted into one flat tensor for all pieces, of which each has a view: casts and
    rounding are then a few kernels for many small parameters.
    """

    def __init__(self, pieces: list[Piece], stored: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        self.pieces, self.stored = pieces, stored
        self.flat: dict[str, Tensor] = {}
        """Name of the state -> its flat tensor; the weights' name is empty."""
        self.lifted: list[nn.Parameter] = []
        self.wide: list[dict[str, Any]] = []

    def lift(self) -> None:
        """Make the float32 parameters and their state. Single numbers are copied: each piece counts for itself."""
        states = [self.stored[p.parameter] if p.before is None else p.before for p in self.pieces]
        weights = self._lift("", self.pieces, [piece.part(piece.parameter.detach()) for piece in self.pieces])
        kept = [(piece, w, s[COMPENSATION]) for piece, w, s in zip(self.pieces, weights, states) if COMPENSATION in s]
        if kept:
            torch._foreach_add_([w for _, w, _ in kept], [piece.part(value).float() for piece, _, value in kept])
        self.lifted = [nn.Parameter(weight) for weight in weights]
        gradients = [piece.parameter.grad for piece in self.pieces]
        dense = [(piece, grad) for piece, grad in zip(self.pieces, gradients) if grad is not None and grad.is_sparse]
        if dense:  # of an embedding, which no optimizer divides
            wide = [grad.float() for grad in gradients if grad is not None]
        else:
            parts = [piece.part(grad) for piece, grad in zip(self.pieces, gradients) if grad is not None]
            wide = self._lift("gradient", self.pieces, parts)
            del self.flat["gradient"]
        for lifted, gradient in zip(self.lifted, wide, strict=True):
            lifted.grad = gradient
        self.wide = [
            {key: small(value) for key, value in state.items() if key != COMPENSATION and not piece.belongs(value)}
            for piece, state in zip(self.pieces, states)
        ]
        names = sorted({key for p, s in zip(self.pieces, states) for key in s if p.belongs(s[key])} - {COMPENSATION})
        for name in names:
            owners = [index for index, state in enumerate(states) if self.pieces[index].belongs(state.get(name))]
            pieces = [self.pieces[index] for index in owners]
            values = self._lift(name, pieces, [self.pieces[index].part(states[index][name]) for index in owners])
            for index, value in zip(owners, values, strict=True):
                self.wide[index][name] = value

    def _lift(self, name: str, pieces: list[Piece], parts: list[Tensor]) -> list[Tensor]:
        flat = parts[0].reshape(-1) if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        self.flat[name] = flat.float() if flat.dtype != torch.float32 else flat.clone()
        views = torch.split(self.flat[name], [len(piece) for piece in pieces])
        return [view.view(part.shape) for view, part in zip(views, parts, strict=True)]

    def put_back(self, rounding: Rounding) -> None:
        """Round the stepped pieces and their state into the parameters and their stored state."""
        if rounding.compensates:
            nearest, remainder = with_remainder(self._together("", self.pieces, list(self.lifted)))
            self._store([piece.part(piece.parameter.detach()) for piece in self.pieces], nearest)
            self._store([self._slot(piece, COMPENSATION) for piece in self.pieces], remainder)
        else:
            flat = rounding.round("", self.pieces, self._together("", self.pieces, list(self.lifted)))
            self._store([piece.part(piece.parameter.detach()) for piece in self.pieces], flat)
        owners: dict[str, list[int]] = {}
        for index, (lifted, wide) in enumerate(zip(self.lifted, self.wide, strict=True)):
            stored = self.stored[self.pieces[index].parameter]
            for name, value in wide.items():
                if not (isinstance(value, Tensor) and value.dtype == torch.float32 and value.dim() > 0):
                    stored[name] = value
                elif value.shape == lifted.shape:
                    owners.setdefault(name, []).append(index)
                else:
                    flat = rounding.round_other(name, self.pieces[index], value.contiguous().view(-1))
                    if not isinstance(stored.get(name), Tensor):
                        stored[name] = torch.empty_like(value, dtype=torch.bfloat16)
                    stored[name].copy_(flat.view(value.shape))
        for name, indices in sorted(owners.items()):
            pieces = [self.pieces[index] for index in indices]
            together = self._together(name, pieces, [self.wide[index][name] for index in indices])
            self._store([self._slot(piece, name) for piece in pieces], rounding.round(name, pieces, together))

    def _together(self, name: str, pieces: list[Piece], values: list[Tensor]) -> Tensor:
        """Return the values as one flat tensor: the one that they were lifted into, if they are still its views."""
        flat = self.flat.get(name)
        if flat is not None and flat.numel() == sum(len(piece) for piece in pieces):
            storage = flat.untyped_storage()._cdata
            if all(v.untyped_storage()._cdata == storage and v.is_contiguous() for v in values):
                return flat
        return torch.cat([value.detach().reshape(-1) for value in values])

    def _slot(self, piece: Piece, name: str) -> Tensor:
        """Return the piece of a stored state, which is made where there is none yet."""
        stored = self.stored[piece.parameter]
        if not isinstance(stored.get(name), Tensor):
            like = piece.parameter.detach()
            stored[name] = torch.empty_like(like, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
        return piece.part(stored[name])

    def _store(self, places: list[Tensor], flat: Tensor) -> None:
        if len(places) == 1:
            places[0].copy_(flat.view(places[0].shape))
            return
        values = torch.split(flat.contiguous(), [place.numel() for place in places])
        torch._foreach_copy_(places, [value.view(place.shape) for value, place in zip(values, places, strict=True)])


def small(value: Any) -> Any:
    """Return a copy in float32 of what an optimizer keeps beside tensors of the parameter's shape."""
    if not isinstance(value, Tensor):
        return value
    return value.float() if value.dtype == torch.bfloat16 else value.clone()


@dataclass(frozen=True)
class Rounding:
    """How the results of one update are rounded: by a key and by the elements' places among all of a run."""

    compensates: bool
    key: tuple[int | str, ...]
    places: Mapping[nn.Parameter, int]
    """Parameter -> the place of its first element."""
    table: Tensor

    def round(self, name: str, pieces: Sequence[Piece], numbers: Tensor) -> Tensor:
        """Return the flat numbers of some pieces rounded at random; they are used up."""
        halves = torch.empty_like(numbers, dtype=torch.int32)
        done, start, count = 0, 0, 0
        for piece in pieces:
            place = self.places[piece.parameter] + piece.start
            if place != start + count:
                random_halves(self.table, (*self.key, name), start, halves[done : done + count])
                done, start, count = done + count, place, 0
            count += len(piece)
        random_halves(self.table, (*self.key, name), start, halves[done:])
        return round_at_random(numbers, halves)

    def round_other(self, name: str, piece: Piece, numbers: Tensor) -> Tensor:
        """Return the flat numbers of a state that has no entry per element, rounded at random."""
        halves = torch.empty_like(numbers, dtype=torch.int32)
        random_halves(self.table, (*self.key, name, self.places[piece.parameter]), 0, halves)
        return round_at_random(numbers, halves)


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
        self.table: Tensor | None = None

    def prepare(self, task: Task) -> None:
        """Convert the weights; let gradients add up in float32 where that is asked."""
        super().prepare(task)
        if self.settings.accumulate == "float32":
            for module in task.trainable.values():
                for parameter in module.parameters():
                    if parameter.dtype == torch.bfloat16:
                        parameter.grad_dtype = torch.float32

    def bind(self, phases: Sequence[Phase]) -> None:
        """Number the elements of all parameters, by which their random numbers differ."""
        super().bind(phases)
        count = sum(parameter.numel() for parameter in self.places)
        for phase in phases:
            for group in phase.optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter not in self.places:
                        self.places[parameter] = count
                        count += parameter.numel()
        if count:
            self.table = make_table(min(count, BLOCK), self.device)

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

    def _step_on(self, phase: Phase, pieces: list[Piece], members: list[list[nn.Parameter]]) -> None:
        """Step on some pieces, with the optimizer's groups and state narrowed to them."""
        optimizer, number = phase.optimizer, self.updates.get(phase.name, 0)
        stored = {piece.parameter: optimizer.state.pop(piece.parameter, {}) for piece in pieces}
        bucket = Bucket(pieces, stored)
        bucket.lift()
        lifted = {piece.parameter: own for piece, own in zip(pieces, bucket.lifted, strict=True)}
        for own, wide in zip(bucket.lifted, bucket.wide, strict=True):
            if wide:
                optimizer.state[own] = wide
        for group, parameters in zip(optimizer.param_groups, members, strict=True):
            group["params"] = [lifted[parameter] for parameter in parameters if parameter in lifted]
        try:
            optimizer.step()
        finally:
            bucket.wide = [optimizer.state.pop(own, {}) for own in bucket.lifted]
            key = (self.seed, phase.name, number)
            assert self.table is not None, "made in bind"
            bucket.put_back(Rounding(self.compensates, key, self.places, self.table))
            for parameter, state in stored.items():
                optimizer.state[parameter] = state

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
