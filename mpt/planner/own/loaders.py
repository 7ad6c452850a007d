"""Data loaders of a step that is planned: in the plan's own process, on fake tensors where these do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter


def load_here(loader: DataLoader[Any]) -> Any:
    """Return an iterator that loads in this process: a plan's tensors cannot be sent from workers."""
    loader.num_workers, loader.timeout = 0, 0
    return _SingleProcessDataLoaderIter(loader)


@contextmanager
def loaded_here() -> Iterator[None]:
    """Let loaders load in this process inside the block."""
    with mock.patch.object(DataLoader, "_get_iterator", load_here):
        yield


_fetch: Any = _MapDatasetFetcher.fetch


def fetch(fetcher: Any, places: Any) -> Any:
    """Return a batch; one that needs true values (a random crop) is made of real tensors, and then becomes fake."""
    try:
        return _fetch(fetcher, places)
    except (ArithmeticError, LookupError, ValueError, RuntimeError):
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            try:
                batch = _fetch(fetcher, places)
            except Exception:
                batch = None
        if batch is None:
            raise
    return tree_map_only(Tensor, lambda one: torch.empty(one.shape, dtype=one.dtype), batch)


@contextmanager
def true_batches() -> Iterator[None]:
    """Let batches that cannot be made of fake tensors be made of real ones inside the block."""
    with mock.patch.object(_MapDatasetFetcher, "fetch", fetch):
        yield
