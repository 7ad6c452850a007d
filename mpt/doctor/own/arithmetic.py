"""The arithmetic of somebody else's step, changed from outside: autocast, loss scale, half weights, single modules.

The script is not edited. Its own `torch.autocast` and `torch.amp.GradScaler` are followed, with float16 in autocast
where the script names no dtype, as on a GPU; a float32 step for comparison is the same script with autocast off, the
loss scale 1 and every half dtype that it asks for taken as float32. The scale is one number for the step, so that the
largest one at which gradients are finite can be looked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from mpt.doctor.measuring.measured_step import moved, moved_input
from mpt.nn.shared.named_modules import module_at
from mpt.precision.shared.float32_modules import cast_floating, keep_in_float32

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Arithmetic:
    """How a step is computed."""

    dtype: torch.dtype | None = None
    """float32 for the step to compare with; the dtype of every autocast; or None, as the script has it."""
    adds_autocast: bool = False
    """Autocast around forward and loss, which the script does not have."""
    adds_scaler: bool = False
    """The loss times `scale`, and gradients divided by it, which the script does not have."""
    scale: float | None = None
    """None for the initial scale of the script's own scaler."""
    float32_modules: tuple[str, ...] = ()
    only_networks: torch.dtype | None = None
    """A dtype for autocast around the networks alone, whose outputs become float32: losses are outside of it."""
    moved: float = 0.0
    """Share of itself by which each weight and input is moved, at most."""

    @property
    def is_reference(self) -> bool:
        """Whether it is the float32 step."""
        return self.dtype == torch.float32

    def describe(self, forms: Sequence[str] = ()) -> str:
        """Return in words how a step is computed, with some formulas by stable forms."""
        name = str(self.dtype or "as it is").removeprefix("torch.")
        words = [
            f"{name} with autocast added" if self.adds_autocast else name,
            "weights and inputs moved by rounding" if self.moved else "",
            f"a loss scale of {self.scale:g}" if self.scale else "",
            f"{', '.join(self.float32_modules)} in float32" if self.float32_modules else "",
            f"{', '.join(forms)} by a stable form" if forms else "",
            "the loss in float32" if self.only_networks else "",
        ]
        return ", ".join(one for one in words if one)


@dataclass
class Seen:
    """What a script was seen to use."""

    autocast: set[torch.dtype] = field(default_factory=set)
    """Dtypes of autocasts that were on."""
    half_weights: set[torch.dtype] = field(default_factory=set)
    """Half dtypes of trained weights."""
    has_scaler: bool = False
    scale: float = 1.0
    """The loss scale in force."""
    initial_scale: float | None = None
    """The one that the script's own scaler begins with."""
    asked: set[torch.dtype] = field(default_factory=set)
    """Half dtypes of autocasts in a float32 step, which were off."""
    named: set[torch.dtype] = field(default_factory=set)
    """Half dtypes that were otherwise asked for in it, perhaps without being computed in."""

    @property
    def dtype(self) -> torch.dtype:
        """The lowest precision that is computed in; float16 if there are several."""
        halves = self.autocast | self.half_weights
        return next((one for one in HALVES if one in halves), torch.float32)


NAMED = {Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}
"""Functions that have a half dtype in their names."""


