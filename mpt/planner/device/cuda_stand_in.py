"""A stand-in for `torch.cuda` on a machine without a GPU: the fake device while a step is planned.

A configuration's parts take their device as an argument. A training script of somebody else names it: `.cuda()`,
`device="cuda"`, `torch.autocast("cuda")`, `torch.cuda.is_available()`. Inside `cuda_stands_in` these mean the fake
device, and a script's questions about the card (its name, its memory, whether it has bfloat16) are answered for the GPU
that is planned for. Its streams and events do nothing. Calls that need a real card still raise, recorded graphs too but
in a plan.

The doctor takes real steps of such scripts with the CPU in its place.

A script that asks for a tensor's device is given `cuda`, since many branch on its type; torch itself is given the
target.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils, checkpoint

from mpt.outside.own_code import is_in
from mpt.planner.device.card_answers import Inert, questions_answered
from mpt.planner.device.fake_device import DEVICE
from mpt.planner.device.kept_modes import KeptInBackward
from mpt.planner.device.tensor_types import TypeNames
from mpt.planner.facts.gpus import Gpu

FOREACH = "_foreach_supported_types"
OWN = ("mpt.planner", "mpt.doctor", "mpt.precision", "mpt.engine", "mpt.nn", "mpt.memory")
NAME = re.compile(r"(cuda|cpu)(:\d+)?")
BY_NUMBER = (Tensor.to, torch._C._nn._parse_to)
"""Functions of which a bare number among the arguments is a card's: those of a tensor and of a module."""


