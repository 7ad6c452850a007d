"""Which lower precision to use on this device, and why, in words that are printed and recorded."""

from __future__ import annotations

import torch

from mpt.config.options import PrecisionOptions
from mpt.errors import ConfigError

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
AMPERE = (8, 0)
NAN_IN_HALF = ("GTX 1630", "GTX 1650", "GTX 1660")
"""Cards on which cuDNN's float16 convolutions are known to give NaN."""


def cpu_has_fast_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 natively (AVX512-BF16, AMX or Arm's BF16)."""
    capability = torch.backends.cpu.get_cpu_capability()
    if "AVX512" in capability:
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return "SVE" in capability


def cost_of_emulation() -> str:
    """Return in words how slow bfloat16 is on a CPU that does not multiply it: a DCGAN's step on AVX2 takes 9 times as
    long as in float32.
    """
    if "AVX512" in torch.backends.cpu.get_cpu_capability():
        return "this CPU emulates it, so expect no speed-up over fp32"
    return "this CPU emulates it slowly: a step takes many times as long as with precision=fp32"


def require_ampere(what: str, device: torch.device, instead: str) -> None:
    """Raise ConfigError if a CUDA card is too old for a number format that only its successors compute with."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < AMPERE:
        raise ConfigError(
            f"precision: {torch.cuda.get_device_name(device)} (compute capability {capability[0]}.{capability[1]}) "
            f"does not compute in {what}, which needs 8.0 or later; use {instead}"
        )


def choose_dtype(
    settings: PrecisionOptions, device: torch.device, fixed: object = None
) -> tuple[torch.dtype, str]:
    """Return the dtype for a mixed-precision mode on this device, and the reason. `fixed` is the mode's own, if any."""
    if settings.dtype == "bfloat16":
        require_ampere("bfloat16", device, "precision=amp with float16, or precision=fp32")
    if settings.dtype != "auto":
        asker = "the mode says" if settings.dtype == fixed else "precision.dtype asks"
        slow = ""
        if device.type == "cpu" and settings.dtype == "float16":
            slow = "; this CPU has no float16 arithmetic, expect it to be slow"
        return DTYPES[settings.dtype], f"{settings.dtype}, as {asker}{slow}"
    if device.type == "cpu":
        if cpu_has_fast_bfloat16():
            return (
                torch.bfloat16,
                "bfloat16: this CPU multiplies it natively, and it needs no loss scaling",
            )
        return torch.bfloat16, f"bfloat16: needs no loss scaling; {cost_of_emulation()}"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        cores = (
            "has tensor cores for it"
            if (major, minor) >= (7, 0)
            else "has no tensor cores: memory is saved, not time"
        )
        reason = f"float16 with loss scaling: the GPU (compute capability {major}.{minor}) {cores}"
        if any(name in torch.cuda.get_device_name(device) for name in NAN_IN_HALF):
            reason += "; this card is known to give NaN in float16 convolutions: if no step succeeds, precision=fp32"
        return torch.float16, reason
    return torch.float16, f"float16 with loss scaling, the default for {device.type}"