class InFloat32(TorchFunctionMode):
    """Takes every half dtype that is asked for as float32."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NAMED:
            self.raised(NAMED[func])
            func = Tensor.float
        named = {name: self.raised(value) for name, value in (kwargs or {}).items()}
        return func(*[self.raised(value) for value in args], **named)

    def raised(self, value: Any) -> Any:
        """Return float32 for a half dtype, and everything else as it is."""
        if not isinstance(value, torch.dtype) or value not in HALVES:
            return value
        self.seen.named.add(value)
        return torch.float32


class LossScale:
    """A GradScaler's work at one scale that does not move, in place of the methods of torch's."""

    def __init__(
        self, how: Arithmetic, seen: Seen, on_skipped: Callable[[Optimizer], None]
    ) -> None:
        self.how, self.seen, self.on_skipped = how, seen, on_skipped
        self._unscaled: set[int] = set()
        self.values: dict[int, float] = {}
        """id(scaled loss) -> the loss."""

    def methods(self) -> dict[str, Any]:
        """Return replacements for methods of `torch.amp.GradScaler`."""
        return {
            "scale": lambda scaler, outputs: self.scaled(scaler, outputs),
            "unscale_": lambda scaler, optimizer: self.unscale(scaler, optimizer),
            "step": lambda scaler, optimizer, *args, **kwargs: self.step(
                scaler, optimizer, *args, **kwargs
            ),
            "update": lambda scaler, new_scale=None: self._unscaled.clear(),
        }

    def scaled(self, scaler: Any, outputs: Any) -> Any:
        """Return losses times the scale."""
        if not scaler.is_enabled():
            return outputs
        self.seen.has_scaler = True
        self.seen.initial_scale = self.seen.initial_scale or float(scaler._init_scale)
        wanted = scaler._init_scale if self.how.scale is None else self.how.scale
        self.seen.scale = 1.0 if self.how.is_reference else float(wanted)

        def scale(loss: Tensor) -> Tensor:
            result: Tensor = loss * self.seen.scale
            self.values[id(result)] = float(loss.detach().float().sum())
            return result

        return tree_map(scale, outputs)

    def unscale(self, scaler: Any, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale."""
        if scaler.is_enabled() and id(optimizer) not in self._unscaled:
            self._unscaled.add(id(optimizer))
            for gradient in gradients_of(optimizer):
                gradient.div_(self.seen.scale)

    def step(self, scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step if gradients are finite, as torch's does."""
        self.unscale(scaler, optimizer)
        if not scaler.is_enabled() or all(
            bool(torch.isfinite(one).all()) for one in gradients_of(optimizer)
        ):
            return optimizer.step(*args, **kwargs)
        self.on_skipped(optimizer)
        return None


@dataclass
class Scope:
    """Whether a network is running."""

    is_inside: bool = False


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients that an optimizer would use; a sparse one's values."""
    found = [
        one.grad
        for group in optimizer.param_groups
        for one in group["params"]
        if one.grad is not None
    ]
    return [one._values() if one.is_sparse else one for one in found]


@contextmanager
def arithmetic(
    how: Arithmetic, seen: Seen, device: torch.device, on_skipped: Callable[[Optimizer], None]
) -> Iterator[tuple[LossScale, Scope]]:
    """Compute a script's calls by an arithmetic inside the block."""
    scope = Scope()
    scale = LossScale(how, seen, on_skipped)
    with ExitStack() as stack:
        if how.is_reference:
            mode = stack.enter_context(InFloat32(seen))
            set_dtype = torch.set_default_dtype
            replaced = mock.patch.object(
                torch, "set_default_dtype", lambda dtype: set_dtype(mode.raised(dtype))
            )
            stack.enter_context(replaced)
        start = _autocast_start(how, seen, device, scope)
        stack.enter_context(mock.patch.object(torch.amp.autocast_mode.autocast, "__init__", start))
        stack.enter_context(
            mock.patch.multiple(torch.amp.grad_scaler.GradScaler, **scale.methods())
        )
        yield scale, scope


def _autocast_start(
    how: Arithmetic, seen: Seen, device: torch.device, scope: Scope
) -> Callable[..., None]:
    original = torch.amp.autocast_mode.autocast.__init__

    def start(
        self: Any,
        device_type: Any,
        dtype: Any = None,
        enabled: bool = True,
        cache_enabled: Any = None,
    ) -> None:
        kind = device_type.type if isinstance(device_type, torch.device) else device_type
        chosen = dtype or torch.get_autocast_dtype(kind)
        if kind == "cuda":
            kind = device.type
        if how.is_reference or (how.only_networks is not None and not scope.is_inside):
            if enabled and chosen in HALVES:
                seen.asked.add(chosen)
            enabled = False
        elif enabled and kind == device.type:
            chosen = how.dtype or chosen
            seen.autocast.add(chosen)
        original(self, kind, dtype=chosen, enabled=enabled, cache_enabled=cache_enabled)

    return start


def added_autocast(how: Arithmetic, device: torch.device) -> AbstractContextManager[Any]:
    """Return autocast for forward and loss, if the arithmetic adds it."""
    if not how.adds_autocast or how.is_reference or how.only_networks is not None:
        return nullcontext()
    return torch.autocast(device.type, how.dtype)


@contextmanager
def scaled_backward(how: Arithmetic, weights: Sequence[Tensor], seen: Seen) -> Iterator[float]:
    """Yield what losses are to be multiplied by inside the block; gradients arrive divided by it."""
    if not how.adds_scaler or how.is_reference or how.scale is None:
        yield 1.0
        return
    scale = seen.scale = how.scale
    handles = [one.register_hook(lambda gradient: gradient / scale) for one in weights]  # type: ignore[no-untyped-call]
    try:
        yield scale
    finally:
        for handle in handles:
            handle.remove()


def change_modules(
    how: Arithmetic, modules: Mapping[str, nn.Module], device: torch.device, scope: Scope
) -> None:
    """Keep modules in float32, put autocast around networks alone, move weights and inputs by rounding."""
    for path in how.float32_modules:
        keep_in_float32(module_at(modules, path), device.type, casts_back=False)
    for module in modules.values():
        if how.only_networks is None:
            break
        forward = functools.partial(
            _autocast_inside, module.forward, device, how.only_networks, scope
        )
        setattr(module, "forward", forward)  # noqa: B010 - mypy calls it a method
    if not how.moved:
        return
    numbers = torch.Generator().manual_seed(1)

    def moved_too(value: Any) -> Any:
        return moved_input(value, how.moved, numbers) if isinstance(value, Tensor) else value

    with torch.no_grad():
        for module in modules.values():
            for weight in module.parameters():
                weight.copy_(moved(weight, how.moved, numbers))
            module.register_forward_pre_hook(
                lambda _, args, kwargs: (tree_map(moved_too, args), tree_map(moved_too, kwargs)),
                with_kwargs=True,
            )


def _autocast_inside(
    forward: Callable[..., Any],
    device: torch.device,
    dtype: torch.dtype,
    scope: Scope,
    *args: Any,
    **kwargs: Any,
) -> Any:
    was_inside, scope.is_inside = scope.is_inside, True
    try:
        with torch.autocast(device.type, dtype):
            return cast_floating(forward(*args, **kwargs), torch.float32)
    finally:
        scope.is_inside = was_inside
