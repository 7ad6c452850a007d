"""Weights that are a function of their names alone: what the recorded passes of DAIN were made with."""

from __future__ import annotations

import math
import zlib

import numpy as np
import torch
from torch import nn

GAINS = [
    ("dc_conv7", 1.6),
    ("predict_flow2", 1.6),
    ("predict_flow", 1.0),
    ("filter1.2", 0.15),
    ("filter2.2", 0.15),
    ("depthNet.4", 0.5),
    ("rectifyNet.block5", 0.3),
    ("ctxNet", 0.7),
    ("rectifyNet", 0.7),
    ("", math.sqrt(2)),
]


def formula(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return one entry of the state dict; the first part of the name that matches decides its gain."""
    numbers = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    if name.endswith("num_batches_tracked"):
        return np.zeros((), np.int64)
    if name.endswith("running_mean"):
        value = numbers.uniform(-0.1, 0.1, shape)
    elif len(shape) == 4:
        transposed = "deconv" in name or "upfeat" in name
        fan_in = shape[0] * shape[2] * shape[3] / 4 if transposed else math.prod(shape[1:])
        gain = next(gain for part, gain in GAINS if part in name)
        value = numbers.standard_normal(shape) * (gain / math.sqrt(fan_in))
    elif name.endswith(("running_var", "weight")):
        value = numbers.uniform(0.8, 1.2, shape)
    else:
        value = 0.05 * numbers.standard_normal(shape)
    return value.astype(np.float32)


def formula_state(net: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole state."""
    return {
        name: torch.from_numpy(formula(name, tuple(t.shape)))
        for name, t in net.state_dict().items()
    }
