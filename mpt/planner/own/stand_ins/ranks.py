"""One of several cards in somebody's own step: the answers of torch.distributed, and DistributedDataParallel's buckets.

A script that is started once for each card makes a process group. Inside a plan that makes it the first of as many as
`WORLD_SIZE` or the script itself says, or of two: calls between processes do nothing, and the batch is that of one
card, as the script makes it. A script that makes no group is alone, as ever. DistributedDataParallel keeps flat buckets
of all gradients from its start, in addition to the gradients or in their place (`gradient_as_bucket_view`);
SyncBatchNorm keeps what BatchNorm keeps. NCCL's own buffers lie outside torch's allocator and are not counted. Weights
that are shared out over cards are in `mpt.planner.own.stand_ins.shards`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from mpt.planner.device.card_answers import Inert
from mpt.planner.own.stand_ins.reductions import hooks_called
from mpt.planner.own.stand_ins.shards import Shards
from mpt.planner.trace.recorder import Recorder

NOTE = "DistributedDataParallel is planned as on one of several cards, with its buckets and without NCCL's own buffers"
CALLS = (
    "destroy_process_group barrier monitored_barrier all_reduce reduce broadcast all_gather all_gather_into_tensor "
    "reduce_scatter reduce_scatter_tensor all_gather_object broadcast_object_list"
)
ANSWERED = ("init_process_group", "is_initialized", "get_rank", "get_world_size", "get_backend")
FEWEST = 2


@contextmanager
def one_of_several(recorder: Recorder | None) -> Iterator[None]:
    """Let torch.distributed answer for the first of several processes inside the block, once there is a group.

    `recorder` marks the buckets; None for a real step.
    """
    groups: list[str] = []

    sizes: list[int] = []

    def start(backend: str | None = None, *args: Any, **options: Any) -> None:
        groups.append(backend or "nccl")
        sizes.append(max(0, options.get("world_size", 0)))

    def count(group: Any = None) -> int:
        if isinstance(group, distributed.ProcessGroup):
            return group.size()
        return (sizes[-1] or int(os.environ.get("WORLD_SIZE", FEWEST))) if groups else 1

    answers: dict[str, Any] = {
        **{name: lambda *args, **kwargs: Inert() for name in CALLS.split(" ")},
        "init_process_group": start,
        "is_initialized": lambda: bool(groups),
        "get_rank": lambda group=None: 0,
        "get_world_size": count,
        "get_backend": lambda group=None: groups[-1],
        "get_default_backend_for_device": lambda device: "nccl",
    }
    c10d = distributed.distributed_c10d
    with ExitStack() as stack:
        shards = Shards(recorder, count, lambda: bool(groups), stack)
        shards.keep(distributed, [*CALLS.split(" "), *ANSWERED])
        shards.keep(c10d, ANSWERED)
        shards.keep(c10d._World, ["default_pg"])
        stack.enter_context(mock.patch.multiple(distributed, **answers))
        hooks_called(stack)
        stack.enter_context(
            mock.patch.object(DistributedDataParallel, "__init__", _starts(recorder))
        )
        stack.enter_context(mock.patch.object(DistributedDataParallel, "forward", _forward))
        for name in ("spawn", "start_processes"):
            stack.enter_context(mock.patch.object(torch.multiprocessing, name, _first_process))
        for one in shards.answers():
            stack.enter_context(one)
        for_torch = {name: answers[name] for name in ("init_process_group", "is_initialized")}
        stack.enter_context(mock.patch.multiple(c10d, **for_torch))
        found = shards.default_group()
        stack.enter_context(mock.patch.object(c10d._World, "default_pg", found))
        stack.enter_context(mock.patch.object(nn.SyncBatchNorm, "forward", nn.BatchNorm2d.forward))
        stack.enter_context(
            mock.patch.object(nn.SyncBatchNorm, "_check_input_dim", _any_dimensions)
        )
        yield


def _first_process(
    function: Callable[..., Any], args: tuple[Any, ...] = (), *options: Any, **named: Any
) -> None:
    """Do what the first of several processes would that a script starts."""
    function(0, *args)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.device_ids:  # then it brings inputs to the card
        args, kwargs = tree_map_only(Tensor, lambda one: one.to(self.device), (args, kwargs))
    return self.module(*args, **kwargs)


def _any_dimensions(self: Any, given: Tensor) -> None:
    """Take inputs of two to five dimensions, as SyncBatchNorm does."""


def _starts(recorder: Recorder | None) -> Callable[..., None]:
    def start(
        self: Any,
        module: nn.Module,
        device_ids: Any = None,
        *args: Any,
        gradient_as_bucket_view: bool = False,
        **options: Any,
    ) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.require_backward_grad_sync, self.device_ids = True, device_ids
        self.device = next(module.parameters()).device
        groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
        for weight in module.parameters():
            if weight.requires_grad:
                groups[weight.device, weight.dtype].append(weight)
        self.bucketed = list(groups.values())
        self.buckets = [bucket_of(weights, gradient_as_bucket_view) for weights in self.bucketed]
        if recorder is not None:
            recorder.mark(self.buckets, "reduce buffers")
            recorder.notes += [NOTE] * (NOTE not in recorder.notes)

    return start


def bucket_of(weights: list[nn.Parameter], is_gradient: bool) -> Tensor:
    """Return a flat tensor of as many numbers as weights have; gradients become views of it if asked for."""
    bucket = torch.empty(
        sum(map(nn.Parameter.numel, weights)), dtype=weights[0].dtype, device=weights[0].device
    )
    if is_gradient:
        parts: tuple[Tensor, ...] = torch.split(bucket, [one.numel() for one in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.register_post_accumulate_grad_hook(into(part))  # type: ignore[no-untyped-call]
    return bucket


def into(part: Tensor) -> Callable[[Tensor], None]:
    """Return a hook that puts a gradient into its part of a bucket."""

    def move(weight: Tensor) -> None:
        weight.grad = part.view_as(weight)

    return move
