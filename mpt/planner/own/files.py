"""Checkpoints that a step writes and reads while it is planned.

Nothing is written: a plan must not replace a file of the training, and fake tensors have no contents. What a step saved
it can load again. Files that are there are read by torch itself, which makes fake tensors of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only


class Place:
    """Stands for a storage that a `map_location` moves; `device` says where to."""

    device: Any = "cpu"

    def cuda(self, device: Any = None, *options: Any, **named: Any) -> Self:
        """Move it to the card."""
        self.device = "cuda"
        return self

    def cpu(self) -> Self:
        """Move it to the host."""
        self.device = "cpu"
        return self


def place_of(map_location: Any) -> Any:
    """Return the device that a function for storages moves to, and anything else as it is."""
    if not callable(map_location) or isinstance(map_location, torch.device):
        return map_location
    moved = map_location(Place(), "cpu")
    return moved.device if isinstance(moved, Place) else "cpu"


class Files:
    """The checkpoints of one plan."""

    def __init__(self, load: Callable[..., Any]) -> None:
        self._load = load
        self._saved: dict[Any, tuple[Any, Any]] = {}
        """File -> the file, and copies in host memory with the devices of the originals."""

    def save(self, given: Any, file: Any, *options: Any, **named: Any) -> None:
        """Keep the contents in place of writing them."""
        kept = tree_map_only(Tensor, lambda one: (one.detach().cpu(), one.device), given)
        self._saved[key_of(file)] = file, kept

    def load(self, file: Any, map_location: Any = None, *options: Any, **named: Any) -> Any:
        """Return the kept contents, or read a file."""
        place = place_of(map_location)
        found = self._saved.get(key_of(file))
        if found is None:
            return self._load(file, place, *options, **named)

        def restored(pair: Any) -> Any:
            if not is_pair(pair):
                return pair
            device = pair[1] if place is None or isinstance(place, dict) else place
            return pair[0].clone().to(device)

        return tree_map(restored, found[1], is_leaf=is_pair)


def is_pair(value: Any) -> bool:
    """Return whether this is a tensor that was kept."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Tensor)


def key_of(file: Any) -> Any:
    """Return a name for a path or an open file."""
    return os.fspath(file) if isinstance(file, str | os.PathLike) else id(file)


@contextmanager
def without_files() -> Iterator[None]:
    """Let `torch.save` write nothing inside the block."""
    files = Files(torch.load)
    with mock.patch.multiple(torch, save=files.save, load=files.load):
        yield
