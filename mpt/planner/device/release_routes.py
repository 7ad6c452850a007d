"""How earlier releases of torch did it: the routes of `mpt.planner.device.releases`, on fake tensors.

Only what is allocated, when and for how long, follows those releases; values are of no matter here.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from mpt.config.options import setting_of
from mpt.memory.set_to_none import Settings, SetToNone
from mpt.planner.device import releases
from mpt.seams import Run

RELEASES_THEM_ITSELF = frozenset({"optimizer_in_backward", "release_grads_after"})
"""Tricks that let gradients go whatever zero_grad does."""
FOREACH_ADAM = "_multi_tensor_adam"
"""The function of torch.optim.adam, which AdamW calls too."""


@contextmanager
def adam_as_released() -> Iterator[None]:
    """Replace the foreach step of Adam and AdamW by the one that the planned release had."""
    if not releases.is_before("second temporary of Adam"):
        yield
        return
    module = importlib.import_module("torch.optim.adam")  # torch.optim drops the name
    before = getattr(module, FOREACH_ADAM)
    setattr(module, FOREACH_ADAM, early_foreach_adam)
    try:
        yield
    finally:
        setattr(module, FOREACH_ADAM, before)


def change_run(run: Run) -> Run:
    """Return a built run that keeps its gradients, and steps a tensor at a time, where the planned release did.

    What the configuration says itself (`memory.set_to_none`, `optimizer.foreach` or `fused`) stands.
    """
    names = {trick.name for trick in run.tricks}
    if "set_to_none" not in names and not names & RELEASES_THEM_ITSELF and releases.takes("gradients are kept"):
        kept = SetToNone(Settings(enabled=False))
        kept.attach(run)
        run = replace(run, keeps_gradients=kept.keeps_gradients)
    if not releases.is_before("a tensor at a time"):
        return run
    for name, optimizer in run.optimizers.items():
        asked = setting_of(run.optimizer_settings[name], "foreach")
        if asked is not None or not _is_of_torch(optimizer):
            continue
        for group in optimizer.param_groups:
            if group.get("foreach") and releases.takes("a tensor at a time"):
                group["foreach"] = False
    return run


def early_softmax(operator: Any, tensor: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Softmax or its logarithm, with the input kept for backward."""
    result: Tensor = _EarlySoftmax.apply(operator, tensor, dim, half_to_float)  # type: ignore[no-untyped-call]
    return result


def composite_rms_norm(tensor: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
    """RMSNorm of single operators, in float32 for halves, as `rms_norm_composite` of layer_norm.cpp has it."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    axes = list(range(-len(shape), 0))
    result = wide * wide.pow(2).mean(axes, keepdim=True).add_(eps or torch.finfo(wide.dtype).eps).rsqrt()
    if weight is not None:
        result = result * weight
    return result.to(tensor.dtype)


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of single operators, each under autocast's rule for itself; shapes (..., t, d)."""
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    scores = (query * (scale or 1 / math.sqrt(query.shape[-1]))) @ key.transpose(-2, -1)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=scores.dtype).masked_fill_(attn_mask.logical_not(), -math.inf)
        scores.add_(attn_mask)  # in the same tensor, as baddbmm has it
    weights = functional.softmax(scores, dim=-1)
    del scores
    if dropout_p > 0.0:
        weights = functional.dropout(weights, dropout_p)
    return weights @ value


def early_foreach_adam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    *,
    amsgrad: bool,
    lr: Any,
    weight_decay: float,
    eps: float,
    maximize: bool,
    decoupled_weight_decay: bool,
    **rest: Any,
) -> None:
    """Step as before torch 2.1: the root of the second moments and the divisor are two tensors for each weight.

    The gradients with their L2 decay are held to the end, too. Bias correction is left out, which allocates nothing.
    """
    if not params:
        return
    groups = Optimizer._group_tensors_by_device_and_dtype(
        [params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps]  # type: ignore[list-item]
    )
    for lists, _ in groups.values():
        weights, gradients, means, squares, largest, steps = (list[Any](members) for members in lists)
        releases.takes("second temporary of Adam")
        if maximize:
            gradients = list(torch._foreach_neg(gradients))
        torch._foreach_add_(steps, 1)
        if weight_decay and decoupled_weight_decay:
            torch._foreach_mul_(weights, 1 - weight_decay)
        elif weight_decay:
            gradients = list(torch._foreach_add(gradients, weights, alpha=weight_decay))
        torch._foreach_mul_(means, 0.9)
        torch._foreach_add_(means, gradients, alpha=0.1)
        torch._foreach_mul_(squares, 0.999)
        torch._foreach_addcmul_(squares, gradients, gradients, 0.001)
        if amsgrad:
            torch._foreach_maximum_(largest, squares)
        roots = torch._foreach_sqrt(largest if amsgrad else squares)
        torch._foreach_div_(roots, 1.0)
        divisors = torch._foreach_add(roots, eps)
        torch._foreach_addcdiv_(weights, means, divisors, -1.0)


class _EarlySoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Any, tensor: Tensor, dim: int, half_to_float: bool) -> Tensor:
        result: Tensor = operator(tensor, dim, half_to_float)
        ctx.save_for_backward(tensor, result)
        ctx.is_log, ctx.dim = operator is torch.ops.aten._log_softmax.default, dim
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        tensor, result = ctx.saved_tensors
        backward = torch._log_softmax_backward_data if ctx.is_log else torch._softmax_backward_data
        return None, backward(gradients[0], result, ctx.dim, tensor.dtype), None, None


def _is_of_torch(optimizer: Optimizer) -> bool:
    own = (kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim."))
    return any(kind is not Optimizer for kind in own)
