"""Options of CUDA's matrix products: TF32 or three bfloat16 products for float32, float16 sums for float16.

The switches belong to the process, so every run sets all of them: one that follows another in the same process does not
inherit its arithmetic.
"""

from __future__ import annotations

import torch

from mpt.config.options import PrecisionOptions
from mpt.errors import ConfigError


def set_products(settings: PrecisionOptions, dtype: torch.dtype) -> list[str]:
    """Set the switches as the settings say and return the warnings that belong to them.

    Raises ConfigError for arithmetic that the installed torch does not know.
    """
    # The older switches if they suffice: once `fp32_precision` is used their getters raise, and torch.export and
    # Inductor read them.
    torch.backends.cuda.matmul.allow_tf32 = settings.matmul == "tf32"
    torch.backends.cudnn.allow_tf32 = settings.matmul in ("auto", "tf32")
    if settings.matmul == "bf16x3":
        try:
            torch.backends.cuda.matmul.fp32_precision = "bf16x3"
        except RuntimeError as error:
            raise ConfigError(
                f"precision.matmul: torch {torch.__version__} has no bf16x3; use tf32, or precision=bf16"
            ) from error
    torch.backends.cuda.matmul.allow_fp16_accumulation = settings.fp16_accumulation
    if not settings.fp16_accumulation:
        return []
    if dtype != torch.float16:
        return ["precision.fp16_accumulation changes nothing here: no product is in float16"]
    return [
        "precision.fp16_accumulation: float16 products add up in float16, which loses digits in long sums and can "
        "overflow at 65504. Train once with and once without, and `mpt compare RUN RUN` shows its cost"
    ]
