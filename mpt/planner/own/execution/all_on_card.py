"""A script that never names a card, planned as if everything were there, tensors of arrays and loaders' batches too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher


@contextmanager
def all_on_card(card: torch.device) -> Iterator[None]:
    """Put tensors on the card that the script makes inside the block, and batches when a loader has them.

    A loader's samples are made on the host, as they would be.
    """
    from_numpy = torch.from_numpy

    def loading(fetch: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, places: Any) -> Any:
            on_host = mock.patch.object(torch, "from_numpy", from_numpy)
            with on_host, torch._C.DisableTorchFunction():
                batch = fetch(self, places)
            return tree_map_only(Tensor, lambda one: one.to(card), batch)

        return call

    moved = mock.patch.object(torch, "from_numpy", lambda array: from_numpy(array).to(card))
    with card, moved, ExitStack() as stack:
        for kind in (_MapDatasetFetcher, _IterableDatasetFetcher):
            stack.enter_context(mock.patch.object(kind, "fetch", loading(kind.fetch)))
        yield
