"""The values of small fake tensors that follow from the program alone.

A network's sizes may be computed with tensors: the widths of a RegNet are `torch.arange(depth) * slope + start`,
rounded and read with `tolist()`; the rates of stochastic depth are `torch.linspace(0, rate, depth)`. Fake tensors hold
no values. So each small storage that is filled by an operator without chance, from tensors whose values are known, gets
a real storage on the CPU in addition, and operators are called on both. Views need no care, since values belong to
storages. A storage that is written to by anything else loses its values.

Nothing that is recorded changes: the fake operators are called as ever.

Where values are trusted, numbers that are drawn and batches that a loader reads are known too, and larger
ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from mpt.planner.device.composites import parts_of
from mpt.planner.device.jagged import NESTED
from mpt.planner.device.operator_kinds import DEVICE_QUERY
from mpt.planner.device.zero_values import SCALAR
from mpt.planner.trace.recorder import holds_others
from mpt.run.process.storage_trace import LiveStorages, tensors_in

MOST_BYTES = 32768
"""Of a storage whose values are kept: 4,096 integers."""
MOST_TRUSTED_BYTES = 1 << 20
"""The same of integers and masks, which places of tokens are, and where values are trusted: the boxes of a batch."""
MOST_DATA_BYTES = 16 << 20
"""Of one that holds data which the script has as an array, or follows from such: the order of 2 million samples."""
MOST_TRUSTED_DATA_BYTES = 64 << 20
"""The same where values are trusted: a graph of 4,096 nodes as a matrix, a batch's pixels."""
MOST_DATA_SECONDS = 10.0
"""How long operators on such data may take; they are not followed afterwards."""
MOST_FILLED = 64
"""Numbers of a tensor that is filled by chance and known where values are trusted: larger ones are weights."""
MASKS = (torch.bool, torch.uint8)
_aten = torch.ops.aten
_CPU = torch.device("cpu")
_FAKE: Any = torch._C._TorchDispatchModeKey.FAKE
UNKNOWN = object()
"""In place of a result on values that are not known."""
OVERWRITES = (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default, _aten.copy_.default)
"""They read nothing of the tensor that they write."""
RESHAPES = {"resize_", "resize_as_", "set_"}
"""They change a tensor's memory, and not its values."""
ABSORBING: dict[Any, bool] = {
    _aten.bitwise_or.Tensor: True,
    _aten.bitwise_or_.Tensor: True,
    _aten.logical_or.default: True,
    _aten.bitwise_and.Tensor: False,
    _aten.bitwise_and_.Tensor: False,
    _aten.logical_and.default: False,
}
"""Logical operator -> the value of one argument that decides its result."""
ASKING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
READS = ("tolist", "numpy")
"""Methods that read values without an operator."""
BLANK = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
BY_FORM = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
"""They read no values of their first argument."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What decides whether the values of an operator's results are known."""

    is_view: bool
    is_followed: bool
    """Its results are the same each time, by torch's own rules."""
    writes: tuple[tuple[int, str], ...]
    """Places and names of the arguments that it writes to."""
    is_blank: bool
    is_by_form: bool
    is_drawn: bool
    """Its results are drawn by chance."""
    asks_values: bool
    """Its result is a number, or has a shape, that follows from values."""


_traits: dict[int, tuple[Any, Traits]] = {}
"""By an operator's identity, which is its own for as long as it is kept here."""


def traits_of(func: Any) -> Traits:
    """Return an operator's traits."""
    found = _traits.get(id(func))
    if found is None:
        space, _, name = func._schema.name.partition("::")
        arguments = enumerate(func._schema.arguments)
        writes = tuple(
            (place, one.name) for place, one in arguments if one.alias_info and one.alias_info.is_write
        )  # fmt: skip
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_stable = space == "aten" and not is_random and name not in RESHAPES
        found = (
            func,
            Traits(
                func.is_view,
                is_stable,
                writes,
                is_stable and name in BLANK,
                is_stable and name in BY_FORM,
                space == "aten" and is_random,
                is_stable and any(tag in func.tags for tag in ASKING),
            ),
        )
        _traits[id(func)] = found
    return found[1]


