"""Weights that wait on the host and travel to the device one block ahead, in forward and in backward.

A streamed block is entered with copies of its weights in the places of its parameters. At most two blocks of a network
have copies: the one that computes and its neighbour, which is on its way: the next in forward, the one before in
backward. A tensor that autograd saves of a copy, or of a half cast of it, is kept as a note and fetched again when
backward asks. So a copy holds the bytes that were in the parameter, every operator is the one that it would have been,
and gradients are bit-equal. A gradient goes to the host as it is made and is there when the backward is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from mpt.errors import ConfigError
from mpt.memory.recomputing.replay import Recomputed, RecomputedSequence
from mpt.memory.travelling.weight_traffic import Cast, Layout, Stream, in_backward
from mpt.nn.shared.devices import waiting_places
from mpt.nn.shared.mixin import Mixin, mix_in, own_class


@dataclass
class Note:
    """The note kept instead of a saved tensor that is a view of a weight's copy, or of a cast of it."""

    block: Streamed
    parameter: nn.Parameter
    version: int
    cast: Cast | None
    layout: Layout

    def fetch(self) -> Tensor:
        """Return the tensor on the device."""
        if self.parameter._version != self.version:
            raise RuntimeError(
                "memory.stream_weights: a weight was changed between a forward and its backward"
            )
        copies = self.block.stream.bring(self.block)
        whole = copies.tensors[self.parameter] if self.cast is None else copies.cast(self.cast)
        return whole.as_strided(*self.layout)


@dataclass
class Call(TorchDispatchMode):
    """One forward of a block under autograd: follows its weights' copies and casts, and notes the tensors saved of
    them."""

    block: Streamed
    own: Mapping[int, nn.Parameter]
    """The block's weights by the addresses of their copies' storages. No copy itself: hooks hold on to the call."""
    casts: dict[int, Cast] = field(default_factory=dict)
    """By the address of their storage."""

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default:
            parameter = self.own.get(args[0].untyped_storage()._cdata)
            if parameter is not None:
                # casts of a part are made anew for each use anyway
                if args[0].shape == parameter.shape:
                    self.refuse_second_cast(parameter, result)
                storage = result.untyped_storage()
                made = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self.casts[storage._cdata] = Cast(
                    parameter, layout_of(args[0]), function, dict(kwargs or {}), made
                )
        return result

    def refuse_second_cast(self, parameter: nn.Parameter, made: Tensor) -> None:
        """Raise ConfigError if a mode would have cast a weight once for several uses, and added up their gradients
        in half.
        """
        if (
            not parameter.requires_grad
            or made.dtype.itemsize >= parameter.dtype.itemsize
            or in_backward()
        ):
            return
        seen = self.block.stream.traffic.cast_weights
        if parameter in seen:
            raise ConfigError(
                f"memory.stream_weights: a {type(self.block).__name__} runs more than once in a forward, and casts to "
                "half add up its gradients in half then, which weights that travel cannot do to the bit; use "
                "precision=fp32, a mode with weights in half (bf16-pure), or leave the trick out"
            )
        seen.add(parameter)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Keep notes in place of saved weights; the rest is passed on."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        # Not the tensor itself: a graph that holds its own output and is never walked would not be freed.
        pack, unpack = outer if outer is not None else (torch.Tensor.detach, lambda tensor: tensor)

        def note(tensor: Tensor) -> Any:
            storage = tensor.untyped_storage()._cdata
            cast = self.casts.get(storage)
            if cast is not None and cast.made.expired():  # type: ignore[no-untyped-call]
                cast = None
            parameter = cast.parameter if cast is not None else self.own.get(storage)
            if parameter is None:
                return pack(tensor)
            return Note(self.block, parameter, parameter._version, cast, layout_of(tensor))

        def fetch(packed: Any) -> Tensor:
            return packed.fetch() if isinstance(packed, Note) else unpack(packed)

        with saved_tensors_hooks(note, fetch), self:
            yield


class Streamed(Mixin, nn.Module):
    """Mixed in front of a block's class: its weights travel."""

    stream: Stream
    stream_order: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward on copies of its weights."""
        places = list(self.travelling_places())
        if not places:
            return super().forward(*args, **kwargs)
        copies = self.stream.bring(self)
        call = Call(self, copies.addresses()) if torch.is_grad_enabled() else None
        leaves: list[Tensor] = []
        for owner, name, parameter in places:
            value = copies.tensors[parameter]
            if call is not None and parameter.requires_grad:
                value = self.trained(parameter, value)
                leaves.append(value)
            owner._parameters[name] = value  # type: ignore[assignment]
        try:
            if call is None:
                return super().forward(*args, **kwargs)
            with call.noting():
                return super().forward(*args, **kwargs)
        finally:
            for owner, name, parameter in places:
                owner._parameters[name] = parameter
            for leaf in leaves:
                empty(leaf)

    def trained(self, parameter: nn.Parameter, copy: Tensor) -> Tensor:
        """Return a copy as autograd is to see it: a leaf whose gradient goes to the host.

        It is a view, since autocast keeps the casts of other leaves until the forward ends. `view_as` would change the
        strides of sides of one, by which kernels know channels-last weights.
        """
        base = copy.detach()
        leaf = base.as_strided(base.shape, base.stride()).requires_grad_()
        if parameter.grad_dtype != parameter.dtype:
            leaf.grad_dtype = parameter.grad_dtype
        block = self

        def send(leaf: Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            if gradient is not None:
                block.stream.traffic.receive(block, parameter, gradient)

        leaf.register_post_accumulate_grad_hook(send)  # type: ignore[no-untyped-call]
        return leaf

    def travelling_places(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        """Yield the weights that wait on the host: their layer, their name in it, themselves."""
        for owner, name in waiting_places(self):
            parameter = owner._parameters[name]
            if parameter is not None:
                yield owner, name, parameter

    def travelling(self) -> list[nn.Parameter]:
        """Return the weights that wait on the host."""
        return [parameter for _, _, parameter in self.travelling_places()]


def refuse_recomputed_parts(block: nn.Module) -> None:
    """Raise ConfigError if a part of a block is computed again on its own: the block's weights have left by then."""
    for name, part in block.named_modules():
        if name and isinstance(part, Recomputed | RecomputedSequence) and any(waiting_places(part)):
            raise ConfigError(
                f"memory.stream_weights: a {own_class(block).__name__} travels as a whole here, and memory.recompute "
                f"computes its part {name} again on its own; leave one of the two out"
            )


def empty(leaf: Tensor) -> None:
    """Release a leaf's bytes, and those of its base: autograd holds on to it until the backward."""
    blank = torch.empty((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
    assert leaf._base is not None
    leaf._base.data = blank
    leaf.data = blank


def layout_of(tensor: Tensor) -> Layout:
    """Return a tensor's place in its storage."""
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def make_streamed(block: nn.Module, stream: Stream, order: int) -> None:
    """Let a block's weights travel. Its class is swapped, so that a deep copy (an EMA twin) travels on its own."""
    mix_in(block, Streamed)
    block.stream, block.stream_order = stream, order  # type: ignore[assignment]


def settle(block: Streamed) -> None:
    """Take a block's weights to the device for good; the rest of it runs as if it had never been streamed."""
    device = block.stream.traffic.device
    for owner, _, parameter in list(block.travelling_places()):
        parameter.data = parameter.data.to(device)
        for name in ("travelling_names", "weights_travel_to"):
            vars(owner).pop(name, None)
