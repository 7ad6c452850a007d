"""Origins of tensors: the calls of torch's functions that stable forms look back to, within one forward.

A call is kept under its output for as long as the output lives, and no longer than the forward. It holds its inputs: a
form is computed from them. Tensors that were overwritten since are not trusted (tensors count their versions).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

NAMESPACES: tuple[Any, ...] = (torch, Tensor, functional, torch.special, torch.linalg)
WINDOWS = ("conv1d", "conv2d", "conv3d", "avg_pool1d", "avg_pool2d", "avg_pool3d")
RESHAPES = ("view", "reshape", "flatten", "squeeze", "unsqueeze", "view_as", "reshape_as")
CASTS = ("to", "float", "half", "bfloat16", "double", "type", "type_as")
ALIASES: dict[str, tuple[str, ...]] = {
    "add": ("add", "__add__", "__radd__"),
    "sub": ("sub", "subtract", "__sub__"),
    "rsub": ("rsub", "__rsub__"),
    "mul": ("mul", "multiply", "__mul__", "__rmul__"),
    "div": ("div", "divide", "true_divide", "__truediv__", "__div__"),
    "rdiv": ("__rtruediv__", "__rdiv__"),
    "pow": ("pow", "__pow__"),
    "neg": ("neg", "negative", "__neg__"),
    "log": ("log",),
    "log1p": ("log1p",),
    "sigmoid": ("sigmoid", "expit"),
    "matmul": ("matmul", "__matmul__", "mm", "bmm"),
    "clamp": ("clamp", "clip"),
    "reshape": RESHAPES,
    "cast": CASTS,
    **{
        name: (name,)
        for name in (
            "square",
            "sqrt",
            "rsqrt",
            "reciprocal",
            "exp",
            "softmax",
            "sum",
            "mean",
            "amax",
        )
    },
    **{
        name: (name,)
        for name in (
            "max",
            "clamp_min",
            "gather",
            "__getitem__",
            "binary_cross_entropy",
            "normalize",
        )
    },
    **{name: (name,) for name in WINDOWS},
}
_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_POOL = (
    "input",
    "kernel_size",
    "stride",
    "padding",
    "ceil_mode",
    "count_include_pad",
    "divisor_override",
)
PARAMETERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("add", "sub", "rsub", "mul", "div", "rdiv", "matmul"), ("input", "other")),
    "pow": ("input", "exponent"),
    **dict.fromkeys(("sum", "mean", "amax", "max"), ("input", "dim", "keepdim")),
    "softmax": ("input", "dim"),
    "clamp": ("input", "min", "max"),
    "clamp_min": ("input", "min"),
    "gather": ("input", "dim", "index"),
    "__getitem__": ("input", "index"),
    "binary_cross_entropy": ("input", "target", "weight", "size_average", "reduce", "reduction"),
    "normalize": ("input", "p", "dim", "eps"),
    **{name: _CONV if name.startswith("conv") else _POOL for name in WINDOWS},
}
SYNONYMS = {"axis": "dim", "self": "input", "mat2": "other"}
IGNORED = ("_stacklevel",)
KNOWN: dict[Callable[..., Any], str] = {
    getattr(space, alias): name
    for name, aliases in ALIASES.items()
    for alias in aliases
    for space in NAMESPACES
    if hasattr(space, alias)
}
"""Torch's function -> the name under which calls of it are known here."""


@dataclass(frozen=True)
class Call:
    """One call: `inputs` in the order of `PARAMETERS`, of which the first two of arithmetic may be numbers."""

    name: str
    input: Any
    other: Any = None
    """The second operand of arithmetic, a convolution's weight."""
    options: tuple[tuple[str, Any], ...] = ()
    versions: tuple[int, ...] = ()

    def option(self, name: str, default: Any = None) -> Any:
        """Return one of the remaining arguments."""
        return dict(self.options).get(name, default)

    def has_options_of(self, *others: Call) -> bool:
        """Return whether other calls have the same remaining arguments; a tensor is the same as itself alone."""

        def known(call: Call) -> list[tuple[str, Any]]:
            return [
                (key, id(value) if isinstance(value, Tensor) else value)
                for key, value in call.options
            ]

        return all(known(other) == known(self) for other in others)

    @property
    def is_current(self) -> bool:
        """Whether nothing has been written over its inputs since."""
        return self.versions == tuple(versions_of((self.input, self.other)))


