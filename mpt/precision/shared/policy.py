"""Shared by every precision mode: scalers per phase, modules kept in float32, clipping after unscaling, saved state.

A mode is a small subclass that changes only the differences: the context around a forward (autocast, O1), or the dtype
of the weights (O2, O3). The base class alone is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mpt.config.options import PrecisionOptions
from mpt.errors import ConfigError
from mpt.nn.shared.named_modules import matching_modules
from mpt.precision.shared.float32_modules import (
    Float32Module,
    answer_in_float32,
    full_precision,
    in_float32,
    keep_in_float32,
)
from mpt.precision.shared.products import set_products
from mpt.precision.shared.scaler import LossScaler, clip_gradients
from mpt.seams import Numerics, Phase, Precision, StepStats, Task

F = TypeVar("F", bound=Callable[..., Any])


class Policy(Precision):
    """Float32, and the base of every other mode."""

    casts_back = False
    """Whether the outputs of a module kept in float32 return in its input's dtype."""
    can_fall_back = False
    """Whether the mode can continue in bfloat16 if float16 overflows at the smallest scale."""

    def __init__(
        self,
        name: str,
        settings: PrecisionOptions,
        device: torch.device,
        dtype: torch.dtype,
        reason: str,
    ) -> None:
        self.name, self.settings, self.device = name, settings, device
        self.numerics = Numerics(dtype, reason)
        self.scalers: dict[str, LossScaler] = {}
        self.fell_back = False

    def prepare(self, task: Task, *, is_sharded: bool = False) -> None:
        """Set the precision of products, and keep in float32 the modules that the settings name."""
        self.numerics = replace(
            self.numerics, notes=tuple(set_products(self.settings, self.numerics.dtype))
        )
        kept = matching_modules(task.modules, self.settings.keep_fp32, "precision.keep_fp32")
        for module in kept:
            keep_in_float32(module, self.device.type, self.casts_back, self.numerics.dtype)
        answer_in_float32(kept)

    @property
    def scales_losses(self) -> bool:
        """Whether losses are multiplied by a scale before backward."""
        if self.settings.loss_scale == "auto":
            return self.numerics.dtype == torch.float16
        return self.numerics.dtype != torch.float32 and self.settings.loss_scale != 1.0

    def bind(self, phases: Sequence[Phase]) -> None:
        """Make a scaler for each phase that wants one."""
        if not self.scales_losses:
            return
        static = self.settings.loss_scale if isinstance(self.settings.loss_scale, float) else None
        for phase in phases:
            if phase.scaled:
                self.scalers[phase.name] = LossScaler(
                    self.settings.init_scale if static is None else static,
                    self.settings.growth_interval,
                    self.settings.min_scale,
                    self.settings.max_scale,
                    dynamic=static is None,
                )

    def float32(self) -> AbstractContextManager[Any]:
        """Return the context that switches off autocast and O1's casts."""
        return full_precision(self.device.type)

    def loss(self, function: F) -> F:
        """Wrap a loss function to run in float32, unless the settings say that losses inherit the mode."""
        return (
            function
            if self.settings.losses == "inherit"
            else in_float32(function, self.device.type)
        )

    def backward(self, loss: Tensor, phase: Phase) -> None:
        """Back-propagate one loss, scaled if the phase has a scaler."""
        scaler = self.scalers.get(phase.name)
        (loss if scaler is None else scaler.multiply(loss)).backward()  # type: ignore[no-untyped-call]

    def step(self, phase: Phase, clip_norm: float | None) -> StepStats:
        """Unscale, clip, step and update the scale. An overflow skips this phase's step alone.

        Raises ConfigError when no parameter received a gradient: nothing would train, and the scale would grow.
        """
        self.collect_gradients(phase)
        if not has_gradient(phase):
            raise ConfigError(
                f"phase {phase.name}: no parameter received a gradient. Its losses do not depend on what it trains "
                f"({type(phase.module).__name__}): is something detached, or is another network's output used?"
            )
        scaler = self.scalers.get(phase.name)
        if scaler is None and clip_norm is None:
            self.optimize(phase)
            self.publish_weights(phase)
            return StepStats()
        parameters = [p for group in phase.optimizer.param_groups for p in group["params"]]
        overflowed = scaler.unscale(parameters) and scaler.dynamic if scaler else False
        grad_norm = None
        if clip_norm is not None and not overflowed:
            grad_norm = clip_gradients(parameters, clip_norm)
        if not overflowed:
            self.optimize(phase)
            self.publish_weights(phase)
        if scaler:
            scaler.update(overflowed)
        return StepStats(overflowed, scaler.scale if scaler else None, grad_norm)

    def collect_gradients(self, phase: Phase) -> None:
        """Bring gradients to the parameters that the optimizer updates; nothing to do without master weights."""

    def publish_weights(self, phase: Phase) -> None:
        """Bring updated weights back to the model; nothing to do without master weights."""

    def keep_float32(self, module: nn.Module) -> bool:
        """Keep a module in float32 from now on, its weights in place: optimizers hold them."""
        tensors = [
            tensor
            for tensor in (*module.parameters(), *module.buffers())
            if tensor.is_floating_point()
        ]
        if not self.can_fall_back or any(tensor.dtype != torch.float32 for tensor in tensors):
            return False
        if isinstance(module, Float32Module):
            return False
        keep_in_float32(module, self.device.type, self.casts_back, self.numerics.dtype)
        return True

    def fall_back(self, task: Task) -> bool:
        """Continue in bfloat16, which has float32's range and needs no scale; return False if the mode cannot."""
        if not self.can_fall_back:
            return False
        self.go_on_in_bfloat16()
        return True

    def go_on_in_bfloat16(self) -> None:
        """Change to bfloat16 without scalers."""
        self.numerics = replace(self.numerics, dtype=torch.bfloat16)
        self.scalers, self.fell_back = {}, True

    def state_dict(self) -> dict[str, Any]:
        """Return the scalers' state, the dtype in force and how it came to be."""
        return {
            "dtype": str(self.numerics.dtype).removeprefix("torch."),
            "asked_dtype": self.settings.dtype,
            "fell_back": self.fell_back,
            "scalers": {name: scaler.state_dict() for name, scaler in self.scalers.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the scalers that both runs have, and a fall back to bfloat16; a changed mode starts afresh.

        A run that fell back continues in bfloat16 unless `precision.dtype` was changed since.
        """
        if (
            state.get("fell_back")
            and state.get("asked_dtype") == self.settings.dtype
            and self.can_fall_back
        ):
            self.go_on_in_bfloat16()
        for name, scaler in self.scalers.items():
            if name in state["scalers"]:
                scaler.load_state_dict(state["scalers"][name])


def has_gradient(phase: Phase) -> bool:
    """Return whether a weight in the optimizer's groups has a gradient, or none is in them: a trick took them out.

    Each step asks, and the first weight decides.
    """
    is_empty = True
    for group in phase.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return True
            is_empty = False
    return is_empty
