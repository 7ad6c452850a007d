"""Results of the CPU's kernels if torch's rules for fake tensors say otherwise, for plans alongside a run on a
CPU.

Found by comparing traces on fake and on real tensors, with torch 2.13 (2.11's LSTM keeps 0.6 % more under autocast):

- A recurrent layer of oneDNN returns a workspace that its backward needs, and none without gradients. Only the library
  knows its size, and torch's rule says 0 bytes; of a layer in bfloat16 some processors' gradients are in float32: the
  real layer and its backward are run once for each set of shapes, with gradients and without.
- `torch.normal(mean, std)` has the dtype of its mean, `torch.where` takes a mask of bytes and the loss of labels in
  bytes is computed, on CUDA too.
- A norm of half inputs with float32 weights, as under autocast, keeps its statistics in float32 and not in half, and
  the group norm's backward returns the input's gradient in half and not in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

_aten = torch.ops.aten
RECURRENT_LAYER = _aten.mkldnn_rnn_layer.default
"""Returns a workspace where gradients are recorded, and none elsewhere."""
_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
_layers: dict[Any, list[_Form | None]] = {}


def _recurrent_layer(operator: Any, *args: Any) -> Any:
    if args[0].device.type != "cpu":
        return NotImplemented
    key = (
        operator,
        torch.is_grad_enabled(),
        *((arg.shape, arg.dtype) if isinstance(arg, Tensor) else str(arg) for arg in args),
    )
    if key not in _layers:
        try:
            with unset_fake_temporarily():
                real = operator(
                    *(
                        torch.zeros(a.shape, dtype=a.dtype) if isinstance(a, Tensor) else a
                        for a in args
                    )
                )
        except RuntimeError:  # halves in inference mode, which oneDNN refuses below modes
            return NotImplemented
        _layers[key] = [  # there is no workspace if nothing is trained
            None if one is None else (one.shape, one.stride(), one.dtype) for one in real
        ]
    return tuple(
        None if form is None else args[0].new_empty_strided(form[0], form[1], dtype=form[2])
        for form in _layers[key]
    )


def _is_mixed(values: Tensor, weight: Tensor | None) -> bool:
    return values.device.type == "cpu" and weight is not None and weight.dtype != values.dtype


def _norm(operator: Any, *args: Any, **kwargs: Any) -> Any:
    position = [argument.name for argument in operator._schema.arguments].index("weight")
    if not _is_mixed(args[0], args[position]):
        return NotImplemented
    like = args[0].to(args[position].dtype)
    result, *statistics = operator(like, *args[1:], **kwargs)
    return (result.to(args[0].dtype), *statistics)


def _batch_norm_backward(operator: Any, *args: Any) -> Any:
    """Return no gradient of an input that wants none (a norm behind a frozen network)."""
    if args[0].device.type != "cpu" or args[-1][0]:
        return NotImplemented
    return (None, *(args[2].new_empty(args[2].shape) if one else None for one in args[-1][1:]))


def _group_norm_backward(operator: Any, *args: Any) -> Any:
    _, values, _, _, weight, _, channels, _, _, wanted = args
    if not _is_mixed(values, weight):
        return NotImplemented
    shapes = (values.shape, (channels,), (channels,))
    return tuple(
        like.new_empty(shape) if is_wanted else None
        for shape, like, is_wanted in zip(shapes, (values, weight, weight), wanted, strict=True)
    )


def _normal(operator: Any, mean: Tensor, std: Tensor, **kwargs: Any) -> Any:
    if mean.dtype == std.dtype:
        return NotImplemented
    return operator(mean, std.to(mean.dtype), **kwargs)


def _where(operator: Any, mask: Tensor, *values: Any) -> Any:
    return operator(mask.bool(), *values) if mask.dtype == torch.uint8 else NotImplemented


def _loss_of_labels(operator: Any, values: Tensor, labels: Tensor, *rest: Any) -> Any:
    if labels.dtype != torch.uint8:
        return NotImplemented
    return operator(values, labels.long(), *rest)


def _loss_of_labels_backward(
    operator: Any, gradient: Tensor, values: Tensor, labels: Tensor, *rest: Any
) -> Any:
    if labels.dtype != torch.uint8:
        return NotImplemented
    return operator(gradient, values, labels.long(), *rest)


ROUTES: dict[Any, Callable[..., Any]] = {
    _aten.normal.Tensor_Tensor: _normal,
    _aten.where.self: _where,
    _aten.nll_loss_forward.default: _loss_of_labels,
    _aten.nll_loss_backward.default: _loss_of_labels_backward,
    RECURRENT_LAYER: _recurrent_layer,
    _aten.mkldnn_rnn_layer_backward.default: _recurrent_layer,
    _aten.native_layer_norm.default: _norm,
    _aten.native_group_norm.default: _norm,
    _aten.native_batch_norm.default: _norm,
    _aten.native_batch_norm_backward.default: _batch_norm_backward,
    _aten.native_group_norm_backward.default: _group_norm_backward,
}
"""Operator -> a function of its arguments that returns its results; NotImplemented if torch's own rule is right."""
