"""CUDA's autocast lists on a CPU: operators that a card computes in float32 are no fault of the model.

Autocast for CPUs leaves `exp`, `log`, `pow`, `sum` and others in the dtype of their inputs and computes matrix
decompositions, `polar`, padding and pools of volumes in float32; for CUDA it is the other way round. The lists are read
from the installed torch's own header. A call inside a composite function of torch keeps the CPU's rule, but for those
in `COMPOSITES`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mpt.planner.device.fake_device import header_path, read_operator_lists
from mpt.planner.device.kept_modes import KeptInBackward

DECOMPOSITIONS = re.compile(
    r"_?linalg_(?!vector_norm|matrix_norm|vecdot|cross|diagonal|multi_dot)\w+|cholesky\w*|lu\w*|_lu_with_info|geqrf|orgqr|"
    r"ormqr|inverse|pinverse|qr|svd|triangular_solve|logdet|slogdet|det"
)
"""Operators for which CUDA has no kernel in half."""
TRANSFORMS = re.compile(r"fft_\w*fft\d?n?|stft")
COMPOSITES = frozenset(
    {
        "square",
        "arccos",
        "arcsin",
        "linalg_norm",
        "trapezoid",
        "trapz",
        "cumulative_trapezoid",
        "normalize",
        "gumbel_softmax",
        "softmin",
        "pairwise_distance",
        "multilabel_soft_margin_loss",
        "trace",
        "interpolate",
        "upsample",
        "upsample_nearest",
        "upsample_bilinear",
    }
)
"""Functions that torch makes of operators of the list, inside which a mode for functions sees nothing."""
LEFT = re.compile(
    r"polar|view_as_complex|(nan)?quantile|pad|(adaptive_)?(avg|max)_pool3d|max_unpool\dd|fractional_max_pool\dd"
)
"""Functions that autocast for CPUs computes in float32, and CUDA's leaves in the dtype of their inputs."""
PROMOTED = frozenset({"grid_sample", "grid_sampler"})
"""Those that CUDA's computes in the widest dtype of their inputs."""
SPELLINGS = {"__pow__": "pow", "__rpow__": "pow", "float_power": "pow"}


@cache
def float32_operators() -> frozenset[str]:
    """Return the names of the operators that CUDA's autocast computes in float32."""
    lists = read_operator_lists(header_path().read_text())
    return frozenset(
        name for policy in ("FP32", "FP32_SET_OPT_DTYPE") for name, _ in lists[policy]
    ) | {"norm", *COMPOSITES}


class CudaLists(KeptInBackward):
    """Within its block autocast on the CPU follows CUDA's lists. `used` names the operators for which that mattered."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[str] = set()

    def handle(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function on inputs in the dtype that CUDA's autocast gives them."""
        if not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        name = operator_name(func)
        if name == "interpolate" and "area" in (kwargs.get("mode"), *args[3:4]):
            name = "adaptive_avg_pool"  # which is in no list
        halves = (torch.float16, torch.bfloat16)
        if name in float32_operators() and any(
            one.dtype in halves for one in tensors_of(args, kwargs)
        ):
            self.used.add(name)
            args, kwargs = tree_map(raised, (args, kwargs))
        elif TRANSFORMS.fullmatch(name) and any(
            one.dtype in halves for one in tensors_of(args, kwargs)
        ):
            with TransformsInHalf(
                next(one.dtype for one in tensors_of(args, kwargs) if one.dtype in halves)
            ):
                return func(*args, **kwargs)  # in float32, by the CPU's list
        elif DECOMPOSITIONS.fullmatch(name) or LEFT.fullmatch(name) or name in PROMOTED:
            if name in PROMOTED and len({one.dtype for one in tensors_of(args, kwargs)}) > 1:
                args, kwargs = tree_map(raised, (args, kwargs))
            with torch.autocast("cpu", enabled=False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


class TransformsInHalf(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Let Fourier transforms in half raise within the block as on a GPU, if autocast leaves them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith("aten::_fft_"):
            if self.dtype == torch.bfloat16:
                raise RuntimeError("Unsupported dtype BFloat16")
            # The longer of both sides: a transform to real numbers is given half of the frequencies.
            result = func(*args, **(kwargs or {}))
            sides = [max(args[0].shape[one], result.shape[one]) for one in args[1]]
            if any(side & (side - 1) for side in sides):
                raise RuntimeError(
                    "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, "
                    f"but got a signal size of {sides}"
                )
            return result
        return func(*args, **(kwargs or {}))


def operator_name(func: Any) -> str:
    """Return the operator that a function of torch calls, as the lists spell it; "" for none."""
    place, _, name = (resolve_name(func) or "").rpartition(".")
    if place in ("torch.linalg", "torch.fft"):
        return f"{place.removeprefix('torch.')}_{name}"
    return SPELLINGS.get(name, name)


def tensors_of(*values: Any) -> list[Tensor]:
    """Return the tensors in arguments."""
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def raised(value: Any) -> Any:
    """Return a half tensor in float32, anything else as it is."""
    return (
        value.float()
        if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        else value
    )
