"""Stable forms of sums, products and squares: divided before they leave float16's range, shifted before they cancel.

Each is the same number in exact arithmetic, but for `epsilon`, which makes an epsilon that is zero in float16 the
smallest number that float16 holds in full.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mpt.precision.stable.stable_graph import WINDOWS, Call, Graph
from mpt.precision.stable.stable_logs import Rewrite, dims_of, is_number

TINY = torch.finfo(torch.float16).smallest_normal
ZERO_IN_HALF = TINY * torch.finfo(torch.float16).eps / 2
"""Numbers up to here are zero in float16."""
NEARLY_ONE = 0.02
"""By how much the sum of a window of weights may be off one for the window to be an average."""


def is_half(value: Any) -> bool:
    """Return whether something is a tensor of float16, whose range is the reason for most of these forms."""
    return isinstance(value, Tensor) and value.dtype == torch.float16


def square_of(graph: Graph, value: Any) -> Tensor | None:
    """Return x if a tensor is x * x or x ** 2."""
    factors = factors_of(graph, value)
    return factors[0] if factors is not None and graph.same(*factors) else None


def factors_of(graph: Graph, value: Any) -> tuple[Tensor, Tensor] | None:
    """Return x and y if a tensor is x * y, the same one twice for a square."""
    call = graph.made(value, "mul", "pow", "square")
    if call is None:
        return None
    if call.name == "square" or (call.name == "pow" and is_number(call.other) and call.other == 2):
        return call.input, call.input
    if call.name == "mul" and isinstance(call.other, Tensor):
        return call.input, call.other
    return None


def scaled_square(x: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return the sum or mean of (x / s)^2, and s, the largest magnitude among the summands."""
    dims, keepdim = dims_of(call), bool(call.option("keepdim", False))
    s = x.detach().abs().amax(dims, keepdim=True).clamp_min(TINY)
    reduced = (x / s).square()
    total = (
        reduced.mean(dims, keepdim=keepdim)
        if call.name == "mean"
        else reduced.sum(dims, keepdim=keepdim)
    )
    return total, s.sum(dims, keepdim=keepdim)


def root(graph: Graph, call: Call) -> Rewrite | None:
    """sqrt(sum(x^2) + eps) and its reciprocal: the norm of a long or a tiny vector, a hand-made RMSNorm."""
    power = {"sqrt": 0.5, "rsqrt": -0.5}.get(call.name, call.other)
    if not is_half(call.input) or not is_number(power) or power not in (0.5, -0.5):
        return None
    total: Any = call.input
    more: Any = None
    added = graph.made(total, "add")
    if added is not None:
        total, more = added.input, added.other
    if more is None or is_number(more):
        reduced = graph.made(total, "sum", "mean")
        x = square_of(graph, reduced.input) if reduced is not None else None
        if reduced is not None and x is not None:
            return _scaled_root(x, reduced, float(more or 0.0), float(power))
    first, second = square_of(graph, total), square_of(graph, more)
    if first is None or power < 0 or not (second is not None or (is_number(more) and more > 0)):
        return None
    other = second if second is not None else torch.full_like(first, math.sqrt(more))
    said = ("y**2", "y") if second is not None else (f"{more:g}", f"{math.sqrt(more):g}")
    return Rewrite(
        lambda: torch.hypot(first, other), f"sqrt(x**2 + {said[0]})", f"hypot(x, {said[1]})"
    )


def _scaled_root(x: Tensor, reduced: Call, eps: float, power: float) -> Rewrite:
    def make() -> Tensor:
        total, s = scaled_square(x, reduced)
        inner = total + eps / s / s if eps else total
        return torch.rsqrt(inner) / s if power < 0 else torch.sqrt(inner) * s

    name, more = "rsqrt" if power < 0 else "sqrt", f" + {eps:g}" if eps else ""
    lower = " / s" if power < 0 else " * s"
    inside = f"{reduced.name}((x / s)**2){more + ' / s**2' if more else ''}"
    return Rewrite(
        make, f"{name}({reduced.name}(x**2){more})", f"{name}({inside}){lower}, s = x.abs().amax()"
    )


def mean_of_squares(graph: Graph, call: Call) -> Rewrite | None:
    """mean(x^2) over everything, some of whose squares are beyond the range."""
    x = square_of(graph, call.input)
    if x is None or not is_half(x) or len(dims_of(call)) != x.dim():
        return None

    def make() -> Tensor:
        total, s = scaled_square(x, call)
        return total * s * s

    return Rewrite(make, "mean(x**2)", "mean((x / s)**2) * s * s, s = x.abs().amax()")


