"""Instruments on the step: every operator's result with its module, its source line, its range and a sample.

One dispatch mode sees forward and backward alike; `mpt.nn.shared.module_places` knows whose operators they are.
The source line is the innermost one outside of torch and of this package: the user's own.

Ranges are those of float16, whatever dtype was computed in, so a float32 step on a CPU shows the effects of float16.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpt.doctor.measuring.forward_lines import ForwardLines
from mpt.nn.shared.module_places import ModulePlaces, module_places, source_line

aten = torch.ops.aten
LARGEST, SMALLEST_NORMAL, SMALLEST = 65504.0, 2.0**-14, 2.0**-24
"""Of float16."""
SAMPLE = 2048
"""Values that are kept of each result, evenly chosen, to compare two steps by."""
PIECE = 1 << 18
"""Values that are looked at in one go."""
PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""Classes of tensors of which the values can be read without a dispatch of their own."""
SILENT = frozenset(
    {
        aten.empty,
        aten.empty_like,
        aten.empty_strided,
        aten.new_empty,
        aten.new_empty_strided,
        aten.detach,
        aten.view,
        aten._unsafe_view,
        aten.t,
        aten.transpose,
        aten.permute,
        aten.expand,
        aten.as_strided,
        aten.alias,
        aten.slice,
        aten.select,
        aten.unsqueeze,
        aten.squeeze,
        aten.split,
        aten.unbind,
        aten._to_copy,
        aten.copy_,
        aten.clone,
        aten.zeros_like,
        aten.ones_like,
        aten.new_zeros,
        aten.full,
        aten.zeros,
        aten.ones,
        aten.scalar_tensor,
        aten.lift_fresh,
        aten.resize_,
        aten.set_,
    }
)
"""Operators that compute nothing of their own."""


@dataclass
class Result:
    """One operator's result in a step. Shares are of all its values; ranges are float16's."""

    module: str
    operator: str
    is_backward: bool
    dtype: torch.dtype
    line: str
    occurrence: int
    """How often this operator ran in this module and direction before."""
    largest: float
    """The largest finite magnitude."""
    non_finite: int
    inputs_finite: bool
    underflow: float
    """Share of values that are not zero and would be in float16."""
    subnormal: float
    """Share of values that float16 holds with fewer bits."""
    count: int
    sample: Tensor
    inputs: tuple[Tensor, ...] = ()
    """Samples of the floating inputs."""
    shape: tuple[int, ...] = ()
    scalars: str = ""
    """The arguments that are no tensors."""
    bad_rows: tuple[int, ...] = ()
    """Along the first dimension, of the values that are not finite."""
    fingerprint: int = 0
    """A checksum of all bits, if the step was watched exactly; else 0."""
    inputs_fingerprint: int = 0

    def has_bits_of(self, other: Result) -> bool:
        """Return whether two results that were watched exactly are the same to the bit."""
        return (
            self.dtype == other.dtype
            and self.shape == other.shape
            and self.fingerprint == other.fingerprint
            and torch.equal(self.sample.nan_to_num(), other.sample.nan_to_num())
        )

    @property
    def key(self) -> tuple[str, str, bool, int]:
        """The key by which results of two steps are matched."""
        return self.module, self.operator, self.is_backward, self.occurrence

    @property
    def headroom_bits(self) -> float:
        """How often the largest value could be doubled in float16; negative beyond its range."""
        return math.log2(LARGEST / self.largest) if self.largest else math.inf

    def underflow_at(self, scale: float) -> float:
        """Return the share of values that would be zero in float16 after multiplying by a scale."""
        if scale == 1.0:
            return self.underflow
        values = self.sample.abs() * scale
        return float(((values > 0) & (values < SMALLEST / 2)).float().mean())

    def bad_samples(self, batch_size: int) -> tuple[int, ...]:
        """Return which samples of a batch are not finite; () if all are, or its first dimension is not the batch."""
        rows = self.bad_rows if self.shape[:1] == (batch_size,) else ()
        return rows if len(rows) < batch_size else ()

    def describe_inputs(self) -> str:
        """Return the range of the inputs, in words."""
        spans = [
            f"{float(one.min()) + 0.0:.3g} to {float(one.max()) + 0.0:.3g}"
            for one in self.inputs
            if one.numel()
        ]
        return " and ".join(spans)

    def describe(self) -> str:
        """Return "module: operator in dtype (file:line)"."""
        way = "backward of " if self.is_backward else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.module}: {way}{self.operator} in {dtype}" + (
            f" ({self.line})" if self.line else ""
        )


