"""Copies of weights between host and device: present copies, copies in flight, and gradients on their way back.

On CUDA copies run on a stream of their own, from pinned memory. Their memory is allocated on the computing stream and
waits for the copies that have begun, so that it can reuse memory of the block before.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.multiprocessing.reductions import StorageWeakRef

from mpt.accelerator import copies_beside

Layout = tuple[torch.Size, tuple[int, ...], int]
"""Size, stride and offset in a storage."""


class Block(Protocol):
    """A module whose weights travel (`mpt.memory.travelling.streaming.Streamed`)."""

    stream_order: int

    def travelling(self) -> list[nn.Parameter]:
        """Return the weights that wait on the host."""


class Copies:
    """Copies of a block's weights on the device, and their sources."""

    arrived: Any = None
    """The event after which they are there, until the computing stream has waited for it."""

    def __init__(self, parameters: list[nn.Parameter], traffic: Traffic) -> None:
        self.traffic, self.fake = traffic, detect_fake_mode()
        self.sources = [(p, p._version, p.untyped_storage()._cdata) for p in parameters]
        self.casts: dict[Cast, Tensor] = {}
        self.tensors, self.arrived = traffic.send(parameters)

    def is_current(self) -> bool:
        """Whether the weights are unchanged since they were copied."""
        return self.fake is detect_fake_mode() and all(
            p._version == version and p.untyped_storage()._cdata == storage
            for p, version, storage in self.sources
        )

    def addresses(self) -> dict[int, nn.Parameter]:
        """Return the weights by the addresses of their copies' storages."""
        return {
            copy.untyped_storage()._cdata: parameter for parameter, copy in self.tensors.items()
        }

    def wait(self) -> None:
        """Let the computing stream wait until the copies are there."""
        if self.arrived is not None:
            torch.accelerator.current_stream(self.traffic.device).wait_event(self.arrived)
            self.arrived = None

    def __del__(self) -> None:
        """Free memory that copies still write only behind them: nobody may have asked for the weights that came."""
        if not sys.is_finalizing():
            self.wait()

    def cast(self, cast: Cast) -> Tensor:
        """Return a cast of a copy, made once for all that was saved of it."""
        if cast not in self.casts:
            size, stride, offset = cast.layout
            with torch.no_grad():
                source = self.tensors[cast.parameter].as_strided(size, stride, offset)
                self.casts[cast] = cast.function(source, **cast.settings)
        return self.casts[cast]


@dataclass(eq=False)
class Cast:
    """A cast of a weight in a forward, which can be repeated."""

    parameter: nn.Parameter
    layout: Layout
    function: Callable[..., Tensor]
    settings: Mapping[str, Any]
    made: StorageWeakRef
    """Its result, whose address means nothing once that is gone."""


class Traffic:
    """Copies between host and device for all networks of a run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self.gradients: dict[nn.Parameter, Tensor] = {}
        """Gradients that the backward under way has brought so far."""
        self.leaving: list[tuple[Block, Tensor, Any]] = []
        """Gradients whose copies to the host may be under way."""
        self.is_delivering = False
        self.cast_weights: set[nn.Parameter] = set()
        """The trained weights that were cast to half in the forward under way."""
        self._side: Any = None

    def __deepcopy__(self, memo: Any) -> Traffic:
        return self

    @property
    def side(self) -> Any:
        """The stream of the copies on a device that has streams; None for others and fakes, which copy in line."""
        if not copies_beside(self.device):
            return None
        if self._side is None:
            self._side = torch.Stream(self.device)
        return self._side

    def send(self, parameters: list[nn.Parameter]) -> tuple[dict[nn.Parameter, Tensor], Any]:
        """Begin to copy weights to the device; return the copies, and the event after which they are there."""
        side = self.side
        if side is None:
            return {p: p.detach().to(self.device, copy=True) for p in parameters}, None
        copies = {
            p: torch.empty_like(p, device=self.device, requires_grad=False) for p in parameters
        }
        side.wait_stream(torch.accelerator.current_stream(self.device))
        with side:
            for parameter, copy in copies.items():
                if not parameter.is_pinned():  # built, loaded or cast since
                    parameter.data = parameter.data.pin_memory()
                copy.copy_(parameter.detach(), non_blocking=True)
        return copies, side.record_event()

    def receive(self, block: Block, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Take a gradient to the host. Called by autograd, which adds up the gradients of several calls of a block."""
        if not self.is_delivering:
            self.is_delivering = True
            torch.autograd.Variable._execution_engine.queue_callback(self.deliver)
        self.let_go(block)
        side = self.side
        if side is None:
            arrived, event = gradient.to("cpu", copy=True), None
        else:
            arrived = torch.empty_like(gradient, device="cpu", pin_memory=True)
            side.wait_stream(torch.accelerator.current_stream(self.device))
            with side:
                arrived.copy_(gradient, non_blocking=True)
            event = side.record_event()
        self.leaving.append((block, gradient, event))
        before = self.gradients.get(parameter)
        if before is not None:
            self.synchronise()
            arrived = before.add_(arrived)
        self.gradients[parameter] = arrived

    def let_go(self, block: Block | None = None) -> None:
        """Release gradients of other blocks on the device, once their copies are made."""
        for other, _, event in self.leaving:
            if other is not block and event is not None:
                torch.accelerator.current_stream(self.device).wait_event(event)
        self.leaving = [one for one in self.leaving if one[0] is block]

    def deliver(self) -> None:
        """At the end of a backward: give the parameters their gradients, which are whole now."""
        self.let_go()
        self.synchronise()
        gradients, self.gradients, self.is_delivering = self.gradients, {}, False
        with torch.no_grad():
            for parameter, gradient in gradients.items():
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.add_(gradient)
        self.cast_weights.clear()
        self.release()

    def synchronise(self) -> None:
        """Wait until everything under way has arrived."""
        side = self.side
        if side is not None:
            side.synchronize()

    def release(self) -> None:
        """Release every copy on the device."""
        for stream in self.streams:
            stream.release()

    def forget(self) -> None:
        """Discard the gradients of a backward that failed."""
        self.synchronise()
        self.gradients, self.leaving, self.is_delivering = {}, [], False
        self.release()


class Stream:
    """The streamed blocks of one network, and which of them have copies on the device."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.blocks: dict[int, weakref.ref[Block]] = {}
        """The blocks by their order, as they are met."""
        self.here: dict[int, Copies] = {}
        traffic.streams.add(self)

    def __deepcopy__(self, memo: Any) -> Stream:
        return memo.setdefault(id(self), Stream(self.traffic))  # type: ignore[no-any-return]

    def bring(self, block: Block) -> Copies:
        """Return a block's copies; all others leave, and the neighbour's set out."""
        order = block.stream_order
        self.blocks[order] = weakref.ref(block)
        following = order - 1 if in_backward() else order + 1
        self.release(order, following)
        copies = self.here.get(order)
        if copies is None or not copies.is_current():
            self.release(following)
            copies = self.here[order] = Copies(block.travelling(), self.traffic)
        copies.wait()
        neighbour = self.blocks[following]() if following in self.blocks else None
        if neighbour is not None and following not in self.here:
            self.here[following] = Copies(neighbour.travelling(), self.traffic)
        return copies

    def release(self, *kept: int) -> None:
        """Release copies on the device but for these."""
        for order in [one for one in self.here if one not in kept]:
            del self.here[order]


def in_backward() -> bool:
    """Return whether autograd is walking a graph: a forward now is recomputation."""
    return bool(torch._C._current_graph_task_id() >= 0)
