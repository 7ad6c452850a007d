"""Files of latents as `mpt diffusion prepare` writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_latents(path: Path, tensors: Mapping[str, Tensor], classes: Sequence[str]) -> None:
    """Write one split's file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path, {"classes": json.dumps(list(classes)), "made_by": "test"})