def versions_of(values: tuple[Any, ...]) -> Iterator[int]:
    """Yield the versions of the tensors among some values; those of inference are never written over."""
    for value in values:
        if isinstance(value, Tensor):
            yield -1 if value.is_inference() else value._version


def read_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call | None:
    """Return a call in its canonical form; None for an unknown call, or one with unusual arguments."""
    name = KNOWN.get(function)
    if name is None or (not args and "input" not in kwargs):
        return None
    first = args[0] if args else kwargs["input"]
    if name in ("reshape", "cast"):
        return _noted(name, first) if isinstance(first, Tensor) else None
    known = PARAMETERS.get(name, ("input",))
    if len(args) > len(known):
        return None
    given = dict(zip(known, args, strict=False))
    for key, value in kwargs.items():
        key = SYNONYMS.get(key, key)
        if value is None or key in IGNORED:
            continue
        if key not in known:
            return None
        given[key] = value
    return _canonical(name, given)


def _canonical(name: str, given: dict[str, Any]) -> Call | None:
    first = given.pop("input")
    other = given.pop("other", given.pop("exponent", given.pop("weight", None)))
    options = tuple(
        sorted(
            ((key, value) for key, value in given.items() if value is not None),
            key=lambda one: one[0],
        )
    )
    if name in ("rsub", "rdiv"):
        name, first, other = name[1:], other, first
    elif name in ("add", "mul") and not isinstance(first, Tensor):
        first, other = other, first
    elif name == "max":
        if not dict(options) or isinstance(other, Tensor):
            return None
        name = "amax"
    elif name == "clamp_min":
        name = "clamp"
    return _noted(name, first, other, options)


def _noted(
    name: str, first: Any, other: Any = None, options: tuple[tuple[str, Any], ...] = ()
) -> Call:
    return Call(name, first, other, options, tuple(versions_of((first, other))))


class Graph:
    """The calls of one forward by their outputs."""

    def __init__(self) -> None:
        self.calls: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def note(self, output: Any, call: Call) -> None:
        """Remember the call that made a tensor."""
        if isinstance(output, torch.return_types.max):
            output = output.values
        if isinstance(output, Tensor) and output.is_floating_point() and output is not call.input:
            self.calls[output] = (call, next(versions_of((output,))))

    def made(self, value: Any, *names: str) -> Call | None:
        """Return the call that made a tensor, if it is known and one of these, and nothing was written since."""
        if not isinstance(value, Tensor):
            return None
        call: Call | None
        call, version = self.calls.get(value, (None, 0))  # type: ignore[no-untyped-call]
        if call is None or version != next(versions_of((value,))) or not call.is_current:
            return None
        return call if not names or call.name in names else None

    def same(self, one: Any, other: Any, depth: int = 4) -> bool:
        """Return whether two operands are the same tensor or number, or were made by the same calls of the same."""
        if one is other or depth == 0:
            return one is other
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            return type(one) is type(other) and not isinstance(one, Tensor) and bool(one == other)
        first, second = self.made(one), self.made(other)
        if first is None or second is None or first.name != second.name or one.shape != other.shape:
            return False
        return (
            one.dtype == other.dtype
            and first.options == second.options
            and self.same(first.input, second.input, depth - 1)
            and self.same(first.other, second.other, depth - 1)
        )

    def behind_casts(self, value: Any, *names: str) -> Call | None:
        """Return the call that made a tensor before it was cast to other dtypes."""
        call = self.made(value)
        while call is not None and call.name == "cast":
            call = self.made(call.input)
        return call if call is not None and (not names or call.name in names) else None