def difference(graph: Graph, call: Call) -> Rewrite | None:
    """E[xy] - E[x]E[y], the E being means, average pools or windows of weights (as in SSIM)."""
    whole = graph.made(call.input, "mean", *WINDOWS)
    means = factors_of(graph, call.other)
    factors = factors_of(graph, whole.input) if whole is not None else None
    if whole is None or means is None or factors is None:
        return None
    for factor, mean in zip(factors, means, strict=True):
        made = graph.made(mean, whole.name)
        if made is None or not made.has_options_of(whole) or not graph.same(made.input, factor):
            return None
        if not graph.same(made.other, whole.other):
            return None
    x, y = factors
    if graph.same(x, y):
        y = x
    letters = "x**2" if x is y else "x * y", "mean(x)**2" if x is y else "mean(x) * mean(y)"
    was = f"mean({letters[0]}) - {letters[1]}"
    if whole.name == "mean":
        said = "mean((x - mean(x))**2)" if x is y else "mean((x - mean(x)) * (y - mean(y)))"
        return Rewrite(lambda: centred_mean(x, y, whole), was, said)
    if whole.option("padding", 0) != 0 or whole.option("bias") is not None:
        return None
    said = (
        "x - c in the place of x"
        + ("" if x is y else ", y - d in that of y")
        + ", the mean of each sample"
    )
    return Rewrite(lambda: centred_window(x, y, whole), was, said)


def centred_mean(x: Tensor, y: Tensor, call: Call) -> Tensor:
    """Return a variance or covariance as the mean of products of differences."""
    dims, keepdim = dims_of(call), bool(call.option("keepdim", False))
    a = x - x.mean(dims, keepdim=True)
    b = a if y is x else y - y.mean(dims, keepdim=True)
    return (a * b).mean(dims, keepdim=keepdim)


def centred_window(x: Tensor, y: Tensor, call: Call) -> Tensor:
    """Return local variances or covariances of each sample without its mean.

    They are those of the sample itself if the weights of a window add up to 1; if they do not nothing is taken.
    """
    window = getattr(functional, call.name)
    options = dict(call.options)
    operands = (call.other,) if isinstance(call.other, Tensor) else ()
    share: Tensor | float = 1.0
    if operands:
        share = ((call.other.float().flatten(1).sum(1) - 1).abs() < NEARLY_ONE).all().to(x.dtype)

    def average(value: Tensor) -> Tensor:
        result: Tensor = window(value, *operands, **options)
        return result

    def centred(value: Tensor) -> Tensor:
        return value - share * value.detach().mean(list(range(1, value.dim())), keepdim=True)

    a = centred(x)
    b = a if y is x else centred(y)
    return average(a * b) - average(a) * average(b)


def distance(graph: Graph, call: Call) -> Rewrite | None:
    """|a|^2 + |b|^2 - 2ab of rows."""
    twice = graph.made(call.other, "mul")
    added = graph.made(call.input, "add")
    if twice is None or added is None or not is_number(twice.other) or twice.other != 2:
        return None
    sums = [graph.made(one, "sum") for one in (added.input, added.other, twice.input)]
    first, second, mixed = sums
    if first is None or second is None or mixed is None or not first.has_options_of(second, mixed):
        return None
    a, b = square_of(graph, first.input), square_of(graph, second.input)
    factors = factors_of(graph, mixed.input)
    if a is None or b is None or factors is None:
        return None
    if not any(
        graph.same(a, one) and graph.same(b, other) for one, other in (factors, factors[::-1])
    ):
        return None
    keepdim = bool(first.option("keepdim", False))
    return Rewrite(
        lambda: (a - b).square().sum(dims_of(first), keepdim=keepdim),
        "sum(a**2) + sum(b**2) - 2 * sum(a * b)",
        "sum((a - b)**2)",
    )


def shifted_scale(graph: Graph, call: Call) -> Rewrite | None:
    """c * x - max(c * x), and softmax(c * x), of a large c."""
    if call.name == "softmax":
        factor = factor_of(graph.behind_casts(call.input, "mul", "div"))
        if factor is None or factor[1] <= 1 or not is_half(factor[0]):
            return None
        x, c = factor
        dim = call.option("dim")
        return Rewrite(
            lambda: functional.softmax((x - x.detach().amax(dim, keepdim=True)) * c, dim),
            f"softmax({c:g} * x)",
            f"softmax((x - x.amax()) * {c:g})",
        )
    scaled = factor_of(graph.made(call.input, "mul", "div"))
    largest = graph.made(call.other, "amax")
    again = factor_of(graph.made(largest.input, "mul", "div")) if largest is not None else None
    if scaled is None or again is None or largest is None or scaled[1] != again[1]:
        return None
    if not graph.same(scaled[0], again[0]):
        return None
    x, c = scaled
    if c <= 1 or not is_half(x):
        return None
    return Rewrite(
        lambda: (x - x.amax(dims_of(largest), keepdim=bool(largest.option("keepdim", False)))) * c,
        f"{c:g} * x - max({c:g} * x)",
        f"(x - max(x)) * {c:g}",
    )


