"""Classes of tensors that libraries derive from torch's: bitsandbytes' `Params4bit` and `Int8Params`.

They are made of a tensor's memory (`Tensor._make_subclass`), which torch refuses of a fake tensor, since that has a
class already. So one gets a class that is both: the library's methods and attributes, and a fake tensor underneath.

A layer in int8 multiplies some columns in half, those with a value beyond a threshold, of which a plan takes as many as
were found in large language models: 7 of thousands at 13 billion weights (Dettmers et al., "LLM.int8()", 2022).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mpt.nn.shared.mixin import become

FUNCTIONS = "bitsandbytes.functional"
OUTLIERS = 7
"""Columns of a layer's input that are taken to be beyond the threshold."""


def with_outliers(values: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return numbers in int8, the scale of each row, and the numbers of the columns beyond a threshold."""
    rows = values.numel() // values.shape[-1]
    columns = min(OUTLIERS, values.shape[-1])
    return (
        torch.empty(values.shape, dtype=torch.int8, device=values.device),
        torch.empty(rows, dtype=torch.float32, device=values.device),
        values.new_empty(columns, dtype=torch.int64) if threshold else None,
    )


def with_outliers_added(
    values: Tensor,
    rows: Tensor,
    weight: Tensor,
    row_scales: Tensor,
    scales: Tensor,
    columns: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the product of numbers and a weight in int8, and the numbers in the columns beyond the threshold."""
    calls = torch.ops.bitsandbytes
    product = calls.int8_linear_matmul(rows, weight)
    found = calls.int8_mm_dequant(product, row_scales, scales, values.dtype, bias)
    found = found.to(values.dtype)  # the kernel writes float16
    del product
    if columns is None:
        return found, values.new_empty(0)
    beside = values.new_empty((values.shape[0], columns.numel()))
    beyond = calls.int8_vectorwise_dequant(
        weight.new_empty((weight.shape[0], columns.numel())), scales
    )
    return found.addmm(beside, beyond.to(values.dtype).t()), beside


RULES: dict[str, Callable[..., tuple[Tensor | None, ...]]] = {
    "bitsandbytes::int8_vectorwise_quant": with_outliers,
    "bitsandbytes::int8_mixed_scaled_mm": with_outliers_added,
}
"""Operator of bitsandbytes whose results depend on values -> the results that are planned."""


def let_page(module: ModuleType) -> None:
    """Let states of paged optimizers be tensors of the card, on which they are as long as there is room."""

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = "cuda") -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def nothing(*args: Any, **options: Any) -> None:
        """Change no value, and move nothing."""

    vars(module).update(get_paged=get_paged, fill=nothing, prefetch_tensor=nothing)


def class_of(kind: type[Tensor]) -> type[Tensor]:
    """Return a class of fake tensors for a class of tensors, which may be one."""
    return kind if issubclass(kind, FakeTensor) else of_both(kind)


@functools.cache
def of_both(kind: type[Tensor]) -> type[Tensor]:
    """Return a class of fake tensors with the methods of a class of tensors."""
    members = {"__module__": kind.__module__, "detach": detach}
    metaclass: Any = type(kind)
    # a dictionary by classes, such as torchvision's dtypes, is to find it
    alike = {
        "__eq__": lambda one, other: one is other or other is kind,
        "__hash__": lambda _: hash(kind),
    }
    metaclass = type(metaclass.__name__, (metaclass,), alike)
    made: type[Tensor] = metaclass(kind.__name__, (kind, FakeTensor), members)
    return made


def detach(self: Any) -> Tensor:
    """Return a tensor of the same memory and class: torch moves the weights of a fake network by such ones."""
    made = FakeTensor.detach(self)
    become(made, type(self))
    return made


@contextmanager
def made_of_fakes() -> Iterator[None]:
    """Let classes of tensors be made of fake tensors inside the block."""
    make = Tensor._make_subclass

    def make_subclass(kind: Any, data: Tensor, require_grad: bool = False, **options: Any) -> Any:
        if not isinstance(data, FakeTensor):
            return make(kind, data, require_grad, **options)
        made: Any = FakeTensor.detach(data)
        become(made, class_of(kind))
        made._is_param = issubclass(kind, nn.Parameter)
        made.requires_grad_(require_grad)
        return made

    convert = Tensor.as_subclass

    def as_subclass(data: Tensor, kind: Any) -> Any:
        """Return a view of a tensor as another class, such as fastai's TensorImage.

        One that is more than a tensor, such as MONAI's MetaTensor, copies all attributes of one tensor to others, its
        device among them: those stay plain tensors, which such libraries take too.
        """
        if not isinstance(data, FakeTensor):
            return convert(data, kind)
        with torch._C.DisableTorchFunctionSubclass():
            made: Any = torch.ops.aten.alias.default(data)
        if not any(Tensor in one.__bases__ and len(one.__bases__) > 1 for one in kind.__mro__):
            become(made, FakeTensor if kind is Tensor else class_of(kind))
        return made

    def new(kind: Any, *args: Any, **options: Any) -> Any:
        """Return a new tensor; of a class that is given a tensor, such as BigGAN's Distribution, a view of that."""
        if kind is not Tensor and len(args) == 1 and isinstance(args[0], FakeTensor):
            return as_subclass(args[0], kind)
        return torch._C.TensorBase.__new__(kind, *args, **options)

    subclassed = mock.patch.multiple(Tensor, _make_subclass=make_subclass, as_subclass=as_subclass)
    with subclassed, mock.patch.object(Tensor, "__new__", new, create=True):
        yield
