"""Arguments for every function of O1's tables, so that the tests can walk the tables entry by entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[list[Any], dict[str, Any]]


def random(*shape: int) -> Tensor:
    """Return the same numbers in (0, 1) at every call: inside the domain of every listed function."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.rand(*shape, generator=generator) * 0.8 + 0.1


def call(*args: Any, **kwargs: Any) -> Callable[[torch.dtype], Arguments]:
    """Return a function that gives these arguments with the floating tensors in a dtype."""

    def give(dtype: torch.dtype) -> Arguments:
        def convert(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():
                return value.to(dtype)
            if isinstance(value, list | tuple):
                return type(value)(convert(item) for item in value)
            return value

        return [convert(value) for value in args], {
            name: convert(value) for name, value in kwargs.items()
        }

    return give


vector, matrix, cube = random(3), random(3, 3), random(2, 3, 3)
target = torch.tensor([0, 2, 1])
signs = torch.tensor([1.0, -1.0, 1.0])
lstm = [random(8, 2), random(8, 2), random(8), random(8)]
gru = [random(6, 2), random(6, 2), random(6), random(6)]
rnn = [random(2, 2), random(2, 2), random(2), random(2)]
sequence, hidden, state = random(4, 1, 2), random(1, 1, 2), random(1, 2)
switches = (True, 1, 0.0, False, False, False)

TORCH = {
    **{
        f"conv{n}d": call(random(1, 2, *[3] * n), random(2, 2, *[2] * n), random(2))
        for n in (1, 2, 3)
    },
    **{
        f"conv_transpose{n}d": call(random(1, 2, *[3] * n), random(2, 2, *[2] * n), bias=random(2))
        for n in (1, 2, 3)
    },
    "conv_tbc": call(random(4, 1, 2), random(2, 2, 3), random(3)),
    "prelu": call(random(2, 3), vector),
    "addmm": call(matrix, matrix, matrix, beta=0.5),
    "addmv": call(vector, matrix, vector),
    "addr": call(matrix, vector, vector),
    "addbmm": call(matrix, cube, cube),
    "baddbmm": call(cube, cube, cube),
    "bmm": call(cube, mat2=cube),
    "matmul": call(matrix, matrix),
    "mm": call(matrix, matrix),
    "mv": call(matrix, vector),
    "rnn_tanh_cell": call(state, state, *rnn),
    "rnn_relu_cell": call(state, state, *rnn),
    "gru_cell": call(state, state, *gru),
    "lstm_cell": call(state, (state, state), *lstm),
    "rnn_tanh": call(sequence, hidden, rnn, *switches),
    "rnn_relu": call(sequence, hidden, rnn, *switches),
    "gru": call(sequence, hidden, gru, *switches),
    "lstm": call(sequence, (hidden, hidden), lstm, *switches),
    "pow": call(matrix, 2.0),
    "cumprod": call(matrix, dim=0),
    "cumsum": call(matrix, 0),
    "dist": call(matrix, matrix * 0.5),
    "renorm": call(matrix, 2.0, 0, 1.0),
    "addcdiv": call(matrix, matrix, matrix, value=0.5),
    "addcmul": call(matrix, matrix, matrix),
    "cross": call(random(2, 3), random(2, 3), dim=1),
    "bilinear": call(matrix, matrix, cube, random(2)),
    "dot": call(vector, vector),
    "cat": call([matrix, matrix]),
    "stack": call(tensors=[matrix, matrix]),
}
FUNCTIONAL = {
    "linear": call(matrix, matrix, bias=vector),
    "interpolate": call(random(1, 1, 4, 4), scale_factor=2, mode="bilinear"),
    "grid_sample": call(random(1, 1, 3, 3), random(1, 2, 2, 2), align_corners=False),
    "softplus": call(matrix),
    "softmin": call(matrix, dim=1),
    "softmax": call(matrix, dim=1),
    "log_softmax": call(matrix, dim=1),
    "gelu": call(matrix),
    "layer_norm": call(matrix, (3,), vector, vector),
    "group_norm": call(random(2, 4, 3), 2),
    "local_response_norm": call(random(2, 4, 3), 2),
    "normalize": call(matrix),
    "cosine_similarity": call(matrix, matrix),
    "poisson_nll_loss": call(matrix, matrix),
    "cosine_embedding_loss": call(matrix, matrix, signs),
    "cross_entropy": call(matrix, target),
    "hinge_embedding_loss": call(matrix, signs),
    "kl_div": call(matrix, matrix, reduction="sum"),
    "l1_loss": call(matrix, matrix * 2),
    "mse_loss": call(matrix, matrix * 2),
    "margin_ranking_loss": call(vector, vector, signs),
    "multilabel_margin_loss": call(matrix, torch.tensor([[0, 1, -1]] * 3)),
    "multilabel_soft_margin_loss": call(matrix, matrix),
    "multi_margin_loss": call(matrix, target),
    "nll_loss": call(matrix, target),
    "binary_cross_entropy_with_logits": call(matrix, matrix),
    "smooth_l1_loss": call(matrix, matrix * 2),
    "soft_margin_loss": call(matrix, matrix),
    "triplet_margin_loss": call(matrix, matrix, matrix),
    "ctc_loss": call(
        random(4, 1, 3).log(), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
    ),
    "binary_cross_entropy": call(matrix, matrix),
    **{name: TORCH[name] for name in TORCH if name.startswith("conv")},
}


def arguments(name: str, dtype: torch.dtype) -> Arguments:
    """Return arguments for `torch.NAME`: one matrix, or two for the functions of two, unless listed above."""
    two = {"atan2", "add", "div", "mul", "eq", "equal", "ge", "gt", "le", "lt", "ne"}
    default = call(matrix, matrix * 0.5) if name in two else call(matrix)
    return TORCH.get(name, default)(dtype)


def inner_arguments(name: str, dtype: torch.dtype) -> Arguments:
    """Return arguments for `torch.nn.functional.NAME`."""
    return FUNCTIONAL[name](dtype)
