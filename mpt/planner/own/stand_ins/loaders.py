"""Data loaders of a step that is planned: in the plan's own process, on fake tensors where these do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, is_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from mpt.nn.shared.mixin import become
from mpt.planner.own.stand_ins.draws import Draws


def load_here(loader: DataLoader[Any]) -> Any:
    """Return an iterator that loads in this process: a plan's tensors cannot be sent from workers."""
    loader.num_workers, loader.timeout = 0, 0
    return _SingleProcessDataLoaderIter(loader)


def become_local(iterator: Any, loader: Any) -> None:
    """Make an iterator that would start workers one that loads in this process: fastai's loader calls its class."""
    loader.num_workers, loader.timeout = 0, 0
    become(iterator, _SingleProcessDataLoaderIter)
    iterator.__init__(loader)


@contextmanager
def loaded_here() -> Iterator[None]:
    """Let loaders load in this process inside the block."""
    with (
        mock.patch.object(DataLoader, "_get_iterator", load_here),
        mock.patch.object(_MultiProcessingDataLoaderIter, "__init__", become_local),
    ):
        yield


Fetch = Callable[[Any, Any], Any]
MOST_NESTED = 3
"""Objects within objects of a batch that are looked into."""


def fetch_real(fetch: Fetch, fetcher: Any, places: Any) -> Any:
    """Return a batch of real tensors; None if it cannot be made of these alone."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        try:
            return fetch(fetcher, places)
        except Exception:
            return None


def holds_fakes(batch: Any, depth: int = MOST_NESTED) -> bool:
    """Return whether a batch has fake tensors, among the attributes of its objects too, such as a graph's."""
    leaves = tree_leaves(batch)
    if any(isinstance(one, FakeTensor) for one in leaves):
        return True
    inner = [vars(one) for one in leaves if hasattr(one, "__dict__")] if depth else []
    return bool(inner) and holds_fakes(inner, depth - 1)


def in_part(
    fetch: Fetch, become: Callable[[Tensor], Tensor], drawn: Draws, is_known: bool
) -> Fetch:
    """Return a function that makes a batch of fake tensors.

    One that needs true values (a random crop) is made of real tensors, and then becomes fake; so is each if their
    values are to be known.
    """

    def fake_batch(fetcher: Any, places: Any) -> Any:
        drawn.look()
        try:
            batch = in_fakes(fetcher, places)
            drawn.forms.add(tuple(tuple(one.shape) for one in tree_leaves(batch) if is_tensor(one)))
            return batch
        finally:
            drawn.begin()

    def in_fakes(fetcher: Any, places: Any) -> Any:
        batch = fetch_real(fetch, fetcher, places) if is_known else None
        if batch is None or holds_fakes(batch):
            try:
                return fetch(fetcher, places)
            except (ArithmeticError, LookupError, ValueError, RuntimeError):
                batch = None if is_known else fetch_real(fetch, fetcher, places)
                if batch is None:
                    raise
        return tree_map_only(Tensor, become, batch)

    return fake_batch


@contextmanager
def true_batches(
    become: Callable[[Tensor], Tensor], drawn: Draws, is_known: bool
) -> Iterator[None]:
    """Let batches that cannot be made of fake tensors be made of real ones inside the block; all, if they are known."""
    with ExitStack() as stack:
        for kind in (_MapDatasetFetcher, _IterableDatasetFetcher):
            fetch = in_part(kind.fetch, become, drawn, is_known)
            stack.enter_context(mock.patch.object(kind, "fetch", fetch))
        yield
