"""Checks on a state before it is saved or used: finite everywhere, and made for this model.

A poisoned EMA or a running mean that is NaN ruins a checkpoint as surely as a poisoned weight does, and no loss shows
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpt.errors import CheckpointError
from mpt.parallel.local import is_sharded, local
from mpt.parallel.world import World

SHOWN_KEYS = 5


def first_non_finite(state: Any, only_sharded: bool = False) -> str | None:
    """Return the path of the first tensor in a nested state that holds NaN or infinity, joined by dots; None if none
    does.

    Works on the tensors' devices and copies one flag per device to the host; only a state that fails is looked at
    further. Of a sharded tensor this rank's part is looked at; `only_sharded` leaves out all others.
    """
    found = (
        (name, local(one))
        for name, one in walk_tensors(state)
        if is_sharded(one) or not only_sharded
    )
    named = [(name, tensor) for name, tensor in found if is_checkable(tensor)]
    flags: dict[torch.device, list[Tensor]] = {}
    for _, tensor in named:
        flags.setdefault(tensor.device, []).append(finite_flag(tensor))
    if all(bool(torch.stack(group).all()) for group in flags.values()):
        return None
    return next(name for name, tensor in named if not bool(finite_flag(tensor)))


def first_non_finite_on_ranks(state: Any, world: World) -> str | None:
    """Return `first_non_finite` of the state of all ranks; call on all.

    Tensors that are not sharded may differ between ranks (BatchNorm's statistics); the first rank's are saved.
    """
    own = first_non_finite(state, only_sharded=not world.is_first)
    return next((name for name in world.collect(own) if name is not None), None)


def is_checkable(tensor: Tensor) -> bool:
    """Can this tensor hold a value that is not finite?"""
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() > 0


def finite_flag(tensor: Tensor) -> Tensor:
    """Return a boolean scalar on the tensor's device: is all of it finite?"""
    values = (
        torch.view_as_real(tensor.detach().resolve_conj())
        if tensor.is_complex()
        else tensor.detach()
    )
    if values.element_size() == 1:  # no float8 kernel for this
        values = values.float()
    # One pass without a temporary the size of the tensor, fifteen times the speed of isfinite().all(); NaN propagates.
    return torch.isfinite(torch.stack(torch.aminmax(values))).all()


def walk_tensors(state: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dicts, lists and tuples with their paths."""
    if isinstance(state, Tensor):
        yield path, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from walk_tensors(value, f"{path}.{key}" if path else str(key))
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from walk_tensors(value, f"{path}.{index}" if path else str(index))


def compare_keys(
    expected: Mapping[str, Tensor | Sequence[int]],
    found: Mapping[str, Tensor | Sequence[int]],
) -> None:
    """Raise CheckpointError, listing the differences, unless both hold the same names with the same shapes.

    `expected` is the model's, `found` the checkpoint's; values are tensors or shapes.
    """
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    other_shape = [
        f"{name} ({shown_shape(found[name])} instead of {shown_shape(expected[name])})"
        for name in expected
        if name in found and shape_of(found[name]) != shape_of(expected[name])
    ]
    parts = [
        f"{len(names)} {title}: {', '.join(names[:SHOWN_KEYS])}{', ...' if len(names) > SHOWN_KEYS else ''}"
        for title, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", other_shape),
        )
        if names
    ]
    if parts:
        raise CheckpointError(
            f"The checkpoint is of another architecture than the model: {'; '.join(parts)}. Use the config it was "
            "trained with, config.yaml in its run directory."
        )


def shape_of(value: Tensor | Sequence[int]) -> tuple[int, ...]:
    """Return a tensor's shape, or a shape as it is."""
    return tuple(value.shape) if isinstance(value, Tensor) else tuple(value)


def shown_shape(value: Tensor | Sequence[int]) -> str:
    """Return a shape as people write it."""
    return "x".join(map(str, shape_of(value))) or "scalar"


def refuse_split(name: str, module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if a saved state has two values for two names of one weight.

    Loaded, the last of them would count for all of its layers.
    """
    first: dict[int, str] = {}
    for key, value in module.state_dict(keep_vars=True).items():
        other = first.setdefault(id(value), key)
        if other != key and not torch.equal(saved[other], saved[key]):
            raise CheckpointError(
                f"checkpoint: {name}.{other} and {name}.{key} are one weight of this model, and the checkpoint has two "
                "values for it; it was saved by another version of the model, or of memory.lora before adapters were "
                "shared. Start anew from its weights with memory.lora.targets that leave one of the layers out"
            )
