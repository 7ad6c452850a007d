"""One pass through a block, operator by operator: inputs, results and cost of each.

The record serves three ends. A choice is made from it (`mpt.memory.recomputing.choices`): which outputs to keep, and
the cost of computing the rest again. A recomputation is shortened by it (`mpt.memory.recomputing.keeping`): an operator
whose results nobody reads any more is not run. And both passes number operators alike, so that a kept output is handed
out where it belongs.

Numbers count the calls of one operator whose inputs come from the block's own inputs. A result of weights alone is
not counted, since a cast that the forward found in autocast's or O1's cache is made in the recomputation; neither is a
cast of the block's input itself, which autocast caches if that is a leaf.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry

from mpt.run.process.storage_trace import tensors_in

Key = tuple[Any, int]
"""An operator, and how many calls of it came before in the same pass."""
CAST = torch.ops.aten._to_copy.default
DEVICE_QUERY = torch.ops.prim.device.default
"""Asked of a fake tensor many times over, and no operator."""
SMALL_SHARE = 16
"""An output that is this many times smaller than the operator's largest (a norm's statistics) is kept in any case."""

NOMINAL_BANDWIDTH = 300e9
NOMINAL_HALF, NOMINAL_FLOAT32 = 25e12, 8e12
NOMINAL_LAUNCH = 6e-6
"""Bytes and operations per second, and seconds per launch, of an ordinary card. They weigh operators against each
other; the same choice must come out wherever it is made, on the card or on a machine that plans for it."""
HALF = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class Operator:
    """One call. Storages are numbers that a `Storages` gave out."""

    key: Key | None
    """None for a call that the recomputation cannot identify."""
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    """New storages that are worth their bytes; the small ones alongside them are kept anyway."""
    must_run: bool
    """It changes others' tensors, draws random numbers, or cannot be identified: run again in any case."""
    replaceable: bool
    """Something can stand in for results that nobody reads."""
    changes: int | None = None
    """The storage of the block's own making that it writes to, if it does nothing else: `out += identity`."""
    seconds: float = 0.0
    """On a nominal card."""


def find_rerun(
    operators: Sequence[Operator], saved: Iterable[int], kept: Iterable[Key]
) -> set[int]:
    """Return the positions of the operators that a recomputation has to run, if these outputs are kept."""
    places = places_of(operators)
    return look_back(operators, saved, {places[key] for key in kept if key in places})[0]


def find_used(operators: Sequence[Operator], saved: Iterable[int], kept: Iterable[Key]) -> set[Key]:
    """Return which of these outputs a recomputation needs. Others led to saved tensors in another loss only."""
    places = places_of(operators)
    keys = {places[key]: key for key in kept if key in places}
    return {keys[place] for place in look_back(operators, saved, keys)[1]}


def places_of(operators: Sequence[Operator]) -> dict[Key, int]:
    """Return the positions of the operators whose outputs can be kept."""
    return {
        one.key: position
        for position, one in enumerate(operators)
        if one.key is not None and not one.must_run
    }


def look_back(
    operators: Sequence[Operator], saved: Iterable[int], kept: Collection[int]
) -> tuple[set[int], set[int]]:
    """Return the positions of the operators to run, and of those whose kept outputs are used.

    By positions, since the hash of an operator is a function in Python.
    """
    wanted, positions, used = set(saved), set(), set()
    for position in range(len(operators) - 1, -1, -1):
        operator = operators[position]
        if (
            operator.replaceable
            and not operator.must_run
            and wanted.isdisjoint(operator.makes)
            and operator.changes not in wanted
        ):
            continue
        if position in kept:
            used.add(position)
        else:
            positions.add(position)
            wanted.update(operator.reads)
    return positions, used


