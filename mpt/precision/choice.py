"""Which lower precision to use on this device, and why, in words that are printed and recorded."""

from __future__ import annotations

import torch

from mpt.config.options import PrecisionOptions

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def cpu_has_fast_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 natively (AVX512-BF16, AMX or Arm's BF16)."""
    capability = torch.backends.cpu.get_cpu_capability()
    if "AVX512" in capability:
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return "SVE" in capability


def choose_dtype(settings: PrecisionOptions, device: torch.device, fixed: object = None) -> tuple[torch.dtype, str]:
    """Return the dtype for a mixed-precision mode on this device, and the reason. `fixed` is the mode's own, if any."""
    if settings.dtype != "auto":
        asker = "the mode says" if settings.dtype == fixed else "precision.dtype asks"
        slow = ""
        if device.type == "cpu" and settings.dtype == "float16":
            slow = "; this CPU has no float16 arithmetic, expect it to be slow"
        return DTYPES[settings.dtype], f"{settings.dtype}, as {asker}{slow}"
    if device.type == "cpu":
        if cpu_has_fast_bfloat16():
            return torch.bfloat16, "bfloat16: this CPU multiplies it natively, and it needs no loss scaling"
        return torch.bfloat16, "bfloat16: needs no loss scaling; this CPU emulates it, so expect no speed-up over fp32"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        cores = (
            "has tensor cores for it" if (major, minor) >= (7, 0) else "has no tensor cores: memory is saved, not time"
        )
        return torch.float16, f"float16 with loss scaling: the GPU (compute capability {major}.{minor}) {cores}"
    return torch.float16, f"float16 with loss scaling, the default for {device.type}"