class TrueValues:
    """The values of the storages that are known."""

    most_filled = MOST_FILLED

    def __init__(self, are_trusted: bool = False) -> None:
        self.are_trusted = are_trusted
        self.most_bytes = MOST_TRUSTED_BYTES if are_trusted else MOST_BYTES
        self.most_data_bytes = MOST_TRUSTED_DATA_BYTES if are_trusted else MOST_DATA_BYTES
        self._data_seconds = MOST_DATA_SECONDS
        self._storages: dict[int, torch.UntypedStorage | None] = {}
        """By number; None for memory that nothing was written to."""
        self._live = LiveStorages(self._drop)
        self._count = 0
        self.on_read: Callable[[], None] = lambda: None
        """What is called if a number is read."""
        self.sizes = self.empty_sizes = 0
        """How many sizes followed from values, and how many of them were 0."""

    def of(self, tensor: Tensor, is_overwritten: bool = False) -> Tensor | None:
        """Return a tensor's values, which share memory with those that are kept; None if they are not known."""
        if not isinstance(tensor, FakeTensor):
            is_real = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"
            is_plain = is_real and tensor.layout is torch.strided and self._is_small(tensor)
            return tensor.detach().clone() if is_plain else None
        number = self._live.number_of(tensor)
        if number is None:
            return self._unfollowed(tensor)
        if not self._is_small(tensor) or tensor.is_conj() or tensor.is_neg():
            return None
        storage = self._storages[number]
        if storage is None:
            if not is_overwritten:
                return None
            size = tensor.untyped_storage().nbytes()
            zeros = torch.zeros(size, dtype=torch.uint8, device="cpu")
            storage = self._storages[number] = zeros.untyped_storage()
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage, *place)

    def _unfollowed(self, tensor: FakeTensor) -> Tensor | None:
        if tensor.constant is not None:  # torch keeps it right itself
            return tensor.constant.clone()
        if tensor.numel() or tensor.layout is not torch.strided:
            return None
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    def follow(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Compute the values of an operator's results, and of the tensors that it wrote to."""
        traits = traits_of(func)
        if traits.is_view and isinstance(args[0], FakeTensor):
            return
        with torch._C.DisableTorchFunction():
            if traits.is_blank:
                self.keep(result, None)
                return
            named = traits.writes
            written = [args[at] if at < len(args) else kwargs.get(name) for at, name in named]
            if all(map(self._is_followed, tensors_in(written))):
                values = self.computed(func, args, kwargs, result)
                if values is not UNKNOWN:
                    for fake, value in zip(tensors_in(result), tensors_in(values), strict=False):
                        self.keep(fake, value)
                    return
            self._forget(written)

    def computed(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any = None) -> Any:
        """Return an operator's result on the values of its arguments, or `UNKNOWN`.

        `result`: on fake tensors, which is not computed if it is large.
        """
        traits = traits_of(func)
        if not (traits.is_followed or self._is_drawn_here(traits, result)):
            return UNKNOWN
        is_filled = func in OVERWRITES or (traits.is_drawn and traits.writes)
        by_form, overwritten = traits.is_by_form, args[0] if is_filled else None
        values: dict[int, Tensor] = {}
        with torch._C.DisableTorchFunction(), no_dispatch():
            for one in tensors_in((args, kwargs)):
                value = _form_of(one) if by_form else self.of(one, one is overwritten)
                if value is None:
                    return self._absorbed(func, args, result)
                values[id(one)] = value
            is_large = not by_form and any(map(self._is_large, values.values()))
            if not all(map(self._is_small if is_large else self._is_few, tensors_in(result))):
                return UNKNOWN
            args, kwargs = tree_map_only(Tensor, lambda one: values[id(one)], (args, kwargs))
            args, kwargs = tree_map_only(torch.device, lambda _: _CPU, (args, kwargs))
            started = time.perf_counter()
            try:
                return func(*args, **kwargs)
            # a kernel that the CPU does not have, or a mistake that is the user's
            except Exception:
                return UNKNOWN
            finally:
                if is_large:
                    self._wait(time.perf_counter() - started)

    @property
    def has_hurried(self) -> bool:
        """Large data are followed no longer, since their operators took too long."""
        return self._data_seconds < 0

    def _wait(self, seconds: float) -> None:
        self._data_seconds -= seconds
        if self.has_hurried:
            self.most_data_bytes = self.most_bytes

    def _absorbed(self, func: Any, args: Any, result: Any) -> Any:
        """Return what one known argument makes of a logical operator's result, or `UNKNOWN`: a loop that writes token
        after token ends as its longest sequence does, whatever was written.

        Where data are trusted, a mask that is not known selects all that a known one leaves to it.
        """
        decisive = ABSORBING.get(func)
        if decisive is None or result is None or not self._is_small(result):
            return UNKNOWN
        is_mask = result.dtype == torch.bool
        if decisive and not is_mask:
            return UNKNOWN
        for one in args:
            value = self.of(one) if isinstance(one, Tensor) else None
            if value is not None and bool((value == decisive).all()):
                return torch.full(result.shape, decisive, dtype=result.dtype, device="cpu")
            if value is not None and is_mask and not decisive and self.are_trusted:
                return value.bool().expand(result.shape).clone()
        return UNKNOWN

    def _is_drawn_here(self, traits: Traits, result: Any) -> bool:
        """Return whether the results of an operator of chance are those of a draw of our own."""
        if not (self.are_trusted and traits.is_drawn):
            return False
        return not traits.writes or all(
            one.numel() <= self.most_filled for one in tensors_in(result)
        )

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of an operator that asks for values, if they are known, or `UNKNOWN`."""
        if not traits_of(func).asks_values or _is_plain_index(func, args):
            return UNKNOWN
        value = self.computed(func, args, kwargs)
        if value is UNKNOWN:
            return value
        if func is SCALAR:
            self.on_read()
        if torch.Tag.dynamic_output_shape in func.tags:
            self.note_size(max(one.numel() for one in tensors_in(value)))
        return self.made(value, args[0].device)

    def note_size(self, size: int) -> None:
        """Note a size that follows from values that are known."""
        self.sizes += size > 0
        self.empty_sizes += size == 0

    def follows(self, values: Iterable[Any]) -> bool:
        """Return whether the values of any of these tensors are known, lists of them included."""
        numbers = self._live.numbers
        return bool(numbers) and any(
            self.follows(one)
            if type(one) in (list, tuple)
            else type(one) is FakeTensor and one.untyped_storage()._cdata in numbers
            for one in values
        )

    def made(self, value: Any, device: torch.device) -> Any:
        """Return results whose shapes depend on values as fake tensors of a device."""
        if isinstance(value, tuple):
            return tuple(self.made(one, device) for one in value)
        if not isinstance(value, Tensor):
            return value
        fake = torch.empty(value.shape, dtype=value.dtype, device=device)
        self.keep(fake, value)
        return fake

    def _is_followed(self, tensor: Tensor) -> bool:
        return type(tensor) is FakeTensor and self._live.number_of(tensor) is not None

    def keep(self, fake: Tensor, value: Tensor | None) -> None:
        """Note the values of new memory, or that nothing was written to it."""
        if type(fake) is not FakeTensor or self._is_followed(fake):
            return
        size = fake.untyped_storage().nbytes()
        most = self.most_bytes if value is None else self.most_data_bytes
        if not 0 < size <= most or size < fake.numel() * fake.itemsize:
            return
        if value is not None and (value.shape != fake.shape or value.dtype != fake.dtype):
            return
        self._count += 1
        self._storages[self._count] = None
        self._live.add(fake, self._count)
        if value is not None:
            self.write(fake, value)

    def write(self, fake: Tensor, value: Tensor) -> None:
        """Note the values of memory that is followed, if it is."""
        with torch._C.DisableTorchFunction(), no_dispatch():
            own = self.of(fake, is_overwritten=True)
            if own is not None:
                own.copy_(value)

    def read(self, tensor: Tensor) -> Any:
        """Return a copy of a tensor's values as an array, None if they are not known."""
        with torch._C.DisableTorchFunction(), no_dispatch():
            value = self.of(tensor)
            if value is None:
                return None
            return (value.float() if value.dtype == torch.bfloat16 else value.clone()).numpy()

    def keep_number(self, fake: Tensor, number: float) -> None:
        """Note the value of a single number."""
        with torch._C.DisableTorchFunction(), no_dispatch():
            value = torch.full(fake.shape, number, dtype=fake.dtype, device="cpu")
        self.keep(fake, value)

    def keep_order(self, fake: Tensor, generator: torch.Generator | None = None) -> None:
        """Note one of the orders that it may have, or the one that a generator of its own draws."""
        with torch._C.DisableTorchFunction(), no_dispatch():
            value = torch.arange(len(fake), dtype=fake.dtype, device="cpu")
            if generator is not None:
                torch.randperm(len(fake), generator=generator, out=value)
        self.keep(fake, value)

    def keep_places(self, fake: Tensor, shape: torch.Size) -> None:
        """Note that these are all places of a mask of this shape, in order."""
        if self._is_small(fake):
            with torch._C.DisableTorchFunction(), no_dispatch():
                value = torch.ones(shape, dtype=torch.bool, device="cpu").nonzero()
            self.keep(fake, value)

    def _is_small(self, tensor: Tensor) -> bool:
        return tensor.numel() * tensor.itemsize <= self.most_data_bytes

    def _is_few(self, tensor: Tensor) -> bool:
        most = self.most_bytes if tensor.is_floating_point() else MOST_TRUSTED_BYTES
        return tensor.numel() * tensor.itemsize <= most

    def _is_large(self, tensor: Tensor) -> bool:
        return not self._is_few(tensor)

    def _drop(self, number: int) -> None:
        self._storages.pop(number, None)

    def _forget(self, written: Any) -> None:
        for one in tensors_in(written):
            if self._is_followed(one):
                self._live.bury(one)


def _form_of(tensor: Tensor) -> Tensor:
    return torch.empty((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)


def are_true() -> bool:
    """Return whether tensors are true for a while, and not fake, such as the places of a mesh's ranks."""
    return torch._C._get_dispatch_mode(_FAKE) is None


def comes_back(func: Any, types: Any) -> bool:
    """Return whether an operator comes back with inner tensors: of a nested tensor, and a number of a DTensor."""
    return NESTED in types or (func is SCALAR and any(map(holds_others, types)))


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers questions about values that are known; others are passed on."""

    def __init__(self, known: TrueValues) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while planning

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_QUERY and isinstance(args[0], FakeTensor):
            return args[0].device  # asked many times over
        if comes_back(func, types):
            return NotImplemented
        kwargs = kwargs or {}
        if are_true():
            return func(*args, **kwargs)
        parts = parts_of(func, args)
        if parts is not None:  # whose values are those of its parts
            with self:
                return parts(*args, **kwargs)
        value = self.known.answer(func, args, kwargs)
        if value is not UNKNOWN:
            return value
        result = func(*args, **kwargs)
        self.known.follow(func, args, kwargs, result)
        return result


def _is_plain_index(func: Any, args: Any) -> bool:
    """Return whether an operator takes elements at places, and not by masks."""
    return func is _aten.index.Tensor and not any(
        one is not None and one.dtype in MASKS for one in args[1]
    )


@contextmanager
def values_known(known: TrueValues | None = None) -> Iterator[TrueValues]:
    """Let values that are known, and what follows from them, be read inside the block."""
    mode, fake = KnownValues(known or TrueValues()), cast(Any, FakeTensor)
    own = {name: getattr(fake, name) for name in READS if name in vars(fake)}

    def reader(name: str, otherwise: Any) -> Any:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunction(), no_dispatch():
                value = mode.known.of(tensor)
                if value is not None:
                    return getattr(value.clone(), name)(*args, **kwargs)
            return otherwise(tensor, *args, **kwargs)

        return read

    for name in READS:
        setattr(fake, name, reader(name, getattr(fake, name)))
    try:
        with mode:
            yield mode.known
    finally:
        for name in READS:
            delattr(fake, name)
            if name in own:
                setattr(fake, name, own[name])