class Storages:
    """Numbers for storages. A weak reference to each keeps its address from being used again, and holds no memory."""

    def __init__(self) -> None:
        self.numbers: dict[int, tuple[int, StorageWeakRef]] = {}
        self.sizes: list[int] = []
        self.changed: set[int] = set()
        """Those that were written to after they were made."""

    def note_changes(self, function: Any, args: Any, kwargs: Any) -> None:
        """Note which storages a call writes to."""
        for tensor in written(function, args, kwargs):
            number = self.find(tensor)
            if number is not None:
                self.changed.add(number)

    def find(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage, None if it has none."""
        entry = self.numbers.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[0]

    def add(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage, a new one if it has none."""
        storage = tensor.untyped_storage()
        entry = self.numbers.get(storage._cdata)
        if entry is None:
            entry = len(self.sizes), StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self.numbers[storage._cdata] = entry
            self.sizes.append(storage.nbytes())
        return entry[0]


@dataclass
class Walk:
    """Numbers the operators of one pass through a block."""

    storages: Storages = field(default_factory=Storages)
    given: set[int] = field(default_factory=set)
    """Storages of the block's inputs."""
    made: set[int] = field(default_factory=set)
    counts: Counter[Any] = field(default_factory=Counter)

    def begin(self, *inputs: Any) -> None:
        """Record the block's inputs."""
        self.given = {
            self.storages.add(tensor)
            for tensor in tensors_in(inputs)
            if tensor.layout == torch.strided
        }

    def inputs_of(self, args: Any, kwargs: Any) -> tuple[list[Tensor], tuple[int, ...]]:
        """Return an operator's inputs that come from the block's, and their storages."""
        tensors, numbers = [], []
        for tensor in (*tensors_in(args), *tensors_in(kwargs)):
            number = self.storages.find(tensor) if tensor.layout == torch.strided else None
            if number is not None and (number in self.made or number in self.given):
                tensors.append(tensor)
                numbers.append(number)
        return tensors, tuple(dict.fromkeys(numbers))

    def key(self, function: Any, reads: tuple[int, ...]) -> Key | None:
        """Return the next call's key, None for a cast of the block's inputs and for views."""
        if function.is_view or (function is CAST and reads[0] in self.given):
            return None
        number = self.counts[function]
        self.counts[function] += 1
        return function, number

    def note(self, result: Any) -> list[int]:
        """Take an operator's results for the block's own; return the storages that are new."""
        new = []
        for tensor in tensors_in(result):
            if tensor.layout != torch.strided:
                continue
            number = self.storages.find(tensor)
            if number is None:
                number = self.storages.add(tensor)
                new.append(number)
            if number not in self.given:
                self.made.add(number)
        return new

    def record(self, function: Any, args: Any, kwargs: Any, result: Any) -> Operator | None:
        """Take a call into account that was just made; None for a view, and for calls that are not counted."""
        inputs, reads = self.inputs_of(args, kwargs)
        if not reads:
            return None
        key = self.key(function, reads)
        new = self.note(result)
        if not new and not function._schema.is_mutable:
            return None
        if (
            key is not None
            and (changed := self.changed_alone(function, args, kwargs, result)) is not None
        ):
            return Operator(key, reads, (), must_run=False, replaceable=True, changes=changed)
        must_run = (
            key is None
            or not new
            or any(tensor.layout != torch.strided for tensor in tensors_in(result))
            or any(
                self.storages.find(tensor) in reads for tensor in written(function, args, kwargs)
            )
            or draws_random_numbers(function, args, kwargs)
        )
        replaceable = all(
            self.stand_in(Shape.of(one), inputs) is not None for one in large_outputs(result)
        )
        makes = tuple(
            number
            for number in new
            if number in {self.storages.find(one) for one in large_outputs(result)}
        )
        return Operator(key, reads, makes, must_run, replaceable)

    def changed_alone(self, function: Any, args: Any, kwargs: Any, result: Any) -> int | None:
        """Return the block's own storage that a call writes to and returns, None for a call that does anything else."""
        changed = written(function, args, kwargs)
        if (
            len(changed) != 1
            or result is not changed[0]
            or draws_random_numbers(function, args, kwargs)
        ):
            return None
        number = self.storages.find(result) if result.layout == torch.strided else None
        return number if number in self.made and number not in self.given else None

    def stand_in(self, shape: Shape, inputs: Sequence[Tensor]) -> Tensor | None:
        """Return memory that is there anyway in the form of a result that nobody will read; None if there is none.

        The block's own inputs do not serve: results of them are numbered otherwise.
        """
        for tensor in inputs:
            if (
                tensor.dtype != shape.dtype
                or tensor.device != shape.device
                or self.storages.find(tensor) not in self.made
            ):
                continue
            if tensor.shape == shape.size and tensor.stride() == shape.stride:
                return tensor
            if tensor.untyped_storage().nbytes() >= shape.bytes_needed:
                return tensor.as_strided(shape.size, shape.stride, 0)
        return None


@dataclass(frozen=True, slots=True)
class Shape:
    """The form of a result."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        """Return a tensor's form."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    @property
    def bytes_needed(self) -> int:
        """Bytes of the smallest storage that holds it."""
        if 0 in self.size:
            return 0
        last = sum((length - 1) * step for length, step in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize


def large_outputs(result: Any) -> list[Tensor]:
    """Return the results that are worth their bytes: all but those that are much smaller than the largest."""
    tensors = list(tensors_in(result))
    largest = max((tensor.nbytes for tensor in tensors), default=0)
    return [tensor for tensor in tensors if tensor.nbytes * SMALL_SHARE >= largest]


def written(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that a call writes to."""
    schema = function._schema
    found: list[Tensor] = []
    for position, argument in enumerate(schema.arguments if schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(
                args[position] if position < len(args) else kwargs.get(argument.name)
            )
    return found


def draws_random_numbers(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether leaving a call out would give the random operators after it other numbers."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    names = [argument.name for argument in function._schema.arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    return bool(args[position] if position < len(args) else kwargs.get("dropout_p", 0.0))


def nominal_seconds(function: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return a call's cost on a nominal card."""
    inputs = [*tensors_in(args), *tensors_in(kwargs)]
    moved = sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *tensors_in(result)))
    count = flop_registry.get(function._overloadpacket)
    flops = 0 if count is None else int(count(*args, **kwargs, out_val=result))
    speed = NOMINAL_HALF if any(tensor.dtype in HALF for tensor in inputs) else NOMINAL_FLOAT32
    return max(flops / speed, moved / NOMINAL_BANDWIDTH, NOMINAL_LAUNCH)