class CudaStandIn(KeptInBackward):
    """Sends tensors that are wanted on `cuda` to the device in its place; `is_used` says whether there were any."""

    def __init__(self, target: torch.device, all_of_it: bool = False) -> None:
        """`all_of_it`: tensors that are wanted on `cpu` by name are put there too."""
        super().__init__()
        self.target = target
        self.kinds = ("cuda", "cpu") if all_of_it else ("cuda",)
        self.named = (
            torch.device("cuda", 0) if target.type in (DEVICE, "cpu") and not all_of_it else None
        )
        """The device that a script sees in the place of the target."""
        self.is_used = False
        self.autocasts = 0
        """How often the script made an autocast, be it on or off."""
        self.types = TypeNames(lambda: self.translate("cuda"))
        self._special: dict[Any, Callable[..., Any]] = {
            torch.device: self._device,
            Tensor.cuda: self._move,
            Tensor.type: self.types.convert,
            Tensor.is_cuda.__get__: lambda tensor: tensor.device.type == target.type,  # type: ignore[attr-defined]
            Tensor.pin_memory: lambda tensor, device=None: tensor,
            Tensor.record_stream: lambda tensor, stream: None,
            Tensor.is_pinned: lambda tensor, device=None: False,
        }

    def handle(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function on the device that stands in."""
        special = self._special.get(func)
        if special is not None:
            return special(*args, **kwargs)
        args = [self.translate(one) for one in args]
        if func in BY_NUMBER:
            args = [self._numbered(one) for one in args]
        if getattr(kwargs.get("generator"), "is_of_card", False) and self.target.type != "cpu":
            del kwargs["generator"]  # there are no numbers to draw
        return func(*args, **{name: self._named(name, value) for name, value in kwargs.items()})

    def translate(self, value: Any) -> Any:
        """Return the target for a name of `cuda` or such a device, and everything else as it is."""
        if isinstance(value, str):
            kind = value.partition(":")[0] if NAME.fullmatch(value) else ""
        elif isinstance(value, torch.device):
            kind = value.type
        else:  # a placeholder of torch.fx may not be asked for more
            return value
        if kind in self.kinds:
            self.is_used = True
            return self.target
        if kind == DEVICE:  # of `torch.accelerator`
            self.is_used = True
        return value

    def _named(self, name: str, value: Any) -> Any:
        if name == "pin_memory":
            return False
        return self._numbered(value) if name == "device" else self.translate(value)

    def _numbered(self, value: Any) -> Any:
        """Translate a device, which as a bare number is a card's."""
        return self.translate(f"cuda:{value}" if type(value) is int else value)

    def _device(self, *args: Any, **kwargs: Any) -> torch.device:
        if args and type(args[0]) is int:
            args = (f"cuda:{args[0]}", *args[1:])
        is_card = self.translate(args[0] if args else kwargs.get("type")) is self.target
        if is_card and not (self.named and is_asked_by_script(sys._getframe(1))):
            return self.target
        return torch.device(*args, **kwargs)

    @contextmanager
    def named_devices(self) -> Iterator[None]:
        """Let a script see its tensors on `cuda` inside the block, and torch on the target."""
        kind: Any = FakeTensor if self.target.type == DEVICE else Tensor
        own: Any = kind.device
        get: Any = own.fget if isinstance(own, property) else own.__get__

        def device_of(tensor: Any) -> Any:
            device = get(tensor)
            frame = sys._getframe(1)
            while frame.f_code.co_name == "__torch_function__" and frame.f_back:  # of a subclass
                frame = frame.f_back
            is_asked = _place_of(frame.f_code.co_filename) == "script"
            # in an operator's own rule for fake tensors nothing translates the name back
            return (
                self.named if is_asked and device == self.target and self._is_in_force() else device
            )

        seen = property(device_of, getattr(own, "fset", None)) if self.named else own
        with mock.patch.object(kind, "device", seen):
            yield

    def _is_in_force(self) -> bool:
        """Whether calls of torch's functions come here now."""
        depths = range(torch._C._len_torch_function_stack())
        return any(torch._C._get_function_stack_at(depth) is self for depth in depths)

    def _move(
        self, tensor: Tensor, device: Any = None, non_blocking: bool = False, **options: Any
    ) -> Tensor:
        place = self.translate("cuda")  # a subclass's own `to` is not asked by `cuda` either
        return Tensor.to(tensor, place, non_blocking=non_blocking, **options)


def is_asked_by_script(frame: FrameType | None) -> bool:
    """Return whether the innermost frame outside the planner, of a frame and its callers, is not torch's.

    Modes that hand a call on, such as that of `with torch.device(...)`, do not count.
    """
    while frame is not None:
        place = _place_of(frame.f_code.co_filename)
        if place and frame.f_code.co_name != "__torch_function__":
            return place == "script"
        frame = frame.f_back
    return False


@functools.cache
def _place_of(path: str) -> str:
    return "torch" if is_in(path, "torch") else "" if is_in(path, *OWN) else "script"


class Generator(torch.Generator):
    """Random numbers of a device that is not there: those of the host."""

    is_of_card: bool

    def __new__(cls, device: Any = "cpu") -> Self:
        """Return a generator for the host, whatever the device."""
        own = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        own.is_of_card = torch.device(device or "cpu").type != "cpu"
        return own


@contextmanager
def cuda_stands_in(
    gpu: Gpu, target: torch.device | None = None, all_of_it: bool = False
) -> Iterator[CudaStandIn]:
    """Let `cuda` mean another device inside the block: the fake one, which must be registered, if none is named.

    `all_of_it`: so does `cpu` if a script names it, as one does that found no GPU.
    """
    target = target or torch.device(DEVICE, 0)
    stand_in = CudaStandIn(target, all_of_it)
    replaced: list[Any] = [
        mock.patch.object(
            torch.cuda.amp.common, "amp_definitely_not_available", return_value=False
        ),
        mock.patch.object(torch.amp.autocast_mode.autocast, "__init__", _autocast_on(stand_in)),
        mock.patch.object(torch, "Generator", Generator),
        mock.patch.object(torch.Tensor, "_make_wrapper_subclass", _wrapped_on(stand_in)),
        mock.patch.object(torch, "get_device_module", _module_of(stand_in)),
        mock.patch.object(torch.cuda.nvtx, "_nvtx", Inert()),
        mock.patch.object(nn.DataParallel, "scatter", _to_one_device),
        # Optimizers and clipping go by the type of tensors, and would take another path for fakes than on a card.
        *(
            mock.patch.object(one, FOREACH, [*getattr(one, FOREACH), FakeTensor])
            for one in (optimizer, _foreach_utils)
        ),
    ]
    for one in replaced:
        one.start()
    try:
        with (
            questions_answered(gpu, target),
            stand_in.types.in_force(all_of_it),
            stand_in.named_devices(),
            stand_in,
        ):
            yield stand_in
    finally:
        for one in reversed(replaced):
            one.stop()


def _to_one_device(
    self: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Move what `nn.DataParallel` is called with to the one device; its own function asks CUDA itself."""
    move = functools.partial(torch.utils._pytree.tree_map_only, Tensor, lambda one: one.cuda())
    return (move(inputs),), (move(kwargs),)


def _module_of(stand_in: CudaStandIn) -> Callable[..., Any]:
    """Return the function by which a script finds `torch.cuda`, and torch the module of the fake device."""
    original = torch.get_device_module

    def find(device: Any = None) -> Any:
        is_card = device is None or stand_in.translate(device) == stand_in.target
        return torch.cuda if is_card and is_asked_by_script(sys._getframe(1)) else original(device)

    return find


def _wrapped_on(stand_in: CudaStandIn) -> Callable[..., Tensor]:
    original = torch.Tensor._make_wrapper_subclass

    def make(*args: Any, **options: Any) -> Tensor:
        """Make a tensor of a class that holds others, on the device that stands in for theirs."""
        options = {name: stand_in.translate(one) for name, one in options.items()}
        made: Tensor = original(*args, **options)
        return made

    return make


def _autocast_on(stand_in: CudaStandIn) -> Callable[..., None]:
    original = torch.amp.autocast_mode.autocast.__init__

    def start(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        # what is computed again for a backward pass is so in the precision that it had
        caller = sys._getframe(1).f_globals.get("__name__")
        stand_in.autocasts += caller != checkpoint.__name__
        device = stand_in.translate(device_type)
        original(self, device.type if isinstance(device, torch.device) else device, *args, **kwargs)

    return start
