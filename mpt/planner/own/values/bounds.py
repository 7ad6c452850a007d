"""Values and shapes that only a real step has, in somebody's own step on fake tensors.

Values that are read are zero, but for small tensors that a script wrote out itself, and, while a step is built, for all
that follow from its program (`mpt.planner.own.values.known_values`): sizes are computed from those. Lines at which
others are read then are named. A step's batch may be a placeholder, so its values are not taken for true.

A result whose shape depends on values (`x[mask]`, `nonzero`, `unique`) is given the largest shape that it can have,
which is at least as large as a real step needs. An integer that is read may become a size: then the plan is too small,
so these are counted apart.

Both assumptions may contradict each other: boxes are padded to the largest number of them in a picture, which is read
as 0, and each picture's are taken by a mask. A step that cannot be planned so, or of which an integer is read, is
planned once more with the values that its loader reads and that it draws (`trusts_data`): those of its first batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy
import torch
from torch import Tensor
from torch._subclasses import fake_tensor

from mpt.planner.device.composites import parts_of
from mpt.planner.device.matching_dtypes import check_dtypes
from mpt.planner.device.matching_shapes import check_masks, check_shapes
from mpt.planner.device.operator_kinds import facts_of, is_known
from mpt.planner.device.zero_values import SCALAR, ZeroValues
from mpt.planner.own.stand_ins import quantized
from mpt.planner.own.stand_ins.draws import DRAWN, Draws
from mpt.planner.own.stand_ins.extensions import TritonKernels
from mpt.planner.own.stand_ins.quasi_newton import QuasiNewton
from mpt.planner.own.stand_ins.sequences import PackedSequences
from mpt.planner.own.values import compared, counts
from mpt.planner.own.values.asked_masks import AskedMasks
from mpt.planner.own.values.asserted import is_asserted
from mpt.planner.own.values.computed_values import ComputedValues
from mpt.planner.own.values.known_values import (
    UNKNOWN,
    TrueValues,
    are_true,
    comes_back,
    values_known,
)
from mpt.planner.own.values.largest import (
    BOUNDS,
    DifferentNumbers,
    ResultsAtBound,
    all_boxes,
    has_masks,
    is_filled_mask,
    is_place,
    least_squares,
    most_different,
    most_places,
    without_masks,
)
from mpt.planner.own.values.shared_masks import SharedMasks
from mpt.planner.own.values.updates import is_in_update
from mpt.planner.own.values.value_loops import ValueLoops
from mpt.planner.own.values.written_places import WrittenPlaces
from mpt.planner.trace.cannot_plan import line_of

KNOWN_VALUES = 64
"""Tensors of that many numbers keep those that a script wrote, such as a detector's strides; torch keeps single
ones."""
SIZES = (torch.int32, torch.int64)
READ = "a value read at"
"""How the note of an error begins that may follow from a value."""
BOUNDED = "_follows_from_bounds"
"""The attribute of an error that may follow from a size that was taken as large as it can be."""
ASKING = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
)
MOST_LINES = 3
"""Lines that a note names."""
NMS = "torchvision::nms"
_aten = torch.ops.aten
RANGES = {_aten.arange.default, _aten.arange.start, _aten.arange.start_step}
INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}
ORDERS = {_aten.randperm.default, _aten.randperm.generator}
"""Operators that draw an order, in which each occurs once: some augmentations apply all of a list in such a one."""
COUNTS = {_aten.sum.default, _aten.sum.dim_IntList, _aten.count_nonzero.default}
"""Operators that count the places of a mask: all of them, as where it selects."""


class BoundedShapes(ZeroValues):  # type: ignore[no-untyped-call]
    """Answers every read of a value with zero, and gives shapes that depend on values their bound."""

    def __init__(
        self,
        trusts_data: bool = False,
        finds: bool = False,
        shares: bool = False,
        computes_for: float = 0.0,
        waits: bool = False,
    ) -> None:
        """`finds`: masks are said to have places if a step asks (`torch.any`); `shares`: those that share places out
        are even; `computes_for`: seconds that all values may take to be computed; `waits`: for loops that seem to have
        no end.
        """
        super().__init__()
        self.trusts_data = trusts_data
        self.asked = AskedMasks(finds)
        self.totals = counts.Totals()
        self.is_building = False
        self.built_with: dict[str, None] = {}
        """Lines at which a value that is not known was read while the step was built, in order."""
        self.last_read = ""
        """The line at which the step read a value last."""
        self.updates = 0
        """How many values optimizers read."""
        self.integers = 0
        """How many of the values that were read are integers."""
        self.bounded = ResultsAtBound()
        self.numbers = 0
        """How many single integers the step drew, which are the largest that they can be."""
        self.drawn_reads = 0
        """How many known numbers were read after such a draw."""
        self.drawn = Draws()
        self.int8 = 0
        """Quantizations to int8 whose outliers are not known."""
        self.packed = PackedSequences(self.lengths, self._bound)
        self.is_loaded = False
        """A loader made a batch of real tensors."""
        self.values = ComputedValues(computes_for) if computes_for else TrueValues(trusts_data)
        """Values that are known since the step was built, and of numbers that it writes out and moves to the card."""
        self.numbers_of = DifferentNumbers()
        self.shared = SharedMasks(self.numbers_of, self.values.read, shares)
        self.written = WrittenPlaces()
        self.is_built = False
        """Before, a mode of its own follows the values; if data are trusted, it does all the time."""
        self.loops = ValueLoops(waits)
        self.values.on_read = lambda: self.loops.read_known(sys._getframe(1), self.reads)
        self.steps = QuasiNewton()
        self.kernels = TritonKernels()
        self._rules: dict[Any, Callable[..., Any]] = {
            _aten.nonzero.default: self.places,
            _aten.masked_select.default: self.selected,
            _aten._unique2.default: self.different,
            _aten.linalg_lstsq.default: least_squares,
            **{operator: self._at_bound(rule) for operator, rule in BOUNDS.items()},
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if comes_back(func, types):
            return NotImplemented
        if are_true():
            return func(*args, **kwargs)
        parts = parts_of(func, args) or compared.PARTS.get(func)
        if parts is not None:
            with self:
                return parts(*args, **kwargs)
        known = self.values
        if not self.is_built:
            result = self._answer(func, types, args, kwargs)
            if func in ORDERS and not self.trusts_data:  # of samples, by which they are split
                known.keep_order(result, kwargs.get("generator"))
            return result
        is_followed = known.follows(args)
        if self.trusts_data:  # the mode above answers and follows
            result = self._answer(func, types, args, kwargs)
            if not is_followed:
                self._count(func, args, kwargs, result)
            return result
        if is_followed and func not in self._rules and func is not _aten.index.Tensor:  # a mask
            value = known.answer(func, args, kwargs)
            if value is not UNKNOWN:
                self.drawn_reads += func is SCALAR and self.numbers > 0
                self.totals.note_read()
                return value
        result = self._answer(func, types, args, kwargs)
        if is_followed or (func is _aten._to_copy.default and is_known(args[0])):
            known.follow(func, args, kwargs, result)
        else:
            self._count(func, args, kwargs, result)
        if func in DRAWN and result.numel() == 1 and (most := DRAWN[func](args)) is not None:
            self.numbers += not result.dtype.is_floating_point
            known.keep_number(result, most)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Keep the number that a size may follow from: the count of a mask's places, the end of a slice, a range."""
        even = self.totals.counts(func, args, result) if func in counts.OPERATORS else None
        if even is not None:
            self.values.keep(result, even)
        elif func is _aten.add.Tensor and type(args[1]) is int and is_place(args[0]):
            self.values.keep_number(result, args[1])
        elif func in COUNTS and args[0].dtype == torch.bool and 0 < result.numel() <= KNOWN_VALUES:
            count = self.shared.count(args[0])
            self.bounded.count += count is None
            count = args[0].numel() if count is None else count
            self.values.keep_number(result, count // result.numel())
        elif func is _aten.any.default and (
            args[0].dtype.is_floating_point or self.shared.count(args[0])
        ):
            self.values.keep_number(result, 1)  # some number is not 0
        elif func is _aten.any.default:
            self.asked.about(result)
        elif func in RANGES or is_filled_mask(func, result):
            self.values.follow(func, args, kwargs, result)
        elif func in ORDERS and not self.trusts_data:
            own = kwargs.get("generator")  # a sampler's, which no others share
            if own is not None or result.numel() <= KNOWN_VALUES:
                self.values.keep_order(result, own)

    def places(self, mask: Tensor) -> Tensor:
        """Return the places that a mask selects; all, if it is not known or its values are not trusted.

        Where values are trusted these are all in their order, so that the next mask may follow from them.
        """
        value = self.values.read(mask) if self.trusts_data else None
        count = self.shared.count(mask) if value is None else int(numpy.count_nonzero(value))
        count = self.written.most(mask) if count is None else count
        if count is None:
            places: Tensor = self._bound(most_places(mask))
            if self.trusts_data:
                self.values.keep_places(places, mask.shape)
            return places
        if value is not None:
            self.values.note_size(count)
        return mask.new_empty((count, mask.dim()), dtype=torch.int64)

    def _at_bound(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._bound(rule(*args, **kwargs))

    def _bound(self, result: Any) -> Any:
        """Note a result at its bound, and return it."""
        self.bounded.note(result)
        return result

    def different(self, tensor: Tensor, *options: Any, **named: Any) -> tuple[Tensor, ...]:
        """Return as many different numbers as a tensor can have, their inverse and their counts."""
        most = self.numbers_of.most(tensor)
        found: tuple[Tensor, ...] = self._bound(
            most_different(tensor, *options, most=most, **named)
        )
        return found

    def selected(self, tensor: Tensor, mask: Tensor) -> Tensor:
        """Return as many elements as a mask selects, or can select."""
        shape: torch.Size = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
        return tensor.new_empty(len(self.places(mask.expand(shape))))

    def lengths(self, tensor: Tensor) -> list[int] | None:
        """Return a tensor's values, by which sequences are packed; None if they are not known."""
        value = (self.values if self.is_built else TrueValues()).read(tensor)
        if value is None:
            return None
        self.values.note_size(int(value.sum()))
        return [int(one) for one in value]

    def _answer(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        check_dtypes(func, args)
        check_shapes(func, args)
        rule, name = self._rules.get(func), facts_of(func).name
        if rule is None and name == NMS:  # of a library that may be imported later
            rule = self._at_bound(all_boxes)
        if rule is not None and not is_known(args[0]):
            return rule(*args, **kwargs)
        if name in quantized.RULES:
            self.int8 += 1
            return quantized.RULES[name](*args, **kwargs)
        if func in INDEXED:
            check_masks(*args[:2])
        if func is _aten.index.Tensor and has_masks(args[1]):
            args = args[0], without_masks(args[1], self.places)
            result = func(*args, **kwargs)
            self.numbers_of.follow(func, args, result)
            self.bounded.follow(func, args, result)
            return result
        if func is _aten.index_put_.default and has_masks(args[1]):
            return args[0]
        if func is _aten.index_put.default and has_masks(args[1]):
            return torch.empty_like(args[0])
        if func is SCALAR and not (
            self.is_building
            or args[0].dtype.is_floating_point
            or args[0].dtype == torch.bool
            or is_known(args[0])
        ):
            self.integers += 1
        if func is SCALAR and is_known(args[0]):  # a number that the script wrote
            self.values.on_read()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.numbers_of.follow(func, args, result)
        self.bounded.follow(func, args, result)
        self.shared.follow(func, args, result)
        self.written.follow(func, args, result)
        return result

    def number(self, tensor: Tensor) -> Any:
        """Return a fake number's value: zero, or true where a script would end otherwise.

        One in an optimizer: with a zero for what it sums over gradients, it leaves its update out.
        """
        if self.asked.is_answered_yes(tensor):
            return True
        reads, lines = self.reads, dict(self.built_with)
        value = super().number(tensor)
        if value:
            return value
        if is_asserted(sys._getframe(1)):  # known to hold, and taken as that
            self.reads, self.built_with = reads, lines
            return type(value)(1)
        if self.loops.read(sys._getframe(1)):
            return type(value)(1)
        if tensor.dtype.is_floating_point and is_in_update(sys._getframe(1)):
            self.reads, self.updates = self.reads - 1, self.updates + 1
            return 1.0
        return value

    def array(self, tensor: Tensor) -> Any:
        """Return zeros for a fake tensor's values."""
        if self.is_built and (is_known(tensor) or self.values.follows((tensor,))):
            value = self.values.read(tensor)
            if value is not None:
                self.totals.note_read()
                return value
        line = line_of(sys._getframe(1))
        self.bounded.read(tensor)
        if not self.is_building:
            self.last_read = line or ""
            self.integers += (
                tensor.dtype in SIZES and tensor.dim() > 0 and tensor.numel() <= KNOWN_VALUES
            )
            return super().array(tensor)
        if line is not None:  # a loader draws its seed, and no size
            self.built_with[line] = None
        reads = self.reads
        zeros, self.reads = super().array(tensor), reads
        return zeros

    @contextmanager
    def building(self) -> Iterator[None]:
        """Let values that follow from the program alone be read inside the block, which builds the step."""
        self.is_building = True
        try:
            with values_known(self.values):
                yield
        except Exception as error:
            if self.built_with:
                error.add_note(f"{READ} {next(iter(self.built_with))} was taken as 0")
            raise
        self.is_building, self.is_built = False, True
        self.drawn.begin()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Say in an error of the step that it may follow from a value that was read."""
        try:
            with values_known(self.values) if self.trusts_data else nullcontext():
                yield
            self.drawn.look()
        except Exception as error:
            setattr(error, BOUNDED, self.bounded.count > 0)
            if self.last_read:
                error.add_note(f"{READ} {self.last_read} was taken as 0")
            raise

    def become_fake(self, real: Tensor) -> Tensor:
        """Return a fake tensor for a real one of a batch."""
        fake, self.is_loaded = torch.empty(real.shape, dtype=real.dtype), True
        if self.trusts_data:
            self.values.write(fake, real)
        return fake

    @property
    def follows_data(self) -> bool:
        """Whether sizes were those of its data. Those of a placeholder, such as zeros, select nothing."""
        return self.values.sizes > 0 and (self.is_loaded or not self.values.empty_sizes)

    def notes(self) -> list[str]:
        """Return the plan's assumptions."""
        found = []
        if self.built_with:
            lines = list(self.built_with)
            others = f" and {len(lines) - MOST_LINES} more" if len(lines) > MOST_LINES else ""
            found.append(
                "values that only a real run has were read while it was built, and taken as 0, at "
                f"{', '.join(lines[:MOST_LINES])}{others}: if a size follows from one, this plan is of another network"
            )
        if self.reads:
            found.append(f"the step reads values ({self.reads} times), which were taken as 0")
        if self.updates:
            found.append(f"optimizers read values ({self.updates} times), which were taken as 1")
        if self.trusts_data:
            found.append(
                "values that it loads and draws are those of its first two steps: where sizes follow from them, "
                "another batch may need more"
            )
        if self.steps.history:
            found.append(
                f"LBFGS was planned with its full history of {self.steps.history} steps, and all the evaluations of "
                "each step"
            )
        if self.kernels.called:
            found.append(
                f"{self.kernels.called} calls of kernels in Triton are planned with their tensors, but without time"
            )
        if self.packed.count:
            found.append(
                f"{self.packed.count} packed sequences were taken to be as long as the longest in their batch"
            )
        if self.int8:
            found.append(
                f"layers in int8 were planned with {quantized.OUTLIERS} columns beyond their threshold"
            )
        found += [*self.totals.notes(), *self.asked.notes(), *self.shared.notes()]
        found += self.loops.notes()
        if self.bounded.count:
            found.append(
                f"{self.bounded.count} results whose size depends on values were taken as large as they can be"
            )
        return found


def follows_from_value(error: BaseException) -> bool:
    """Return whether a step cannot be planned perhaps because of a value that is not known."""
    cause = error.__cause__
    if isinstance(cause, ASKING) or getattr(cause, BOUNDED, False):
        return True
    return any(note.startswith(READ) for note in getattr(cause, "__notes__", ()))