@dataclass(frozen=True)
class Inputs:
    """An operator's inputs."""

    samples: tuple[Tensor, ...]
    finite: bool
    scalars: str
    fingerprint: int


@dataclass
class Instrument:
    """Results of a step's operators, in order."""

    results: list[Result] = field(default_factory=list)
    calls: Counter[tuple[str, str, bool]] = field(default_factory=Counter)
    places: ModulePlaces = field(default_factory=ModulePlaces)
    lines: ForwardLines = field(default_factory=ForwardLines)
    exact: bool = False
    """Whether every bit is to be known by a checksum, and not a sample's alone."""

    def before(self, func: Any, args: Any, kwargs: Any) -> Inputs | None:
        """Note an operator's inputs before it can overwrite them; None for one that computes nothing."""
        if func._overloadpacket in SILENT:
            return None
        leaves = tree_leaves((args, kwargs))
        tensors = [one.detach() for one in leaves if is_readable(one)]
        return Inputs(
            samples=tuple(sample_of(one) for one in tensors),
            finite=all(map(is_finite, tensors)),
            scalars=", ".join(repr(one) for one in leaves if isinstance(one, int | float | str)),
            fingerprint=sum(fingerprint(one) for one in tensors) if self.exact else 0,
        )

    def observe(self, func: Any, inputs: Inputs | None, result: Any) -> None:
        """Note an operator's results."""
        outputs = [one for one in tree_leaves(result) if is_readable(one)]
        if not outputs or inputs is None:
            return
        module, is_backward = self.places.current()
        operator = func._schema.name.removeprefix("aten::").rstrip("_")
        call = (module, operator, is_backward)
        for output in outputs:
            self.results.append(
                measure(
                    output.detach(),
                    module=module,
                    operator=operator,
                    is_backward=is_backward,
                    line=self.lines.current() if is_backward else source_line(),
                    occurrence=self.calls[call],
                    inputs_finite=inputs.finite,
                    inputs=inputs.samples,
                    shape=tuple(output.shape),
                    scalars=inputs.scalars,
                    fingerprint=fingerprint(output) if self.exact else 0,
                    inputs_fingerprint=inputs.fingerprint,
                )
            )
            self.calls[call] += 1


class _Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, instrument: Instrument) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.instrument = instrument

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_modes((args, kwargs)):
            inputs = self.instrument.before(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        with without_modes(result):
            self.instrument.observe(func, inputs, result)
        return result


@contextmanager
def without_modes(values: Any) -> Iterator[None]:
    """Look at tensors inside the block without the modes in force, which would follow each look at a value."""
    plain = all(type(one) in PLAIN for one in tree_leaves(values) if isinstance(one, Tensor))
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch() if plain else nullcontext(),
    ):
        yield


@contextmanager
def observed(modules: Mapping[str, nn.Module], *, exact: bool = False) -> Iterator[Instrument]:
    """Watch every operator within the block; `modules` are the networks by name."""
    with module_places(modules) as places:
        instrument = Instrument(places=places, exact=exact)
        with _Observer(instrument), instrument.lines:
            yield instrument
        instrument.lines.lines.clear()


