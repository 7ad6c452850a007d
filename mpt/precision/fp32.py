"""Float32 throughout: `fp32` and Apex's `O0` in true IEEE float32, `tf32` with TensorFloat-32 matrix products on
Ampere and later.

PyTorch lets cuDNN convolutions use TF32 unless told otherwise; `fp32` tells it, so that a comparison against it is
one against float32.
"""

from __future__ import annotations

import torch

from mpt.config.options import PrecisionOptions
from mpt.precision.policy import F, Policy
from mpt.seams import Task

NAMES: dict[str, dict[str, object]] = {"fp32": {}, "tf32": {}, "O0": {}}


class Settings(PrecisionOptions):
    """Nothing beyond the common settings."""


class Float32(Policy):
    """Float32 weights and arithmetic; TF32 in matrix products where the mode says so."""

    def prepare(self, task: Task) -> None:
        """Set what float32 products may use on CUDA: full IEEE, or TF32."""
        super().prepare(task)
        # The older switches: once `fp32_precision` is used, their getters raise, and torch.export and Inductor read
        # them.
        torch.backends.cuda.matmul.allow_tf32 = self.name == "tf32"
        torch.backends.cudnn.allow_tf32 = self.name == "tf32"

    def loss(self, function: F) -> F:
        """Return the loss function as it is: everything it sees is float32 already."""
        return function


def build(name: str, settings: Settings, device: torch.device) -> Policy:
    """Build the mode."""
    reason = "float32 everywhere, as the mode says"
    if name == "tf32":
        reason = "float32 weights; matrix products in TF32 on GPUs that have it (Ampere and later)"
        if device.type == "cpu":
            reason = "TF32 exists on NVIDIA GPUs only: on this CPU the arithmetic is plain float32"
    asked = {"dtype": settings.dtype, "loss_scale": settings.loss_scale}
    if unused := [f"precision.{key}={value}" for key, value in asked.items() if value not in ("auto", 1.0)]:
        reason += f"; {' and '.join(unused)} changes nothing here"
    return Float32(name, settings, device, torch.float32, reason)
