"""Float32 throughout: `fp32` and Apex's `O0` in true IEEE float32, `tf32` with TensorFloat-32 matrix products on
Ampere and later.

PyTorch lets cuDNN convolutions use TF32 by default; `fp32` forbids it, so that a comparison against it is
one against float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from mpt.config.options import PrecisionOptions
from mpt.errors import ConfigError
from mpt.precision.shared.choice import require_ampere
from mpt.precision.shared.policy import F, Policy

NAMES: dict[str, dict[str, object]] = {"fp32": {}, "tf32": {}, "O0": {}}
ABOUT = {
    "fp32": "Float32 throughout, matrix products and convolutions too (IEEE).",
    "tf32": "Float32 with TensorFloat-32 matrix products, on Ampere and later.",
    "O0": "Apex's O0: the same as fp32.",
}
SHARDED = True
HOLDS_FLOAT32 = True


class Settings(PrecisionOptions):
    """Nothing beyond the common settings."""


class Float32(Policy):
    """Float32 weights and arithmetic; TF32 in matrix products if the mode says so."""

    def loss(self, function: F) -> F:
        """Return the loss function as it is: everything it sees is float32 already."""
        return function


def build(name: str, settings: Settings, device: torch.device) -> Policy:
    """Build the mode."""
    own: Literal["ieee", "tf32"] = "tf32" if name == "tf32" else "ieee"
    if settings.matmul in ("ieee", "tf32") and settings.matmul != own:
        raise ConfigError(
            f"precision.matmul: {settings.matmul} contradicts {name}, which is {own}; leave it out"
        )
    if settings.matmul == "auto":
        settings = settings.model_copy(update={"matmul": own})
    reason = "float32 everywhere, as the mode says"
    if name == "tf32":
        require_ampere("TF32", device, "precision=fp32")
        reason = "float32 weights; matrix products in TF32 on GPUs that have it (Ampere and later)"
        if device.type == "cpu":
            reason = "TF32 exists on NVIDIA GPUs only: on this CPU the arithmetic is plain float32"
    if settings.matmul == "bf16x3":
        reason = "float32 weights; matrix products as three of bfloat16"
    asked = {"dtype": settings.dtype, "loss_scale": settings.loss_scale}
    if unused := [
        f"precision.{key}={value}" for key, value in asked.items() if value not in ("auto", 1.0)
    ]:
        reason += f"; {' and '.join(unused)} changes nothing here"
    mode = Float32(name, settings, device, torch.float32, reason)
    if name == "tf32":
        mode.numerics = replace(mode.numerics, uses_tf32=True, product_unit=2.0**-10)
    return mode
