"""Network pickles and outputs of NVIDIA's own programs, with weights that are a function of their names."""

from __future__ import annotations

import functools
import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mpt.systems.stylegan2.nn.weights.network_pickle import read_network_pickle

FIXTURES = Path(__file__).parent / "fixtures"
KEPT = ("resample_filter", "up_filter", "down_filter", "transform", "freqs", "phases")
"""Constants, which the files have as they were written."""


def formula(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor of G, D or G_ema by its name, which begins with the network's."""
    value = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode()))).standard_normal(shape)
    leaf = name.rsplit(".", 1)[-1]
    if ".mapping." in name and ".fc" in name:
        value = value * (100.0 if leaf == "weight" else 10.0)
    elif name.endswith("input.affine.bias"):
        value = np.array([1, 0, 0, 0]) + 0.2 * value
    elif name.endswith("input.affine.weight"):
        value = 0.2 * value
    elif leaf == "bias":
        value = (1.0 if ".affine." in name else 0.0) + 0.2 * value
    elif leaf in ("noise_strength", "w_avg"):
        value = {"noise_strength": 0.1, "w_avg": 0.3}[leaf] * value
    elif leaf == "magnitude_ema":
        value = 0.5 + np.abs(value)
    return np.asarray(value, dtype=np.float32)


@functools.cache
def written(name: str) -> bytes:
    """Return the bytes of a network pickle with its weights in it."""
    return gzip.decompress((FIXTURES / f"{name}.pkl.gz").read_bytes())


def network_pickle(name: str, folder: Path) -> Path:
    """Write a network pickle with its weights and return its path."""
    path = folder / f"{name}.pkl"
    path.write_bytes(written(name))
    opened = read_network_pickle(path)
    shapes = {
        key: tuple(one.shape)
        for key, one in opened.described().items()
        if key.rsplit(".", 1)[-1] not in KEPT
    }
    numbers = {key: torch.from_numpy(formula(key, shape)) for key, shape in shapes.items()}
    path.write_bytes(opened.rewritten(path.read_bytes(), numbers))
    return path


def recorded(name: str) -> dict[str, Tensor]:
    """Return the inputs and outputs of the original."""
    with np.load(FIXTURES / f"{name}.npz", allow_pickle=False) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def apart(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest value."""
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())
