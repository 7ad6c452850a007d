"""Print what each precision mode does to which operator, as docs/reference/operators.md shows it.

Usage: python scripts/documents/precision_table.py

Each operator is run under the mode on this CPU, once on float32 and once on half inputs, and the dtypes that come out
are read: "half" and "float32" whatever goes in, or "as its input". The column for autocast on CUDA is read from the
lists in the installed torch's header, from which CUDA's own kernels are made, so no GPU is needed for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mpt.config.load import change_precision, load_config
from mpt.planner.device.fake_device import header_path, read_operator_lists

POLICY_WORDS = {
    "LOWER_PRECISION_FP": "half",
    "FP32": "float32",
    "FP32_SET_OPT_DTYPE": "float32",
    "PROMOTE": "widest",
}

Operator = Callable[[Tensor, Callable[..., Tensor]], Any]


def operators() -> dict[str, tuple[str, Operator]]:
    """Return label -> (aten name, function of an input (2, 4, 8, 8) and of a maker of further tensors)."""
    return {
        "conv2d": ("conv2d", lambda x, new: functional.conv2d(x, new(4, 4, 3, 3))),
        "linear": ("linear", lambda x, new: functional.linear(x, new(3, 8))),
        "matmul, bmm": ("matmul", lambda x, new: x @ x),
        "scaled_dot_product_attention": (
            "scaled_dot_product_attention",
            lambda x, new: functional.scaled_dot_product_attention(x, x, x),
        ),
        "softmax": ("softmax", lambda x, new: functional.softmax(x, -1)),
        "layer_norm": ("layer_norm", lambda x, new: functional.layer_norm(x, (8,), new(8), new(8))),
        "group_norm": ("group_norm", lambda x, new: functional.group_norm(x, 2, new(4), new(4))),
        "batch_norm": (
            "batch_norm",
            lambda x, new: functional.batch_norm(x, None, None, new(4), new(4), True),
        ),
        "exp, log, pow": ("exp", lambda x, new: torch.exp(x)),
        "rsqrt": ("rsqrt", lambda x, new: torch.rsqrt(x)),
        "sum": ("sum", lambda x, new: torch.sum(x)),
        "mean": ("mean", lambda x, new: torch.mean(x)),
        "norm": ("norm", lambda x, new: torch.norm(x)),
        "relu, sigmoid, tanh": ("relu", lambda x, new: torch.relu(x)),
        "gelu": ("gelu", lambda x, new: functional.gelu(x)),
        "max_pool2d": ("max_pool2d", lambda x, new: functional.max_pool2d(x, 2)),
        "interpolate (bilinear)": (
            "upsample_bilinear2d",
            lambda x, new: functional.interpolate(x, scale_factor=2, mode="bilinear"),
        ),
        "grid_sample": (
            "grid_sampler",
            lambda x, new: functional.grid_sample(x, new(2, 4, 4, 2), align_corners=False),
        ),
        "half + float32": ("add", lambda x, new: x + torch.ones(2, 4, 8, 8)),
        "cat of half and float32": ("cat", lambda x, new: torch.cat([x, torch.ones(2, 4, 8, 8)])),
        "mse_loss": ("mse_loss", lambda x, new: functional.mse_loss(x, new(2, 4, 8, 8))),
        "cross_entropy": (
            "nll_loss",
            lambda x, new: functional.cross_entropy(x.flatten(1), torch.zeros(2, dtype=torch.long)),
        ),
        "binary_cross_entropy": (
            "binary_cross_entropy",
            lambda x, new: functional.binary_cross_entropy(x, new(2, 4, 8, 8)),
        ),
    }


def main() -> None:
    lists = read_operator_lists(header_path().read_text())
    cuda = {name: POLICY_WORDS[policy] for policy, entries in lists.items() for name, _ in entries}
    # Beside the lists: two with kernels of their own, two that PyTorch's type promotion decides without autocast.
    cuda |= {
        "binary_cross_entropy": "refused",
        "norm": "float32",
        "add": "float32",
        "cat": "float32",
    }
    base = load_config({"model": {"name": "dcgan"}, "dataset": {"name": "digits"}})
    modes = {name: change_precision(base, name).precision for name in ("bf16", "O1")}
    built = {
        name: choice.member("build")(choice.mode, choice.native_settings(), torch.device("cpu"))
        for name, choice in modes.items()
    }
    print("| operator | amp on CUDA | amp on a CPU | O1 | O2, O3, pure |")
    print("|---|---|---|---|---|")
    for label, (name, operator) in operators().items():
        found = [classify(operator, precision) for precision in built.values()]
        pure = classify(operator, None)
        print(f"| {label} | {cuda.get(name, 'as its input')} | {' | '.join(found)} | {pure} |")


def classify(operator: Operator, precision: Any) -> str:
    """Return what an operator makes of float32 and of half inputs under a mode (None: no mode)."""
    made = [dtype_of(operator, precision, dtype) for dtype in (torch.float32, torch.bfloat16)]
    if made[1] == "refused":
        return "refused"
    if made == ["bfloat16", "bfloat16"]:
        return "half"
    if made == ["float32", "float32"]:
        return "float32"
    return "as its input" if made == ["float32", "bfloat16"] else " / ".join(made)


def dtype_of(operator: Operator, precision: Any, dtype: torch.dtype) -> str:
    """Return the dtype that comes out, or "refused"."""

    def new(*shape: int) -> Tensor:
        return torch.full(shape, 0.5, dtype=dtype)

    try:
        if precision is None:
            result = operator(new(2, 4, 8, 8), new)
        else:
            with precision.forward():
                result = operator(new(2, 4, 8, 8), new)
    except (RuntimeError, NotImplementedError):
        return "refused"
    return str(result.dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