def is_readable(value: Any) -> bool:
    """Return whether this is a tensor with floating values; reading autograd's zeros without memory crashes."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    # Operators on such zeros first find out the result's shape on meta tensors, which this mode sees too.
    return value.numel() > 0 and not value._is_zerotensor() and not value.is_meta


def pieces_of(value: Tensor) -> Iterable[Tensor]:
    """Return a tensor's values in float32, or as they are if wider, in pieces that a processor's cache holds.

    A copy of a large tensor takes ten times as long as looking at it: its memory comes from the system each time.
    """
    flat = value.reshape(-1)
    split = torch.split(flat, PIECE) if flat.is_cpu else (flat,)
    return (one if one.dtype == torch.float64 else one.float() for one in split)


def is_finite(value: Tensor) -> bool:
    """Return whether all values are. Extremes, which a NaN is too, take a twentieth of the time of a mask."""
    return not value.numel() or all(
        math.isfinite(end) for one in pieces_of(value) for end in torch.aminmax(one)
    )


@dataclass
class Counted:
    """What was counted among a tensor's values."""

    largest: float = 0.0
    non_finite: int = 0
    below: int = 0
    """Not zero, and zero in float16."""
    weak: int = 0
    """Those that float16 holds with fewer bits."""

    def add(self, known: Tensor) -> None:
        """Count further magnitudes."""
        smallest, largest = torch.aminmax(known)
        if not math.isfinite(largest):
            finite = known[torch.isfinite(known)]
            self.non_finite += known.numel() - finite.numel()
            if finite.numel():
                self.add(finite)
            return
        self.largest = max(self.largest, float(largest))
        if smallest < SMALLEST_NORMAL:
            # NumPy counts five times as fast as torch does on a CPU
            values: Any = known.numpy() if known.is_cpu else known
            count: Any = np.count_nonzero if known.is_cpu else torch.count_nonzero
            zeros, below = int(count(values == 0)), int(count(values < SMALLEST / 2))
            self.weak += int(count(values < SMALLEST_NORMAL)) - below
            self.below += below - zeros


def measure(value: Tensor, *, inputs: tuple[Tensor, ...], **about: Any) -> Result:
    """Return a tensor's ranges and a sample of it."""
    count, counted = value.numel(), Counted()
    for piece in pieces_of(value):
        counted.add(piece.float().abs())
    if counted.non_finite and value.dim():
        bad = (~torch.isfinite(value.float())).reshape(len(value), -1).any(1).nonzero().flatten()
        about["bad_rows"] = tuple(bad.tolist())
    return Result(
        dtype=value.dtype,
        largest=counted.largest,
        non_finite=counted.non_finite,
        underflow=counted.below / count,
        subnormal=counted.weak / count,
        count=count,
        sample=sample_of(value),
        inputs=inputs,
        **about,
    )


def sample_of(value: Tensor) -> Tensor:
    """Return up to `SAMPLE` values of a tensor, evenly chosen, in float32 on the CPU."""
    flat = value.reshape(-1)
    if flat.numel() > SAMPLE:
        flat = flat[evenly_spaced(SAMPLE, flat.numel(), flat.device)]
    return flat.float().cpu()


def real_values(value: Tensor) -> Tensor:
    """Return a complex tensor's real and imaginary parts along a further dimension, any other tensor as it is."""
    return torch.view_as_real(value) if value.is_complex() else value


def evenly_spaced(wanted: int, count: int, device: torch.device) -> Tensor:
    """Return that many indices from 0 to count - 1. In integers: float32 rounds indices from 2**24 on past the end."""
    return torch.arange(wanted, device=device) * (count - 1) // (wanted - 1)


def fingerprint(value: Tensor) -> int:
    """Return the sum of a tensor's bit patterns: equal for equal bits, and hardly ever for others."""
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    return int(value.detach().contiguous().view(width).sum(dtype=torch.int64))


def error_of(value: Tensor, true: Tensor) -> float:
    """Return the error of a sample relative to the true one's norm; infinite if it is not finite."""
    if value.shape != true.shape:
        return math.nan
    if not bool(torch.isfinite(value).all()):
        return math.inf
    scale = float(true.norm())
    difference = float((value - true).norm())
    return difference / scale if scale else (math.inf if difference else 0.0)


def input_error(value: Sequence[Tensor], true: Sequence[Tensor]) -> float:
    """Return the largest relative error among an operator's inputs."""
    errors = [
        error_of(one, other)
        for one, other in zip(value, true, strict=False)
        if one.shape == other.shape
    ]
    return max((error for error in errors if not math.isnan(error)), default=0.0)
