"""A model's own half precision: a dtype per block, designed in, without autocast and without a loss scale.

Networks that can do it have a method `set_half(dtype)`. Weights, images, losses and the blocks of low
resolution stay float32. Overflows in a backward are made finite instead of skipped: NaN to 0, infinities to 1e5.
Source: Karras et al. 2020, "Training generative adversarial networks with limited data", appendix D.
"""

from __future__ import annotations

from typing import Literal

import torch

from mpt.config.options import PrecisionOptions
from mpt.errors import ConfigError
from mpt.precision.shared.choice import choose_dtype
from mpt.precision.shared.policy import Policy
from mpt.seams import Phase, StepStats, Task

NAMES: dict[str, dict[str, object]] = {"native": {}}

LARGEST_GRADIENT = 1e5


class Settings(PrecisionOptions):
    loss_scale: Literal["auto"] = "auto"
    """There is none in this mode."""


class Native(Policy):
    """Half precision inside the blocks that the model chooses."""

    @property
    def scales_losses(self) -> bool:
        """No: the model keeps its numbers in range itself."""
        return False

    def prepare(self, task: Task, *, is_sharded: bool = False) -> None:
        """Set the dtype of each network that can choose."""
        super().prepare(task, is_sharded=is_sharded)
        able = [
            module
            for module in task.modules.values()
            if callable(getattr(module, "set_half", None))
        ]
        if not able:
            raise ConfigError(
                "precision.mode: native is for models with a half precision of their own (networks with a `set_half`), "
                "and this one has none. Use amp or bf16, which suit every model."
            )
        for module in able:
            module.set_half(self.numerics.dtype)  # type: ignore[operator]

    def step(self, phase: Phase, clip_norm: float | None) -> StepStats:
        """Make gradients finite, then clip and step."""
        for parameter in phase.module.parameters():
            if parameter.grad is not None:
                torch.nan_to_num_(
                    parameter.grad, nan=0.0, posinf=LARGEST_GRADIENT, neginf=-LARGEST_GRADIENT
                )
        return super().step(phase, clip_norm)


def build(name: str, settings: Settings, device: torch.device) -> Policy:
    """Build the mode; `dtype: auto` is resolved for the device."""
    dtype, reason = choose_dtype(settings, device)
    kind = "float16" if dtype == torch.float16 else "bfloat16"
    return Native(
        name,
        settings,
        device,
        dtype,
        f"{reason.split(' with loss scaling')[0]}; {kind} in the model's blocks",
    )
