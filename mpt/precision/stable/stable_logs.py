"""Stable forms of logarithms, sigmoids and softmaxes: computed from exponents instead of exponentials.

`log_of` knows the logarithm of results of a softmax, a sigmoid, an exponential, and sums, products, powers and elements
of them made, without computing those first: exp(x) overflows, and 1 - sigmoid(x) is zero, long before the logarithm of
the result does either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mpt.precision.stable.stable_graph import Call, Graph


@dataclass(frozen=True)
class Rewrite:
    """A stable form of a call: how to compute it, and both in words."""

    make: Callable[[], Any]
    was: str
    instead: str


def log_of(graph: Graph, value: Any, dtype: torch.dtype) -> Rewrite | None:
    """Return the logarithm of a tensor that exponentials were made into, computed in a dtype; else None."""
    call = graph.made(value)
    rule = LOGS.get(call.name) if call is not None else None
    return rule(graph, call, value, dtype) if rule is not None and call is not None else None


def _leaf(was: str, instead: str, function: Callable[[Call, Tensor], Tensor]) -> Any:
    def rule(graph: Graph, call: Call, value: Tensor, dtype: torch.dtype) -> Rewrite:
        return Rewrite(lambda: function(call, call.input.to(dtype)), was, instead)

    return rule


def _of_add(graph: Graph, call: Call, value: Tensor, dtype: torch.dtype) -> Rewrite | None:
    inner = log_of(graph, call.input, dtype)
    if inner is None:
        return None
    if is_number(call.other) and call.other > 0:
        return plus(inner, float(call.other))
    outer = log_of(graph, call.other, dtype)
    if outer is None:
        return None
    return Rewrite(
        lambda: torch.logaddexp(inner.make(), outer.make()),
        f"{inner.was} + {outer.was}",
        f"logaddexp({inner.instead}, {outer.instead})",
    )


def plus(inner: Rewrite, number: float) -> Rewrite:
    """Return the logarithm of a sum with a positive number."""
    shift = math.log(number)
    was = f"{inner.was} + {number:g}"
    if number == 1.0:
        return Rewrite(lambda: functional.softplus(inner.make()), was, f"softplus({inner.instead})")
    instead = f"logaddexp({inner.instead}, log({number:g}))"
    return Rewrite(lambda: functional.softplus(inner.make() - shift) + shift, was, instead)


def _of_sub(graph: Graph, call: Call, value: Tensor, dtype: torch.dtype) -> Rewrite | None:
    """1 - sigmoid(x) is sigmoid(-x), also if an epsilon is added to the 1."""
    made = graph.behind_casts(call.other, "sigmoid")
    if made is None or not is_number(call.input) or call.input < 1:
        return None
    rest = Rewrite(
        lambda: functional.logsigmoid(-made.input.to(dtype)), "1 - sigmoid(x)", "logsigmoid(-x)"
    )
    return rest if call.input == 1 else plus(rest, float(call.input) - 1)


def _of_sum(graph: Graph, call: Call, value: Tensor, dtype: torch.dtype) -> Rewrite | None:
    inner = log_of(graph, call.input, dtype)
    if inner is None:
        return None
    dims, keepdim = dims_of(call), bool(call.option("keepdim", False))
    count = call.input.numel() / max(value.numel(), 1) if call.name == "mean" else 1
    shift = f" - log({count:g})" if count != 1 else ""

    def make() -> Tensor:
        total = torch.logsumexp(inner.make(), dims, keepdim)
        return total - math.log(count) if count != 1 else total

    return Rewrite(make, f"{call.name}({inner.was})", f"logsumexp({inner.instead}){shift}")


def _of_product(graph: Graph, call: Call, value: Tensor, dtype: torch.dtype) -> Rewrite | None:
    sign, mark, said = (1, "*", "+") if call.name == "mul" else (-1, "/", "-")
    logs = [
        Rewrite(lambda n=one: math.log(n), f"{one:g}", f"log({one:g})")  # type: ignore[misc]
        if is_number(one) and one > 0
        else log_of(graph, one, dtype)
        for one in (call.input, call.other)
    ]
    first, second = logs
    if first is None or second is None:
        return None
    was, instead = f"{first.was} {mark} {second.was}", f"{first.instead} {said} {second.instead}"
    return Rewrite(lambda: first.make() + sign * second.make(), was, instead)


def _of_power(graph: Graph, call: Call, value: Tensor, dtype: torch.dtype) -> Rewrite | None:
    powers = {"sqrt": 0.5, "square": 2.0, "rsqrt": -0.5, "reciprocal": -1.0}
    power = powers.get(call.name, call.other)
    inner = log_of(graph, call.input, dtype)
    if inner is None or not is_number(power):
        return None
    return Rewrite(
        lambda: inner.make() * power, f"{inner.was} ** {power:g}", f"{power:g} * {inner.instead}"
    )


def _of_clamp(graph: Graph, call: Call, value: Tensor, dtype: torch.dtype) -> Rewrite | None:
    inner, low, high = log_of(graph, call.input, dtype), call.option("min"), call.option("max")
    if inner is None or any(
        bound is not None and not (is_number(bound) and bound > 0) for bound in (low, high)
    ):
        return None
    bounds = [None if bound is None else math.log(bound) for bound in (low, high)]
    said = f"clamp({inner.instead}, log(min), log(max))"
    return Rewrite(lambda: inner.make().clamp(*bounds), f"clamp({inner.was})", said)


def _of_part(graph: Graph, call: Call, value: Tensor, dtype: torch.dtype) -> Rewrite | None:
    """Elements that were chosen, and other shapes and dtypes of the same."""
    inner = log_of(graph, call.input, dtype)
    if inner is None:
        return None
    if call.name == "gather":
        return Rewrite(
            lambda: inner.make().gather(call.option("dim"), call.option("index")),
            f"{inner.was}.gather(...)",
            f"{inner.instead}.gather(...)",
        )
    if call.name == "__getitem__":
        return Rewrite(
            lambda: inner.make()[call.option("index")],
            f"{inner.was}[...]",
            f"({inner.instead})[...]",
        )
    return Rewrite(lambda: inner.make().reshape(value.shape), inner.was, inner.instead)


LOGS: dict[str, Any] = {
    "softmax": _leaf(
        "softmax(x)",
        "log_softmax(x)",
        lambda call, x: functional.log_softmax(x, call.option("dim")),
    ),
    "sigmoid": _leaf("sigmoid(x)", "logsigmoid(x)", lambda call, x: functional.logsigmoid(x)),
    "exp": _leaf("exp(x)", "x", lambda call, x: x),
    "add": _of_add,
    "sub": _of_sub,
    "sum": _of_sum,
    "mean": _of_sum,
    "mul": _of_product,
    "div": _of_product,
    **dict.fromkeys(("pow", "sqrt", "rsqrt", "square", "reciprocal"), _of_power),
    "clamp": _of_clamp,
    **dict.fromkeys(("gather", "__getitem__", "reshape", "cast"), _of_part),
}


def dims_of(call: Call) -> list[int]:
    """Return the dimensions that a reduction goes over, none being all."""
    dim = call.option("dim")
    if dim is None or dim == ():
        return list(range(call.input.dim()))
    return [dim] if isinstance(dim, int) else list(dim)


def is_number(value: Any) -> bool:
    """Return whether an operand is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def dtype_of_log(value: Tensor) -> torch.dtype:
    """Return the dtype that a logarithm of a tensor has: float32 under autocast on a GPU."""
    device = value.device.type
    return torch.float32 if device == "cuda" and torch.is_autocast_enabled(device) else value.dtype


