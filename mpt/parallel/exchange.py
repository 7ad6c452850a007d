"""Gradients summed over the ranks, in buckets, alongside the last backward of an update.

A rank is a micro-batch that runs at the same time: its losses carry their share of the samples already, so gradients
are summed. torch's DistributedDataParallel reduces at every backward and cannot know which of the losses that a phase
yields is the last, so the buckets are filled here: hooks on the weights send a bucket as soon as its gradients are
whole, during the backward that was the last one of the update before. If that guess was wrong on any rank, all
ranks send all buckets again.

Every rank sends every bucket in every update exactly once, in one order, whatever happened to it meanwhile: a rank that
failed sends zeros. So no rank waits for a bucket that does not come, and the failure is reported afterwards, at the one
point where ranks agree (`mpt.parallel.ranks.Ranks.agree`).

Costs the gradients' size in buckets, like DistributedDataParallel without `gradient_as_bucket_view`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mpt.errors import ConfigError

Send = Callable[[Tensor], Any]
"""Starts summing a tensor over the ranks in place; the result has a `wait`."""


@dataclass
class Bucket:
    """Some weights, and the buffer from which their gradients are sent."""

    weights: list[nn.Parameter]
    buffer: Tensor
    views: list[Tensor]
    awaited: set[int] = field(default_factory=set)
    """Positions of the weights whose gradient has not come in this backward."""
    sent: Any = None


class Exchange:
    """Sums the gradients of one phase's weights. Call `begin`, `before_backward` for each loss, then `send_rest`."""

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        send: Send,
        bucket_bytes: float,
        dtype: torch.dtype | None,
        overlaps: bool,
        waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.weights, self.send, self.overlaps = list(weights), send, overlaps
        self.waiting = waiting
        """Returns a context in which this rank waits for the others."""
        self.buckets = make_buckets(self.weights, bucket_bytes, dtype)
        self.where = {
            weight: (number, position)
            for number, bucket in enumerate(self.buckets)
            for position, weight in enumerate(bucket.weights)
        }
        self.moved: set[Tensor] = set()
        """Weights whose gradient the current backward has reached."""
        self.moved_last: set[Tensor] = set()
        """Those that the last backward of the update before reached: the others are not waited for in it."""
        self.expected: tuple[int, int] | None = None
        """Micro-batches and backwards of the update before."""
        self.parts = self.backwards = 0
        self.is_active = self.is_last = self.guessed_wrong = False
        self.awaits_weights = 0
        """How many sums of the losses' weights are to be sent before the gradients."""
        self.device = next((weight.device for weight in self.weights), torch.device("cpu"))
        self.sent_in_backward = 0
        """Buckets that were on their way before the last backward of this update was done."""
        if overlaps:
            for weight in self.weights:
                weight.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def begin(self, weights: int = 0) -> None:
        """Begin an update. Of normalised losses that many sums of `weights` are sent before the gradients."""
        self.parts = self.backwards = self.sent_in_backward = 0
        self.awaits_weights = weights
        self.is_active, self.is_last, self.guessed_wrong = True, False, False
        for bucket in self.buckets:
            bucket.sent = None
            bucket.awaited = {
                n for n, weight in enumerate(bucket.weights) if weight in self.moved_last
            }

    def before_backward(self) -> None:
        """Count a backward; in the last one, gradients leave as they come."""
        self.backwards += 1
        self.moved.clear()
        self.is_last = (
            self.overlaps
            and not self.awaits_weights
            and self.expected == (self.parts, self.backwards)
        )

    def _arrived(self, weight: Tensor) -> None:
        if not self.is_active:  # another phase trains these weights too
            return
        self.moved.add(weight)
        number, position = self.where[weight]  # type: ignore[index]
        if self.buckets[number].sent is not None:
            self.guessed_wrong = True  # this gradient left before it was whole
            return
        if not self.is_last:
            return
        self.buckets[number].awaited.discard(position)
        for bucket in self.buckets:  # in one order on every rank
            if bucket.sent is None:
                if bucket.awaited:
                    return
                self._send(bucket)
                self.sent_in_backward += 1

    @torch.no_grad()
    def _send(self, bucket: Bucket, as_zeros: bool = False) -> None:
        if as_zeros:
            bucket.buffer.zero_()
        else:
            gradients = [weight.grad for weight in bucket.weights]
            for gradient, view in zip(gradients, bucket.views, strict=True):
                if gradient is None:
                    view.zero_()
            copy_each(bucket.views, gradients)
        bucket.sent = self.send(bucket.buffer)

    def add_weight(self, weight: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        """Return the sums over the ranks of the losses' weights and of the samples that have them; all must call."""
        self.awaits_weights -= 1
        own = torch.stack(
            [weight.detach().double(), torch.full_like(weight, float(samples), dtype=torch.float64)]
        )
        with self.waiting():
            self.send(own).wait()
        total, count = own.unbind()
        return total.to(weight.dtype), count.to(weight.dtype)

    def send_rest(self, failed: bool) -> None:
        """Send the buckets that have not left yet; zeros if this rank's update failed."""
        while self.awaits_weights:
            self.add_weight(torch.zeros((), device=self.device), 0)
        self.is_active = self.is_last = False
        for bucket in self.buckets:
            if bucket.sent is None:
                self._send(bucket, failed)

    def refuse_sparse(self) -> None:
        """Raise ConfigError for gradients that cannot be put in a bucket."""
        if any(weight.grad is not None and weight.grad.is_sparse for weight in self.weights):
            raise ConfigError(
                "a layer makes sparse gradients (an embedding with sparse=True), which are not summed over processes; "
                "train in one process, or set sparse=False in the model"
            )

    def send_again(self) -> None:
        """Send all buckets again, after those on their way have come."""
        self.wait()
        for bucket in self.buckets:
            self._send(bucket)

    def wait(self) -> None:
        """Wait for all buckets; on a GPU, let its stream wait."""
        for bucket in self.buckets:
            bucket.sent.wait()

    def with_gradients(self) -> list[bool]:
        """Return which weights have a gradient on this rank."""
        return [weight.grad is not None for weight in self.weights]

    @torch.no_grad()
    def finish(self, somewhere: Sequence[bool]) -> None:
        """Put the sums into the gradients. `somewhere` says which weights have one on any rank."""
        self.expected = self.parts, self.backwards
        self.moved_last = set(self.moved)
        has_gradient = dict(zip(self.weights, somewhere, strict=True))
        for bucket in self.buckets:
            copy_each([weight.grad for weight in bucket.weights], bucket.views)
            for weight, view in zip(bucket.weights, bucket.views, strict=True):
                if weight.grad is None and has_gradient[weight]:
                    weight.grad = view.to(weight.grad_dtype or weight.dtype, copy=True)


def copy_each(targets: Sequence[Tensor | None], sources: Sequence[Tensor | None]) -> None:
    """Copy tensors to those at their places, in one launch on a GPU; leave out places with none."""
    pairs = [
        (one, other)
        for one, other in zip(targets, sources, strict=True)
        if one is not None and other is not None
    ]
    if pairs:
        torch._foreach_copy_([one for one, _ in pairs], [other for _, other in pairs])


def make_buckets(
    weights: Sequence[nn.Parameter], bucket_bytes: float, dtype: torch.dtype | None
) -> list[Bucket]:
    """Return buckets of about that size, the last weights first: backward reaches them first."""
    groups: list[list[nn.Parameter]] = []
    kind: tuple[torch.device, torch.dtype] | None = None
    size = 0
    for weight in reversed(weights):
        own = weight.device, dtype or weight.grad_dtype or weight.dtype
        if own != kind or size >= bucket_bytes:
            groups.append([])
            kind, size = own, 0
        groups[-1].append(weight)
        size += weight.numel() * own[1].itemsize
    buckets = []
    for group in groups:
        kept = dtype or group[0].grad_dtype or group[0].dtype
        buffer = torch.zeros(
            sum(weight.numel() for weight in group), dtype=kept, device=group[0].device
        )
        pieces = torch.split(buffer, [weight.numel() for weight in group])
        buckets.append(
            Bucket(
                group, buffer, [piece.view(w.shape) for piece, w in zip(pieces, group, strict=True)]
            )
        )
    return buckets
