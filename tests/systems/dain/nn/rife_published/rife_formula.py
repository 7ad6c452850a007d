"""Weights that are a function of their names alone: what the recorded passes of RIFE were made with."""

from __future__ import annotations

import functools
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mpt.systems.dain.nn.rife_published.networks import PublishedRife
from mpt.systems.dain.nn.rife_published.versions import build_version

GAINS = [("lastconv", 0.6), ("convblock", 1.1), ("unet.conv.", 0.6), ("", 1.3)]
INNER_OF_OLDER = 45
"""Channels between the two last layers of the older HD 3.x network."""


def is_transposed(name: str) -> bool:
    """Return whether a tensor is that of a transposed convolution."""
    of_block = name.startswith("block") and name.split(".")[1] in ("conv1", "conv2")
    return of_block or any(part in name for part in ("lastconv", "unet.up", "encode.cnn3"))


def formula(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return one entry of the state dict; the first part of the name that matches decides its gain."""
    numbers = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    if name.endswith("beta"):
        return numbers.uniform(0.3, 0.7, shape).astype(np.float32)
    if len(shape) == 4:
        transposed = is_transposed(name)
        fan_in = shape[0] * shape[2] * shape[3] / 4 if transposed else math.prod(shape[1:])
        gain = next(gain for part, gain in GAINS if part in name)
        if name.startswith("block") and transposed:
            gain = 1.3 if shape[1] == INNER_OF_OLDER else 0.6
        return (numbers.standard_normal(shape) * (gain / math.sqrt(fan_in))).astype(np.float32)
    if name.endswith("weight"):
        return numbers.uniform(0.1, 0.4, shape).astype(np.float32)
    return (0.05 * numbers.standard_normal(shape)).astype(np.float32)


@functools.cache
def formula_state(version: str) -> dict[str, Tensor]:
    """Return the whole state of a version."""
    shapes = build_version(version).state_dict()
    return {
        name: torch.from_numpy(formula(name, tuple(value.shape))) for name, value in shapes.items()
    }


def network(version: str) -> PublishedRife:
    """Return a version's network with the weights of the recorded passes, in evaluation mode."""
    net = build_version(version)
    net.load_state_dict(formula_state(version))
    return net.eval()


@functools.cache
def recorded() -> dict[str, np.ndarray]:
    """Return what RIFE's own networks gave."""
    found = {}
    for name in ("rife.npz", "rife_further.npz"):
        with np.load(Path(__file__).parents[2] / "fixtures" / name, allow_pickle=False) as archive:
            found |= archive
    return found


def recorded_frames(name: str = "frames") -> tuple[Tensor, Tensor]:
    """Return the two frames, (1, 3, h, w) in [0, 1]."""
    first, last = torch.from_numpy(recorded()[name].astype(np.float32) / np.float32(255))
    return first[None], last[None]
