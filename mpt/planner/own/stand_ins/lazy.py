"""Lazy modules (`nn.LazyLinear`) on fake tensors.

Torch makes a parameter of unknown shape as a subclass of a plain tensor, which a fake one cannot become. Here it is a
fake tensor of a class that is both. It moves and changes its dtype as torch's own does, and becomes an ordinary fake
parameter, the same object, when its shape is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from mpt.nn.shared.mixin import become

ASKED = (
    Tensor.requires_grad_,
    Tensor.untyped_storage,
    Tensor.register_post_accumulate_grad_hook,
)
"""Called by `nn.Parameter` and by a plan; torch's own classes allow none."""


class UnknownShape:
    """The part that parameters and buffers have in common."""

    cls_to_become: Any = FakeTensor
    shape: Any = FakeTensor.shape
    """The fake mode asks for it when one moves."""
    _allowed_methods: list[Any]

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        moves = func in cls._allowed_methods or func is Tensor.detach
        if not moves and func not in ASKED:
            refuse: Any = super()
            return refuse.__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result: Any = func(*args, **kwargs or {})
        if type(result) is FakeTensor:
            become(result, cls)
        return result


class UnknownParameter(UnknownShape, UninitializedParameter, FakeTensor):
    """A fake parameter whose shape is not known."""


class UnknownBuffer(UnknownShape, UninitializedBuffer, FakeTensor):
    """A fake buffer whose shape is not known."""


def maker(kind: type[Tensor], fake: type[Tensor], has_gradient: bool) -> Callable[..., Any]:
    """Return a replacement for the `__new__` of one of torch's two classes."""
    original: Any = kind.__new__

    def make(
        cls: type[Tensor],
        requires_grad: bool = has_gradient,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> Any:
        made: Any = torch.empty(0, device=device, dtype=dtype)
        if type(made) is not FakeTensor:
            return original(cls, requires_grad, device, dtype, **options)
        made.requires_grad_(requires_grad)
        flag = "_is_param" if has_gradient else "_is_buffer"
        vars(made).update({"persistent": True, **options, flag: True})
        become(made, fake)
        return made

    return make


@contextmanager
def lazy_modules() -> Iterator[None]:
    """Let lazy modules be made of fake tensors inside the block."""
    kinds: tuple[tuple[type[Tensor], type[Tensor], bool], ...] = (
        (UninitializedParameter, UnknownParameter, True),
        (UninitializedBuffer, UnknownBuffer, False),
    )
    with ExitStack() as stack:
        for kind, fake, has_gradient in kinds:
            make = maker(kind, fake, has_gradient)
            stack.enter_context(mock.patch.object(kind, "__new__", make))
        yield