def factor_of(call: Call | None) -> tuple[Tensor, float] | None:
    """Return x and c if a call multiplies or divides a tensor by a number."""
    if call is None or not is_number(call.other) or not isinstance(call.input, Tensor):
        return None
    if call.name == "mul":
        return call.input, float(call.other)
    return (call.input, 1.0 / call.other) if call.name == "div" and call.other else None


def divide_first(graph: Graph, call: Call) -> Rewrite | None:
    """sum(x) / n, (a @ b) / n, x * y / n, and numbers one after the other."""
    factor = factor_of(call)
    if factor is None or factor[1] == 1:
        return None
    value, c = factor
    inner = graph.behind_casts(value)
    chain = _numbers(graph, inner)
    if chain is not None:
        x, numbers = chain
        c *= math.prod(numbers)
        was = "".join(f" * {one:g}" for one in (*numbers[::-1], factor[1]))
        return Rewrite(lambda: x.to(value.dtype) * c, f"x{was}", f"x * {c:g}")
    if inner is None or not is_half(inner.input):
        return None
    if inner.name == "sum":
        return _mean(inner, value, c)
    if inner.name == "matmul" and abs(c) < 1:
        r = math.sqrt(abs(c))
        return Rewrite(
            lambda: ((inner.input * math.copysign(r, c)) @ (inner.other * r)).to(value.dtype),
            f"(a @ b) * {c:g}",
            f"(a * {r:g}) @ (b * {r:g})",
        )
    leaves = leaves_of(graph, value)
    if len(leaves) < 2 or not 0 < abs(c) < 1:
        return None
    share = abs(c) ** (1 / len(leaves))
    return Rewrite(
        lambda: (
            functools.reduce(operator.mul, [one * share for one in leaves]).to(value.dtype)
            * math.copysign(1, c)
        ),
        f"a product of {len(leaves)} factors * {c:g}",
        f"a product of factors * {share:g}",
    )


def _numbers(graph: Graph, call: Call | None) -> tuple[Tensor, list[float]] | None:
    """Return the tensor that is multiplied by several numbers in float16, and the numbers, last first."""
    numbers: list[float] = []
    x: Any = None
    while (factor := factor_of(call)) is not None and is_half(factor[0]):
        x = factor[0]
        numbers.append(factor[1])
        call = graph.behind_casts(x)
    return (x, numbers) if numbers else None


def _mean(inner: Call, value: Tensor, c: float) -> Rewrite:
    dims, keepdim = dims_of(inner), bool(inner.option("keepdim", False))
    rest = c * inner.input.numel() / max(value.numel(), 1)
    said = "mean(x)" if math.isclose(rest, 1.0) else f"mean(x) * {rest:g}"

    def make() -> Tensor:
        mean: Tensor = inner.input.mean(dims, keepdim=keepdim).to(value.dtype)
        return mean if math.isclose(rest, 1.0) else mean * rest

    return Rewrite(make, f"sum(x) / {1 / c:g}", said)


def leaves_of(graph: Graph, value: Any) -> list[Any]:
    """Return the factors of a product of tensors, of products and powers all the way down."""
    factors = factors_of(graph, value) if is_half(value) else None
    if factors is not None:
        return [leaf for one in factors for leaf in leaves_of(graph, one)]
    call = graph.made(value, "pow") if is_half(value) else None
    if call is not None and isinstance(call.other, int) and 2 < call.other <= 8:
        return leaves_of(graph, call.input) * call.other
    return [value]


def epsilon(graph: Graph, call: Call) -> Rewrite | None:
    """x + 1e-8 and x.clamp(min=1e-8) in float16, in which 1e-8 is zero; also the one inside of `normalize`."""
    if not is_half(call.input):
        return None
    if call.name == "normalize":
        eps = call.option("eps", 1e-12)
        options = {name: value for name, value in call.options if name != "eps"}
        return _raised(
            eps,
            "normalize(x, eps=",
            ")",
            lambda: functional.normalize(call.input, **options, eps=TINY),
        )
    if call.name == "clamp":
        return _raised(
            call.option("min"),
            "clamp(x, min=",
            ")",
            lambda: call.input.clamp(TINY, call.option("max")),
        )
    return _raised(call.other, "x + ", "", lambda: call.input + TINY)


def _raised(number: Any, before: str, after: str, make: Any) -> Rewrite | None:
    if not is_number(number) or not 0 < number <= ZERO_IN_HALF:
        return None
    return Rewrite(make, f"{before}{number:g}{after} in float16", f"{before}{TINY:g}{after}")
