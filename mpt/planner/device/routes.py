"""Operators that take another route on a real GPU than on a device torch does not know.

An operator with a kernel for CUDA next to a decomposition for everyone else (`silu_backward`, RMSNorm), or one that
looks at the device to choose (attention, half softmax with a float32 result, recurrent layers), would be traced along
the wrong route: more, or larger, intermediate tensors than the GPU allocates. Every such route is here, and nowhere
else.

The list was made by asking torch 2.13 to 2.15 which operators have both a composite kernel and one for a device
(`find_split_operators`), and by reading the device checks of 2.13. `unknown_routes` asks the installed torch
again: operators beyond the list are reported with the plan. Attention follows `sdp_utils.cpp` and the switches of a
script (`torch.nn.attention.sdpa_kernel`), except that cuDNN's own, which torch prefers on compute capabilities 9.0 and
10.0, is taken to accept and to hold as much as flash attention. What cuDNN
keeps for a recurrent layer's backward pass is not documented, and is taken to be the gates and states.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._prims_common import suggest_memory_format
from torch.autograd.function import _SingleLevelFunction

from mpt.planner.device.fake_device import DEVICE
from mpt.planner.device.matching_shapes import check_attention

REVIEWED_TORCH = ("2.11", "2.12", "2.13", "2.14", "2.15")
SPLIT_OPERATORS = frozenset(
    {
        "aten::silu_backward",
        "aten::mish_backward",
        "aten::native_channel_shuffle",
        "aten::_fused_rms_norm",
    }
)
KERNEL_ONLY = ("silu_backward", "mish_backward", "native_channel_shuffle", "_fused_rms_norm")
"""Kept whole, as the CUDA kernels keep them."""

KERNELS = {"math": 0, "flash": 1, "mem_efficient": 2, "cudnn": 3}
"""Torch's names of its kernels of attention in switches -> their numbers in its order (`SDPBackend`)."""


@dataclass
class Target:
    """The GPU whose routes are taken."""

    capability: tuple[int, int] = (8, 6)


target = Target()
_libraries: list[torch.library.Library] = []
kernels: dict[Any, Callable[..., Any]] = {}
"""Operator -> its route."""
_original_format: Any = torch._C._conv_determine_backend_memory_format


def register() -> None:
    """Register the routes of a real GPU for the fake device, once."""
    if _libraries:
        return
    aten = torch.ops.aten
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    for name in KERNEL_ONLY:
        library.impl(name, _never_runs, "PrivateUse1")
    kernels.update(
        {
            aten.scaled_dot_product_attention.default: _attention,
            aten.rms_norm.default: _rms_norm,
            aten.softmax.int: _softmax,
            aten.log_softmax.int: _log_softmax,
            aten.lstm.input: _recurrent(gates=4),
            aten.gru.input: _recurrent(gates=3),
            aten.rnn_tanh.input: _recurrent(gates=1),
            aten.rnn_relu.input: _recurrent(gates=1),
        }
    )
    for operator, kernel in kernels.items():
        library.impl(operator, kernel, "AutogradPrivateUse1")
    for operator, shapes in (
        (aten._thnn_fused_gru_cell.default, gru_cell),
        (aten._thnn_fused_gru_cell_backward.default, gru_cell_backward),
    ):
        if not operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta):
            library.impl(operator, shapes, "Meta")
    torch._C._conv_determine_backend_memory_format = _convolution_format  # type: ignore[assignment]


@functools.cache
def find_split_operators() -> frozenset[str]:
    """Return the operators that the installed torch decomposes for unknown devices but has a kernel for.

    On the CPU or, in a build for CUDA, which has its kernels without a card too, on CUDA.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [
        str(name)
        for name in torch._C._dispatch_get_all_op_names()
        if str(name).startswith("aten::")
    ]
    return frozenset(
        name
        for name in names
        if has(name, "CompositeImplicitAutograd") and (has(name, "CPU") or has(name, "CUDA"))
    )


def unknown_routes() -> list[str]:
    """Return warnings about the installed torch: a release not reviewed, or operators whose route is not known here."""
    release = ".".join(torch.__version__.split(".")[:2])
    warnings = []
    if release not in REVIEWED_TORCH:
        warnings.append(
            f"operator routes were reviewed for torch {', '.join(REVIEWED_TORCH)}, not for {release}"
        )
    new = sorted(find_split_operators() - SPLIT_OPERATORS)
    if new:
        warnings.append(
            f"torch {release} has operators whose route on a GPU is not known: {', '.join(new)}"
        )
    return warnings


def _never_runs(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("the fake GPU computes nothing")


def _rms_norm(
    tensor: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """The fused kernel wants input and weight in one dtype; else it is single operators."""
    if weight is not None and weight.dtype != tensor.dtype:
        return composite_rms_norm(tensor, shape, weight, eps)
    result: Tensor = torch.ops.aten._fused_rms_norm(tensor, shape, weight, eps)[0]
    return result


def composite_rms_norm(
    tensor: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
) -> Tensor:
    """RMSNorm of single operators, in float32 for halves, as `rms_norm_composite` of layer_norm.cpp has it."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    axes = list(range(-len(shape), 0))
    result = (
        wide * wide.pow(2).mean(axes, keepdim=True).add_(eps or torch.finfo(wide.dtype).eps).rsqrt()
    )
    if weight is not None:
        result = result * weight
    return result.to(tensor.dtype)


