"""Weights that somebody's own step shares out over cards: torch's own FSDP2, in its fake process group.

`fully_shard` over one dimension of a mesh is traced as it is (`mpt.planner.step.shard_trace`): the first card's shards,
the weights that it gathers, its reduce buffers, mixed precision and networks that were made on `meta`. The exchange
takes no time, and NCCL's own buffers lie outside torch's allocator. Other ways to share weights are refused.

FSDP2's modules are imported here, before functions of `torch.distributed` are replaced: they keep those that they find.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel
from torch.distributed.tensor import _dispatch
from torch.distributed.tensor.parallel import style
from torch.utils._pytree import tree_map_only

from mpt.planner.device.fake_device import DEVICE
from mpt.planner.step.shard_trace import fake_world, of_true_numbers, watch_shards
from mpt.planner.trace.cannot_plan import CannotPlan
from mpt.planner.trace.overlap import OrderedWork
from mpt.planner.trace.trace import Recorder
from mpt.run.process.storage_trace import tensors_in

NOTE = "fully_shard is planned as on the first of {} cards: its exchange takes no time, and NCCL's buffers come on top"
SHARED = (
    "cannot plan: it shares weights out over cards by {}; FSDP2 over one dimension (fully_shard, nothing on the host) "
    "is planned. Leave it out to plan one card"
)
STYLES = (style.ColwiseParallel, style.RowwiseParallel, style.SequenceParallel)


class Shards:
    """Begins the fake group when a script first asks for a mesh. `kept`: functions of c10d as torch has them."""

    def __init__(
        self, recorder: Recorder | None, size: Callable[[], int], stack: ExitStack
    ) -> None:
        self.recorder, self.size, self.stack = recorder, size, stack
        self.is_open = False
        self.kept: list[Any] = []

    def keep(self, module: Any, names: Sequence[str]) -> None:
        """Keep functions as they are, for the fake group to be made with."""
        self.kept.append(
            mock.patch.multiple(module, **{name: getattr(module, name) for name in names})
        )

    def answers(self) -> list[Any]:
        """Return the replacements of torch's ways to share weights."""
        refused = [
            mock.patch.object(FullyShardedDataParallel, "__init__", _refuse("FSDP1")),
            mock.patch.object(CPUOffloadPolicy, "__init__", _refuse("CPUOffloadPolicy")),
        ]
        refused += [mock.patch.object(one, "_apply", _refuse(one.__name__)) for one in STYLES]
        return [
            mock.patch.object(DeviceMesh, "__init__", self._mesh()),
            # there is no state of a card's random numbers to keep alike
            mock.patch.object(_dispatch, "is_rng_supported_mesh", return_value=False),
            *refused,
        ]

    def default_group(self) -> Callable[..., Any]:
        """Return the replacement of c10d's own look for its group."""
        original = distributed.distributed_c10d._get_default_group

        def find() -> Any:
            self._open()
            return original()

        return find

    def _open(self) -> None:
        if self.is_open:
            return
        if self.recorder is None:
            raise CannotPlan(SHARED.format("a mesh"))
        self.is_open = True
        self.recorder.notes.append(NOTE.format(self.size()))
        self.stack.enter_context(self._world())
        self.stack.enter_context(watch_shards(self.recorder, OrderedWork(ranks=self.size())))

    @contextmanager
    def _world(self) -> Iterator[None]:
        with ExitStack() as world:
            with self._as_ever(), unset_fake_temporarily():
                world.enter_context(fake_world(0, self.size()))
            try:
                yield
            finally:
                with self._as_ever():
                    world.close()

    @contextmanager
    def _as_ever(self) -> Iterator[None]:
        with ExitStack() as stack:
            for one in self.kept:
                stack.enter_context(one)
            yield

    def _mesh(self) -> Callable[..., None]:
        original = DeviceMesh.__init__

        @functools.wraps(original)
        def make(own: Any, device_type: str, *args: Any, **options: Any) -> None:
            self._open()
            assert self.recorder is not None
            # the numbers of its ranks, which the script's own call has made as a fake tensor
            ranks = [one.tolist() for one in tensors_in((args, options))]
            with of_true_numbers(self.recorder):
                true = iter([torch.tensor(one, device="cpu") for one in ranks])
                args, options = tree_map_only(Tensor, lambda _: next(true), (args, options))
                original(own, DEVICE if device_type == "cuda" else device_type, *args, **options)
                if own.ndim > 1:
                    raise CannotPlan(SHARED.format(f"a mesh of {own.ndim} dimensions"))

        return make


def _refuse(way: str) -> Callable[..., None]:
    def refuse(*args: Any, **options: Any) -> None:
        raise CannotPlan(SHARED.format(way))

    return refuse
