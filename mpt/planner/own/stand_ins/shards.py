"""Weights that somebody's own step shares out over cards: torch's own ways, in its fake process group.

FSDP1 and FSDP2, meshes of several dimensions, tensor parallel and what they keep on the host are traced as they are
(`mpt.planner.step.shard_trace`): the first card's shards, the weights that it gathers, its reduce buffers, mixed
precision and networks that were made on `meta`. The exchange takes no time, and NCCL's own buffers lie outside torch's
allocator. Real steps on one device (the doctor's) are alone, and refuse these ways.

FSDP's modules are imported here, before functions of `torch.distributed` are replaced: they keep those that they find.
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
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import _dispatch, _random
from torch.utils._pytree import tree_map_only

from mpt.planner.device.fake_device import DEVICE
from mpt.planner.step.shard_trace import fake_world, of_true_numbers, watch_shards
from mpt.planner.trace.cannot_plan import CannotPlan
from mpt.planner.trace.overlap import OrderedWork
from mpt.planner.trace.recorder import Recorder
from mpt.run.process.storage_trace import tensors_in

NOTE = "weights are shared out as on the first of {} cards: the exchange takes no time, and NCCL's buffers come on top"
SHARED = "it shares weights out over cards by {}, which steps on one device cannot. Leave that out"
RECEIVED = (
    "cannot plan: it waits for what another process sends (recv_object_list), as stages of a pipeline do. Plan a stage "
    "as a step of its own"
)
c10d = distributed.distributed_c10d
_new_group = c10d.new_group


class Shards:
    """Begins the fake group when a script first asks for a mesh. `kept`: functions of c10d as torch has them."""

    def __init__(
        self,
        recorder: Recorder | None,
        size: Callable[[], int],
        has_begun: Callable[[], bool],
        stack: ExitStack,
    ) -> None:
        """`size`: of the script's own group, if that has begun. No `recorder`: of real steps."""
        self.recorder, self.size, self.has_begun, self.stack = recorder, size, has_begun, stack
        self.is_open = False
        self.kept: list[Any] = []

    def keep(self, module: Any, names: Sequence[str]) -> None:
        """Keep functions as they are, for the fake group to be made with."""
        self.kept.append(
            mock.patch.multiple(module, **{name: getattr(module, name) for name in names})
        )

    def answers(self) -> list[Any]:
        """Return the replacements of torch's ways to share weights."""
        is_alone = self.recorder is None
        flat = _refuse("FSDP1") if is_alone else self._flat()
        group = _refuse("groups of its own") if is_alone else _group_of
        return [
            mock.patch.object(DeviceMesh, "__init__", self._mesh()),
            mock.patch.object(FullyShardedDataParallel, "__init__", flat),
            *(mock.patch.object(one, "new_group", group) for one in (distributed, c10d)),
            mock.patch.object(distributed, "recv_object_list", _receive),
            # there is no state of a card's random numbers to keep alike
            mock.patch.object(_dispatch, "is_rng_supported_mesh", return_value=False),
            mock.patch.object(_random, "manual_seed"),
        ]

    def default_group(self) -> Any:
        """Return the replacement of the attribute of c10d that all of torch finds its group by."""
        original: Any = c10d._World.default_pg

        def find(world: Any) -> Any:
            if self.recorder is not None and self.has_begun():
                self._open()
            return original.fget(world)

        return original.getter(find)

    def _open(self) -> None:
        if self.is_open:
            return
        if self.recorder is None:
            raise CannotPlan(SHARED.format("a mesh"))
        self.is_open = True
        self.stack.enter_context(self._world())
        self.stack.enter_context(watch_shards(self.recorder, OrderedWork(ranks=self.size())))

    def _note(self) -> None:
        assert self.recorder is not None
        note = NOTE.format(self.size())
        self.recorder.notes += [note] * (note not in self.recorder.notes)

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
            if not self.has_begun():  # a mesh begins it
                distributed.init_process_group()
            self._open()
            self._note()
            assert self.recorder is not None
            # the numbers of its ranks, which the script's own call has made as a fake tensor
            ranks = [one.tolist() for one in tensors_in((args, options))]
            with of_true_numbers(self.recorder):
                true = iter([torch.tensor(one, device="cpu") for one in ranks])
                args, options = tree_map_only(Tensor, lambda _: next(true), (args, options))
                original(own, DEVICE if device_type == "cuda" else device_type, *args, **options)

        return make

    def _flat(self) -> Callable[..., None]:
        original = FullyShardedDataParallel.__init__

        def on_card(one: Any) -> Any:
            is_card = isinstance(one, torch.device) and one.type == "cuda"
            return torch.device(DEVICE, one.index or 0) if is_card else one

        @functools.wraps(original)
        def share(own: Any, *args: Any, **options: Any) -> None:
            self._note()
            given = {name: on_card(one) for name, one in options.items()}
            original(own, *map(on_card, args), **given)

        return share


def _group_of(
    ranks: Any = None,
    timeout: Any = None,
    backend: Any = None,
    pg_options: Any = None,
    **options: Any,
) -> Any:
    """Make a group of some of the ranks, in the fake backend whatever the one asked for."""
    return _new_group(ranks, timeout, **options)


def _receive(*args: Any, **options: Any) -> None:
    raise CannotPlan(RECEIVED)


def _refuse(way: str) -> Callable[..., Any]:
    def refuse(*args: Any, **options: Any) -> None:
        raise CannotPlan(SHARED.format(way))

    return refuse