def _convolution_format(tensor: Tensor, weight: Tensor, backend: Any) -> torch.memory_format:
    """cuDNN writes channels last if input or weight lie so (`cudnn_conv_suggest_memory_format`), gradients too."""
    if tensor.device.type != DEVICE or torch.float64 in (tensor.dtype, weight.dtype):
        unchanged: torch.memory_format = _original_format(tensor, weight, backend)
        return unchanged
    return convolution_layout(tensor, weight)


def convolution_layout(tensor: Tensor, weight: Tensor) -> torch.memory_format:
    """Return the layout that cuDNN computes in: channels last if input or weight lie so."""
    formats = [suggest_memory_format(one) for one in (tensor, weight)]
    last = (torch.channels_last, torch.channels_last_3d)
    return next((found for found in formats if found in last), torch.contiguous_format)


def _softmax(tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return _softmax_route(torch.ops.aten._softmax.default, tensor, dim, dtype)


def _log_softmax(tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return _softmax_route(torch.ops.aten._log_softmax.default, tensor, dim, dtype)


def _softmax_route(operator: Any, tensor: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    """One CUDA kernel reads half and writes float32; bfloat16 has none and is converted first."""
    reads_half = tensor.dtype == torch.float16 and dtype == torch.float32
    given = tensor if dtype is None or reads_half else tensor.to(dtype)
    result: Tensor = operator(given, dim, reads_half)
    return result


def _attention(
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
    """Choose as torch does, in its order (flash, then memory-efficient, then the plain formula) of those switched on.

    Raises RuntimeError, as torch does, if none of them takes these tensors.
    """
    if not query.dtype == key.dtype == value.dtype:
        found = f"{query.dtype}, {key.dtype} and {value.dtype}"
        raise RuntimeError(
            f"Expected query, key, and value to have the same dtype, but got {found}"
        )
    check_attention(query, key, value, attn_mask)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
            attn_mask.logical_not(), -math.inf
        )
    four_dimensional = query.dim() == 4 and key.dim() == 4 and value.dim() == 4
    fused = four_dimensional and _lie_in_rows(query, key, value, attn_mask)
    takes_flash = fused and _flash_accepts(
        query, key, value, attn_mask, dropout_p, is_causal, needs_grad, enable_gqa
    )
    takes = {
        "flash": takes_flash,
        "cudnn": takes_flash,
        "mem_efficient": fused and not enable_gqa and _efficient_accepts(query, value),
        "math": True,
    }
    chosen = next((name for name in _attention_kernels() if takes[name]), None)
    if chosen is None:
        raise RuntimeError("No available kernel. Aborting execution.")
    if chosen == "math":
        found = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return found[0]  # type: ignore[no-any-return]
    if chosen == "mem_efficient":
        found = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, _padded_mask(attn_mask), needs_grad, dropout_p, is_causal, scale=scale
        )  # fmt: skip
        return found[0]  # type: ignore[no-any-return]
    return _flash(query, key, value, dropout_p, is_causal, scale)


def _attention_kernels() -> list[str]:
    """Return the kernels of attention that a script has switched on, the preferred first."""
    order: list[int] = torch._C._get_sdp_priority_order()
    named = {order_number: name for name, order_number in KERNELS.items()}
    names = [named[number] for number in order if number in named]
    return [name for name in names if getattr(torch._C, f"_get_{name}_sdp_enabled")()]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, is_causal: bool, scale: float | None
) -> Tensor:
    size = query.shape[-1]
    if size % 8:
        scale = scale if scale is not None else 1 / math.sqrt(size)
        query, key, value = (
            torch.nn.functional.pad(t, (0, 8 - size % 8)) for t in (query, key, value)
        )
    output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, is_causal, False, scale=scale
    )[0]
    return output[..., :size] if size % 8 else output


def _lie_in_rows(*tensors: Tensor | None) -> bool:
    """The fused kernels read along the last dimension: not a learned bias such as T5's, whose heads lie innermost."""
    return all(tensor is None or tensor.stride(-1) == 1 for tensor in tensors)


