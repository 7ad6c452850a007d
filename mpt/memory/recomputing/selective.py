"""Recomputing all but the dear operators: outputs of matrix products and convolutions are kept and handed out again.

Like `torch.utils.checkpoint.create_selective_checkpoint_contexts`, but it counts the kept operators only. Torch's own
counts every operator, and fails if a recomputation casts a weight that the forward found in autocast's or O1's
cache; and it gives each output out once, so that a penalty on gradients cannot be differentiated.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from mpt.memory.recomputing.operators import draws_random_numbers

aten = torch.ops.aten
KEPT_OPERATORS = frozenset(
    getattr(aten, name).default
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    if hasattr(aten, name)
)  # fmt: skip
"""The operators whose outputs are dear to compute. All else is cheap to do again."""


def is_kept(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call's result is kept: attention with dropout is not, or later random numbers would change."""
    return function in KEPT_OPERATORS and not draws_random_numbers(function, args, kwargs)


class Kept:
    """One tensor as it was when it was kept."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = alias(tensor)
        self.version = self.tensor._version

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing has been written to it since."""
        return self.tensor._version == self.version

    def take(self) -> Tensor:
        """Return the tensor; RuntimeError if it was changed in place since."""
        if not self.is_unchanged:
            raise RuntimeError(
                "memory.recompute: selective: the output of a convolution or matrix product was changed in place, so "
                "it cannot be used again. Use recompute: all, or make that operation out-of-place"
            )
        return alias(self.tensor)


def alias(tensor: Tensor) -> Tensor:
    """Return the tensor without its graph, with the version counter that in-place changes move."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class KeepOutputs(TorchDispatchMode):
    """Around the forward: notes the results of the dear operators, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: dict[Any, list[Any]] = defaultdict(list)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if is_kept(function, args, kwargs or {}):
            self.kept[function].append(
                tree_map(lambda x: Kept(x) if isinstance(x, Tensor) else x, result)
            )
        return result


class ReuseOutputs(TorchDispatchMode):
    """Around a recomputation: the dear operators are not run, their outputs are handed out in the same order."""

    def __init__(self, source: KeepOutputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = source.kept

    def __enter__(self) -> Any:
        self.position: dict[Any, int] = defaultdict(int)
        # A graph that is kept may be walked again; else each output is released as it is used.
        self.walked_again = torch._C._autograd._get_current_graph_task_keep_graph()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not is_kept(function, args, kwargs or {}):
            return function(*args, **(kwargs or {}))
        position = self.position[function]
        self.position[function] += 1
        if position >= len(self.kept[function]) or self.kept[function][position] is None:
            _refuse(function)
        result = self.kept[function][position]
        if not self.walked_again:
            self.kept[function][position] = None
        return tree_map(lambda x: x.take() if isinstance(x, Kept) else x, result)


def _refuse(function: Any) -> NoReturn:
    raise RuntimeError(
        f"memory.recompute: selective: {function} was called more often in the recomputation than in the forward; the "
        "block does not do the same twice. Use recompute: all or leave the block out"
    )
