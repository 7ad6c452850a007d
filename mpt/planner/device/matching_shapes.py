"""Shapes that an operator's kernels refuse, which torch's rules for fake tensors let pass.

The checks are those that kernels of the CPU and of CUDA share, found as those of `mpt.planner.device.matching_dtypes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
MOST_CATEGORIES = 1 << 24
"""Of a draw: its kernels count them in float32 (`aten/src/ATen/native/Distributions.cpp`)."""


def check_shapes(func: Any, args: Sequence[Any]) -> None:
    """Raise RuntimeError or IndexError if an operator's kernels refuse the shapes of its arguments."""
    if func in _CHECKS:
        _CHECKS[func](*args)


def _draw(weights: Tensor, count: int, has_replacement: bool = False) -> None:
    categories = weights.shape[-1] if weights.dim() else 1
    if categories > MOST_CATEGORIES:
        raise RuntimeError(
            f"multinomial: {categories} categories are more than {MOST_CATEGORIES}, the most that can be drawn from"
        )
    if count > categories and not has_replacement:
        raise RuntimeError(
            f"multinomial: cannot draw {count} of {categories} categories without replacement"
        )


def _power(base: Tensor, exponent: Tensor) -> None:
    shape: torch.Size = torch.broadcast_shapes(base.shape, exponent.shape)  # type: ignore[no-untyped-call]
    if shape != base.shape:
        raise RuntimeError(
            f"pow_: a tensor of shape {tuple(base.shape)} cannot hold results of shape {tuple(shape)}"
        )


def check_masks(tensor: Tensor, indices: Sequence[Tensor | None]) -> None:
    """Raise IndexError if a mask among a tensor's indices has other sizes than the dimensions that it selects from."""
    dim = 0
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        count = index.dim() if is_mask and index is not None else 1
        if is_mask and index is not None and index.shape != tensor.shape[dim : dim + count]:
            raise IndexError(
                f"the mask of shape {tuple(index.shape)} at index {dim} does not fit the tensor of shape "
                f"{tuple(tensor.shape)}"
            )
        dim += count


def check_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Raise RuntimeError if attention has other values than keys, or a mask of another size than its table."""
    if key.shape[-2] != value.shape[-2]:
        raise RuntimeError(
            f"attention: {key.shape[-2]} keys have {value.shape[-2]} values, and need as many"
        )
    table = query.shape[-2], key.shape[-2]
    if mask is not None and any(
        found not in (1, needed)
        for found, needed in zip(mask.shape[::-1], table[::-1], strict=False)
    ):
        raise RuntimeError(
            f"attention: a mask of shape {tuple(mask.shape)} does not fit {table[0]} queries and {table[1]} keys"
        )


def check_alignments(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor
) -> None:
    """Raise RuntimeError if the loss of CTC is not given a length and labels of each sample."""
    samples = log_probs.shape[1] if log_probs.dim() == 3 else 1
    for name, lengths in (("input", input_lengths), ("target", target_lengths)):
        if lengths.dtype.is_floating_point or lengths.dtype == torch.bool:
            raise RuntimeError(f"ctc_loss: {name} lengths of {lengths.dtype} are no integers")
        if lengths.numel() != samples:
            raise RuntimeError(
                f"ctc_loss: {samples} samples have {lengths.numel()} {name} lengths, and need as many"
            )
    if log_probs.dim() not in (2, 3) or targets.dim() not in (1, 2):
        raise RuntimeError(
            f"ctc_loss: expected (times, samples, labels) and (samples, labels) or one row, but got "
            f"{tuple(log_probs.shape)} and {tuple(targets.shape)}"
        )
    if log_probs.dim() == 3 and targets.dim() == 2 and targets.shape[0] != samples:
        raise RuntimeError(
            f"ctc_loss: {samples} samples have labels of {targets.shape[0]}, and need as many"
        )


_CHECKS: dict[Any, Callable[..., None]] = {
    _aten.multinomial.default: _draw,
    _aten.pow_.Tensor: _power,
}
