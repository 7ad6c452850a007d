"""Pieces of half weights and their optimizer state that are lifted to float32, stepped on, and rounded back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpt.precision.shared.rounding import (
    code_remainder,
    coded_remainder,
    random_halves,
    round_at_random,
    with_remainder,
)

PIECE = 2**21
"""Elements that are in float32 at a time, if the optimizer can be applied to parts of a tensor."""
ELEMENTWISE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.SGD,
)
"""Optimizers of torch that update each element alone; one of ours says so by an attribute `elementwise`."""
COMPENSATION = "compensation"


@dataclass(frozen=True)
class Piece:
    """Some elements of a parameter, from `start` to `stop`."""

    parameter: nn.Parameter
    start: int
    stop: int
    before: dict[str, Any] | None = None
    """The parameter's state before its first piece: a count in it must look the same to every piece."""

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

    Entries per element are lifted into one flat tensor for all pieces, of which each has a view: casts and
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
        self._lift_weights(states)
        self._lift_gradients()
        self._lift_states(states)

    def _lift_weights(self, states: list[dict[str, Any]]) -> None:
        weights = self._lift(
            "", self.pieces, [piece.part(piece.parameter.detach()) for piece in self.pieces]
        )
        compensated, kept = [], []
        for piece, weight, state in zip(self.pieces, weights, states):
            if COMPENSATION in state:
                compensated.append(weight)
                part = piece.part(state[COMPENSATION])
                is_coded = part.dtype == torch.int8
                kept.append(
                    coded_remainder(part, piece.part(piece.parameter.detach()))
                    if is_coded
                    else part.float()
                )
        if kept:
            torch._foreach_add_(compensated, kept)
        self.lifted = [nn.Parameter(weight) for weight in weights]

    def _lift_gradients(self) -> None:
        gradients = [piece.parameter.grad for piece in self.pieces]
        given = [(piece, grad) for piece, grad in zip(self.pieces, gradients) if grad is not None]
        if any(grad.is_sparse for _, grad in given):  # of an embedding, which no optimizer divides
            wide = [grad.float() for _, grad in given]
        else:
            wide = self._lift("gradient", self.pieces, [piece.part(grad) for piece, grad in given])
            del self.flat["gradient"]
        for lifted, gradient in zip(self.lifted, wide, strict=True):
            lifted.grad = gradient

    def _lift_states(self, states: list[dict[str, Any]]) -> None:
        self.wide, names = [], set()
        for piece, state in zip(self.pieces, states):
            by_element = {key for key, value in state.items() if piece.belongs(value)} - {
                COMPENSATION
            }
            single = state.keys() - by_element - {COMPENSATION}
            self.wide.append({key: small(value) for key, value in state.items() if key in single})
            names |= by_element
        for name in sorted(names):
            owners = [
                index
                for index, state in enumerate(states)
                if self.pieces[index].belongs(state.get(name))
            ]
            pieces = [self.pieces[index] for index in owners]
            values = self._lift(
                name, pieces, [self.pieces[index].part(states[index][name]) for index in owners]
            )
            for index, value in zip(owners, values, strict=True):
                self.wide[index][name] = value

    def _lift(self, name: str, pieces: list[Piece], parts: list[Tensor]) -> list[Tensor]:
        flat = (
            parts[0].reshape(-1)
            if len(parts) == 1
            else torch.cat([part.reshape(-1) for part in parts])
        )
        self.flat[name] = flat.float() if flat.dtype != torch.float32 else flat.clone()
        views = torch.split(self.flat[name], [len(piece) for piece in pieces])
        return [view.view(part.shape) for view, part in zip(views, parts, strict=True)]

    def put_back(self, rounding: Rounding) -> None:
        """Round the stepped pieces and their state into the parameters and their stored state."""
        if rounding.remainder is not None:
            numbers = self._together("", self.pieces, list(self.lifted))
            nearest, remainder = with_remainder(numbers, self.pieces[0].parameter.dtype)
            self._store([piece.part(piece.parameter.detach()) for piece in self.pieces], nearest)
            kept = rounding.keep(self.pieces, remainder.view(-1), nearest.view(-1))
            self._store(
                [self._slot(piece, COMPENSATION, kept.dtype) for piece in self.pieces], kept
            )
        else:
            flat = rounding.round(
                "", self.pieces, self._together("", self.pieces, list(self.lifted))
            )
            self._store([piece.part(piece.parameter.detach()) for piece in self.pieces], flat)
        owners: dict[str, list[int]] = {}
        for index, (lifted, wide) in enumerate(zip(self.lifted, self.wide, strict=True)):
            stored = self.stored[self.pieces[index].parameter]
            for name, value in wide.items():
                if not (
                    isinstance(value, Tensor) and value.dtype == torch.float32 and value.dim() > 0
                ):
                    stored[name] = value
                elif value.shape == lifted.shape:
                    owners.setdefault(name, []).append(index)
                else:
                    flat = rounding.round_other(
                        name, self.pieces[index], value.contiguous().view(-1)
                    )
                    if not isinstance(stored.get(name), Tensor):
                        stored[name] = torch.empty_like(value, dtype=torch.bfloat16)
                    stored[name].copy_(flat.view(value.shape))
        for name, indices in sorted(owners.items()):
            pieces = [self.pieces[index] for index in indices]
            together = self._together(name, pieces, [self.wide[index][name] for index in indices])
            self._store(
                [self._slot(piece, name) for piece in pieces],
                rounding.round(name, pieces, together),
            )

    def _together(self, name: str, pieces: list[Piece], values: list[Tensor]) -> Tensor:
        """Return the values as one flat tensor: the one that they were lifted into, if they are still its views."""
        flat = self.flat.get(name)
        if flat is not None and flat.numel() == sum(len(piece) for piece in pieces):
            storage = flat.untyped_storage()._cdata
            if all(v.untyped_storage()._cdata == storage and v.is_contiguous() for v in values):
                return flat
        return torch.cat([value.detach().reshape(-1) for value in values])

    def _slot(self, piece: Piece, name: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the piece of a stored state, which is made if there is none of its dtype yet."""
        stored = self.stored[piece.parameter]
        kept = stored.get(name)
        if not isinstance(kept, Tensor) or kept.dtype != dtype:
            like = piece.parameter.detach()
            stored[name] = torch.empty_like(
                like, dtype=dtype, memory_format=torch.contiguous_format
            )
        return piece.part(stored[name])

    def _store(self, places: list[Tensor], flat: Tensor) -> None:
        if len(places) == 1:
            places[0].copy_(flat.view(places[0].shape))
            return
        values = torch.split(flat.contiguous(), [place.numel() for place in places])
        torch._foreach_copy_(
            places, [value.view(place.shape) for value, place in zip(values, places, strict=True)]
        )


def small(value: Any) -> Any:
    """Return a copy in float32 of an optimizer's entries other than tensors of the parameter's shape."""
    if not isinstance(value, Tensor):
        return value
    return value.float() if value.dtype == torch.bfloat16 else value.clone()


@dataclass(frozen=True)
class Rounding:
    """How the results of one update are rounded: by a key and by the elements' places among all of a run."""

    remainder: torch.dtype | None
    """The dtype that keeps what the weights' rounding leaves; None: they are rounded at random."""
    key: tuple[int | str, ...]
    places: Mapping[nn.Parameter, int]
    """Parameter -> the place of its first element."""
    table: Tensor

    def round(self, name: str, pieces: Sequence[Piece], numbers: Tensor) -> Tensor:
        """Return the flat numbers of some pieces rounded at random; they are used up."""
        return round_at_random(numbers, self._halves(name, pieces, numbers))

    def keep(self, pieces: Sequence[Piece], remainder: Tensor, nearest: Tensor) -> Tensor:
        """Return the rounding remainders of some pieces' weights, as they are kept; `remainder` is used up."""
        if self.remainder == torch.int8:
            return code_remainder(remainder, nearest, self._halves(COMPENSATION, pieces, remainder))
        return self.round(COMPENSATION, pieces, remainder)

    def _halves(self, name: str, pieces: Sequence[Piece], numbers: Tensor) -> Tensor:
        halves = torch.empty_like(numbers, dtype=torch.int32)
        done, start, count = 0, 0, 0
        for piece in pieces:
            place = self.places[piece.parameter] + piece.start
            if place != start + count:
                random_halves(self.table, (*self.key, name), start, halves[done : done + count])
                done, start, count = done + count, place, 0
            count += len(piece)
        random_halves(self.table, (*self.key, name), start, halves[done:])
        return halves

    def round_other(self, name: str, piece: Piece, numbers: Tensor) -> Tensor:
        """Return the flat numbers of a state that has no entry per element, rounded at random."""
        halves = torch.empty_like(numbers, dtype=torch.int32)
        random_halves(self.table, (*self.key, name, self.places[piece.parameter]), 0, halves)
        return round_at_random(numbers, halves)


def is_float32(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a `Float32Module`'s, which is updated as it is."""
    return parameter.dtype == torch.float32 and parameter.grad is not None


def buckets(optimizer: Optimizer, members: list[list[nn.Parameter]]) -> Iterator[list[Piece]]:
    """Yield the parameters that have gradients, small ones together, large ones in pieces if the optimizer allows."""
    divisible = isinstance(optimizer, ELEMENTWISE) or bool(getattr(optimizer, "elementwise", False))
    bucket: list[Piece] = []
    size = 0
    halves = [
        p for parameters in members for p in parameters if p.grad is not None and not is_float32(p)
    ]
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