def _flash_accepts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    needs_grad: bool,
    enable_gqa: bool,
) -> bool:
    size = query.shape[-1]
    consumer = target.capability in ((8, 6), (8, 9), (12, 0))
    return (
        target.capability >= (8, 0)
        and query.dtype in (torch.float16, torch.bfloat16)
        and attn_mask is None
        and size <= 256
        and size == key.shape[-1] == value.shape[-1]
        and not (consumer and needs_grad and (size > 224 or (size > 192 and dropout_p > 0)))
        and not (is_causal and query.shape[-2] != key.shape[-2])
        and (enable_gqa or query.shape[1] == key.shape[1] == value.shape[1])
    )


def _efficient_accepts(query: Tensor, value: Tensor) -> bool:
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.dtype == torch.bfloat16 and target.capability < (8, 0):
        return False
    if not half and query.dtype != torch.float32:
        return False
    tensor_cores = target.capability >= (8, 0) or (half and target.capability >= (7, 0))
    alignment = 4 if target.capability >= (8, 0) else 1
    if tensor_cores:
        alignment = max(alignment, 8 if half else 4)
    return query.shape[-1] % alignment == 0 and value.shape[-1] % alignment == 0


def _padded_mask(mask: Tensor | None) -> Tensor | None:
    """The memory-efficient kernel wants rows of a multiple of 16: others are copied into a padded tensor."""
    if mask is None or mask.shape[-1] % 16 == 0:
        return mask
    return torch.nn.functional.pad(mask, (0, 16 - mask.shape[-1] % 16))[..., : mask.shape[-1]]


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hidden: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the state of `nn.GRUCell` and what its backward needs (`RNN.cu`): torch has no rule for the shapes."""
    return torch.empty_like(hidden), hidden.new_empty((len(hidden), 5 * hidden.shape[1]))


def gru_cell_backward(
    gradient: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients of gates, state and biases."""
    gates = [workspace.new_empty((len(workspace), workspace.shape[1] // 5 * 3)) for _ in range(2)]
    biases = [one.sum(0) if has_bias else None for one in gates]
    return (*gates, torch.empty_like(gradient), *biases)


class _CudnnRecurrent(_SingleLevelFunction):  # whose `apply` does not look for transforms
    """Tensors that cuDNN allocates for a recurrent layer: results, a reserve kept for backward, flat weights under
    autocast."""

    @staticmethod
    def forward(
        ctx: Any,
        layout: tuple[int, int, bool, bool, bool],
        inputs: Tensor,
        states: tuple[Tensor, ...],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        gates, layers, train, bidirectional, _ = layout
        dtype = (
            torch.get_autocast_dtype(DEVICE) if torch.is_autocast_enabled(DEVICE) else inputs.dtype
        )
        inputs = inputs.to(dtype)
        hidden = weights[1].shape[1]
        directions = 2 if bidirectional else 1
        flat = None
        if weights[0].dtype != dtype:
            flat = inputs.new_empty(sum(weight.numel() for weight in weights))
        output_shape = (*inputs.shape[:2], hidden * directions)
        output = inputs.new_empty(output_shape)
        last = tuple(torch.empty_like(state, dtype=dtype) for state in states)
        steps = inputs.shape[0] * inputs.shape[1]
        kept = steps * hidden * layers * directions * (gates + len(states))
        reserve = inputs.new_empty(kept if train else 0)
        ctx.save_for_backward(inputs, reserve, output, *weights)
        ctx.flat, ctx.states = flat, states
        return (output, *last)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        inputs, _, _, *weights = ctx.saved_tensors
        grad_input = torch.empty_like(inputs)
        flat = inputs.new_empty(sum(weight.numel() for weight in weights))
        pieces = flat.split([weight.numel() for weight in weights])
        grads = [
            piece.view(weight.shape).to(weight.dtype)
            for piece, weight in zip(pieces, weights, strict=True)
        ]
        return (None, grad_input, None, *grads)


_cudnn_recurrent: Any = _CudnnRecurrent


def _recurrent(gates: int) -> Any:
    def kernel(
        inputs: Tensor,
        states: Tensor | list[Tensor],
        weights: list[Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        layout = (gates, layers, train, bidirectional, batch_first)
        held = states if isinstance(states, list) else [states]  # an LSTM has two
        others = [one.dtype for one in held if one.dtype != inputs.dtype]
        if others and not torch.is_autocast_enabled(DEVICE):
            raise RuntimeError(
                f"Input and hidden tensors are not the same dtype: {inputs.dtype} and {others[0]}"
            )
        with enable_single_level_autograd_function():  # a kernel is called below `torch.func`
            result: tuple[Tensor, ...] = _cudnn_recurrent.apply(
                layout, inputs, tuple(held), *weights
            )
        return result

    return kernel