def logarithm(graph: Graph, call: Call) -> Rewrite | None:
    """log(p) of an expression of exponentials."""
    found = log_of(graph, call.input, dtype_of_log(call.input))
    return Rewrite(found.make, f"log({found.was})", found.instead) if found is not None else None


def logarithm_of_one_more(graph: Graph, call: Call) -> Rewrite | None:
    """log1p(exp(x)), log1p(-sigmoid(x))."""
    dtype = dtype_of_log(call.input)
    negated = graph.made(call.input, "neg")
    made = graph.behind_casts(negated.input, "sigmoid") if negated is not None else None
    if made is not None:
        return Rewrite(
            lambda: functional.logsigmoid(-made.input.to(dtype)),
            "log1p(-sigmoid(x))",
            "logsigmoid(-x)",
        )
    inner = log_of(graph, call.input, dtype)
    if inner is None:
        return None
    found = plus(inner, 1.0)
    return Rewrite(found.make, f"log1p({inner.was})", found.instead)


def cross_entropy(graph: Graph, call: Call) -> Rewrite | None:
    """binary_cross_entropy(sigmoid(x), t)."""
    made = graph.made(call.input)
    while made is not None and made.name in ("cast", "reshape"):
        made = graph.made(made.input)
    if (
        made is None
        or made.name != "sigmoid"
        or call.option("size_average")
        or call.option("reduce")
    ):
        return None
    probability: Tensor = call.input
    return Rewrite(
        lambda: functional.binary_cross_entropy_with_logits(
            made.input.to(probability.dtype).reshape(probability.shape),
            call.option("target").to(probability.dtype),
            call.other,
            reduction=call.option("reduction", "mean"),
        ),
        "binary_cross_entropy(sigmoid(x), t)",
        "binary_cross_entropy_with_logits(x, t)",
    )


def quotient(graph: Graph, call: Call) -> Rewrite | None:
    """exp(x) / sum(exp(x)), 1 / (1 + exp(-x)), x / (1 + exp(-x))."""
    above, below = (1.0, call.input) if call.name == "reciprocal" else (call.input, call.other)
    if not isinstance(below, Tensor):
        return None
    dtype = below.dtype
    lower = log_of(graph, below, dtype)
    if lower is None:
        return None
    upper = log_of(graph, above, dtype)
    if upper is not None:
        return Rewrite(
            lambda: torch.exp(upper.make() - lower.make()),
            f"{upper.was} / ({lower.was})",
            f"exp({upper.instead} - {lower.instead})",
        )
    name = f"{above:g}" if is_number(above) else "y"
    return Rewrite(
        lambda: above * torch.exp(-lower.make()),
        f"{name} / ({lower.was})",
        f"{name} * exp(-{lower.instead})",
    )
