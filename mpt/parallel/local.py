"""Is a tensor sharded? Asked without importing torch's sharding, which takes as long as torch and is seldom needed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor, which shares its memory; of one that is not sharded, all of it."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def full(tensor: Any) -> Tensor:
    """Return a whole tensor; call on all ranks."""
    result: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return result


def group_of(tensors: Iterable[Any]) -> Any:
    """Return the group of the ranks over which tensors are sharded, or None; replicas of them hold the same."""
    meshes = (tensor.device_mesh for tensor in tensors if is_sharded(tensor))
    return next((mesh.get_group(mesh.ndim - 1) for mesh in meshes), None)


def place_of(tensors: Iterable[Any]) -> tuple[int, int, bool]:
    """Return which part of sharded tensors this rank holds, of how many, and whether it is the one to write it.

    If parts have replicas, the first replica's ranks write. Without any tensor there is one part, of rank 0.
    """
    mesh = next((tensor.device_mesh for tensor in tensors if is_sharded(tensor)), None)
    if mesh is None:
        return 0, 1, True
    *replica, number = mesh.get_coordinate()
    return number, mesh.shape[-1], not any(replica)
