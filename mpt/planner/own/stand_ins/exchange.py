"""Fake tensors that get the contents of others: modules that move, and `weight.data = other`.

Torch keeps a real parameter and replaces its memory. A fake one knows its device by its type, which cannot change so,
and torch swaps it for another: not if a graph refers to it (the weight that `nn.utils.weight_norm` computes at once),
or anything does weakly, as torch itself does to fake tensors that are made from numbers. Its hooks go astray, and the
old memory lives until the next one is swapped. Here its memory is replaced where it can be, and on another device it is
swapped in any case, keeps its hooks, and the old memory ends at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mpt.nn.shared.mixin import become

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_swap_tensors = torch.utils.swap_tensors
_set_data = Tensor.data.__set__  # type: ignore[attr-defined]
_grad: Any = Tensor.grad
ELSEWHERE = "_gradient_elsewhere"
"""Attribute of a tensor with a gradient that its own device or size forbids."""


def swap(first: Tensor, second: Tensor) -> None:
    """Swap two tensors: the first gets the contents of the second, which is dropped."""
    if not (isinstance(first, FakeTensor) and isinstance(second, FakeTensor)):
        _swap_tensors(first, second)  # type: ignore[no-untyped-call]
        return
    if is_same(first, second):
        return
    if first.fake_device == second.fake_device:
        first.constant = None
        with torch.no_grad():
            _set_data(first, second)
        return
    for one in (first, second):
        forget(one)
    hooks = [getattr(first, name) for name in HOOKS]
    kinds = type(first), type(second)
    become(first, kinds[1])
    become(second, kinds[0])
    # what a script hung on to a weight stays there
    first.__dict__, second.__dict__ = {**first.__dict__, **second.__dict__}, first.__dict__
    torch._C._swap_tensor_impl(first, second)
    for name, kept in zip(HOOKS, hooks, strict=True):
        if kept is not None:
            setattr(first, name, kept)
    with torch.no_grad():
        # of the same shape, by which autograd may still lay out a gradient
        nothing = torch.empty((), dtype=second.dtype, device=second.device).expand(second.shape)
        nothing.untyped_storage().resize_(0)
        _set_data(second, nothing)


def is_same(first: FakeTensor, second: FakeTensor) -> bool:
    """Return whether two tensors are the same view of the same memory: one has moved to where it was."""
    return (
        first.fake_device == second.fake_device
        and first.dtype == second.dtype
        and first.shape == second.shape
        and first.stride() == second.stride()
        and first.untyped_storage()._cdata == second.untyped_storage()._cdata
    )


def forget(fake: FakeTensor) -> None:
    """Let torch's own tables of fake tensors have a tensor no longer."""
    if not weakref.getweakrefs(fake):
        return
    converter = fake.fake_mode.fake_tensor_converter
    for number in [key for key, one in converter.tensor_memo.items() if one is fake]:
        del converter.tensor_memo[number]
    for aliases in converter.constant_storage_mapping.values():
        aliases[:] = [alias for alias in aliases if alias() is not fake]


def set_data(tensor: Tensor, value: Tensor) -> None:
    """Replace a tensor's contents, be they on another device; its gradient stays as it is."""
    if (
        not (isinstance(tensor, FakeTensor) and isinstance(value, FakeTensor))
        or tensor.fake_device == value.fake_device
    ):
        _set_data(tensor, value)
        return
    gradient, tensor.grad = tensor.grad, None
    with torch.no_grad():
        moved = value.data  # and counts its changes by itself
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, tensor.requires_grad)
        else:
            moved.requires_grad_(tensor.requires_grad)
        kind = type(tensor)
        swap(tensor, moved)
        become(tensor, kind)
        if moved.requires_grad and moved.is_leaf:
            moved.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                gives_to(weakref.ref(tensor))
            )
        if gradient is not None:
            keep_gradient(tensor, gradient)


def keep_gradient(tensor: Any, gradient: Any) -> None:
    """Let a tensor have a gradient, be it of another size or on another device, as one that has moved has."""
    fits = tensor.shape == gradient.shape and tensor.fake_device == gradient.fake_device
    if fits:
        _grad.__set__(tensor, gradient)
    else:
        tensor.__dict__[ELSEWHERE] = gradient


def _gradient_of(tensor: Any) -> Any:
    if ELSEWHERE in tensor.__dict__:  # which may have moved meanwhile
        gradient = tensor.__dict__.pop(ELSEWHERE)
        keep_gradient(tensor, gradient)
        return gradient
    return _grad.__get__(tensor)


def _set_gradient(tensor: Any, gradient: Any) -> None:
    tensor.__dict__.pop(ELSEWHERE, None)
    _grad.__set__(tensor, gradient)


def gives_to(found: weakref.ref[Tensor]) -> Callable[[Tensor], None]:
    """Return a hook by which a backward pass, of a graph from before a move, reaches the tensor that has moved."""

    def give(old: Tensor) -> None:
        tensor, gradient = found(), old.grad
        old.grad = None
        if tensor is None or gradient is None:
            return
        tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
        for hook in [*(getattr(tensor, HOOKS[1]) or {}).values()]:
            hook(tensor)

    return give


_new_fake: Any = FakeTensor.__new__


def new_fake(kind: type[FakeTensor], *args: Any, **options: Any) -> Any:
    """Make a fake tensor, or a parameter of one: `type(weight)(data, requires_grad=False)` makes another like it."""
    if args and isinstance(args[0], Tensor):
        return nn.Parameter(args[0], bool(options.get("requires_grad", True)))
    return _new_fake(kind, *args, **options)


@contextmanager
def tensors_exchanged() -> Iterator[None]:
    """Let torch swap tensors in this way inside the block, and scripts make parameters by the type of others."""
    with (
        mock.patch.object(torch.utils, "swap_tensors", swap),
        mock.patch.object(FakeTensor, "__new__", new_fake),
        mock.patch.object(FakeTensor, "grad", property(_gradient_of, _set_gradient)),
    ):
        yield
