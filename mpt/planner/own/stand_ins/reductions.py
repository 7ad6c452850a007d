"""Communication hooks of DistributedDataParallel (`register_comm_hook`), executed on its buckets as on one card.

A hook is called for each bucket as soon as all of its gradients are there: weights in reverse order, 1 MiB in the first
bucket and 25 in others. What it compresses into, until the backward pass ends, and keeps is planned (PowerSGD keeps as
much as all gradients); the exchange inside does nothing. PowerSGD begins at once, by default it does after 1,000 steps.

Source: torch/nn/parallel/distributed.py and torch/distributed/algorithms/ddp_comm_hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from mpt.planner.device.card_answers import Inert

MIB = 1 << 20
FIRST_BYTES, BUCKET_BYTES = MIB, 25 * MIB


class Exchanged(Inert):
    """An exchange that is already over, and its future: callbacks are executed at once."""

    def __init__(self, result: Any = None, before: Exchanged | None = None) -> None:
        self.result, self.before = result, before

    def get_future(self) -> Exchanged:
        return self

    def value(self) -> Any:
        return self.result

    def wait(self, *options: Any) -> Any:
        return self.result

    def then(self, function: Callable[[Exchanged], Any]) -> Exchanged:
        return Exchanged(function(self), self)

    def done(self) -> bool:
        return True


def exchange(tensor: Any = None, *others: Any, **options: Any) -> Exchanged:
    """Return the end of an exchange that leaves a tensor as it is."""
    return Exchanged([tensor])


class Bucket:
    """A part of all gradients, with the methods of torch's GradBucket."""

    def __init__(self, number: int, weights: Sequence[nn.Parameter], flat: Tensor) -> None:
        self.number, self.weights, self.flat = number, weights, flat
        self.is_last_one = False
        self.missing = len(weights)

    def index(self) -> int:
        return self.number

    def buffer(self) -> Tensor:
        return self.flat

    def set_buffer(self, flat: Tensor) -> None:
        """Replace the numbers by others of the same shape."""
        self.flat = flat

    def gradients(self) -> list[Tensor]:
        """Return views of the numbers in the shapes of the weights."""
        parts = torch.split(self.flat, [one.numel() for one in self.weights])
        return [part.view_as(one) for part, one in zip(parts, self.weights, strict=True)]

    def parameters(self) -> list[nn.Parameter]:
        return list(self.weights)

    def is_last(self) -> bool:
        return self.is_last_one


def divided(weights: Sequence[nn.Parameter], flat: Tensor) -> list[Bucket]:
    """Return the buckets of weights of one dtype, of which `flat` has all numbers."""
    buckets: list[Bucket] = []
    members: list[nn.Parameter] = []
    begin = size = 0
    for place, weight in enumerate(reversed(weights)):
        members.append(weight)
        size += weight.numel()
        most = BUCKET_BYTES if buckets else FIRST_BYTES
        if size * weight.itemsize >= most or place == len(weights) - 1:
            buckets.append(Bucket(len(buckets), members, flat[begin : begin + size]))
            members, begin, size = [], begin + size, 0
    if buckets:
        buckets[-1].is_last_one = True
    return buckets


def register(self: Any, state: object, hook: Callable[[Any, Any], Any]) -> None:
    """Call a hook for each bucket whose gradients are all there."""
    begin = getattr(state, "start_powerSGD_iter", None)
    if begin is not None:
        state.iter = max(begin, state.iter)  # type: ignore[attr-defined]
    parts = [divided(*one) for one in zip(self.bucketed, self.buckets, strict=True)]
    count = sum(map(len, parts))
    under_way: list[Any] = []

    def called(bucket: Bucket) -> Callable[[Tensor], None]:
        def call(weight: Tensor) -> None:
            bucket.missing -= self.require_backward_grad_sync
            if bucket.missing:
                return
            bucket.missing = len(bucket.weights)
            with torch.no_grad():
                under_way.append(hook(state, bucket))
            if len(under_way) == count:
                under_way.clear()

        return call

    for bucket in chain.from_iterable(parts):
        call = called(bucket)
        for weight in bucket.weights:
            weight.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]


def hooks_called(stack: ExitStack) -> None:
    """Let DistributedDataParallel take hooks and uneven inputs (`join`) while the stack is open."""
    for owner, name, own in (
        (DistributedDataParallel, "register_comm_hook", register),
        (Join, "__init__", lambda self, *args, **options: None),
        (Join, "__enter__", lambda self: None),
        (Join, "__exit__", lambda self, *exception: None),
        (Join, "notify_join_context", staticmethod(lambda joinable: None)),
        (distributed, "all_reduce", exchange),
    ):
        stack.enter_context(mock.patch.object(owner, name, own))
