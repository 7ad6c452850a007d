"""What the published programs computed on given inputs, in `originals/`: numbers only, none of them trained.

Ultralytics 8.3.74 (of which YOLOFuse is a fork) and 8.4.190 were run on weights that follow from each tensor's name,
see `fill`; BatchNorm's statistics are kept beside the outputs. Of each output every 61st element is kept, in float64.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "originals"
KEPT = 61


def read_json(name: str) -> Any:
    """Read a compressed JSON file."""
    return json.loads(gzip.decompress((FOLDER / name).read_bytes()))


def read_arrays(name: str) -> dict[str, np.ndarray[Any, Any]]:
    """Read all arrays of a file."""
    with np.load(FOLDER / name) as file:
        return dict(file)


def fill(name: str, shape: list[int]) -> np.ndarray[Any, Any]:
    """Return the values of a tensor by its name."""
    leaf, numbers = (
        name.rsplit(".", 1)[-1],
        np.random.Generator(np.random.PCG64(zlib.crc32(name.encode()))),
    )
    if leaf == "num_batches_tracked":
        return np.zeros(shape, np.int64)
    if name.endswith("dfl.conv.weight"):
        return np.arange(shape[1], dtype=np.float32).reshape(shape)
    if len(shape) > 1:
        return (numbers.standard_normal(shape) * 2.0 / np.sqrt(np.prod(shape[1:]))).astype(
            np.float32
        )
    if leaf in ("weight", "running_var"):
        return numbers.uniform(0.5, 1.5, shape).astype(np.float32)
    return (numbers.standard_normal(shape) * 0.1).astype(np.float32)


def state_of(
    listing: dict[str, list[int]], arrays: dict[str, np.ndarray[Any, Any]]
) -> dict[str, Tensor]:
    """Return the whole state of a network: BatchNorm's statistics from the file, the rest from the names."""
    statistics, start = {}, 0
    for name in arrays["stats_names"].tolist():
        count = listing[name][0]
        statistics[name] = arrays["stats"][start : start + count].astype(np.float32)
        start += count
    return {
        name: torch.from_numpy(statistics.get(name, fill(name, shape)))
        for name, shape in listing.items()
    }
