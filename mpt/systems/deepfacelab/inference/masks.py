"""The masks that a trained XSeg draws: its file found and loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpt.errors import CheckpointError
from mpt.systems.deepfacelab.nn.facelib.xseg import SIDE, XSeg, draw_mask
from mpt.systems.deepfacelab.nn.weights.facelib_weights import load_network

Picture = np.ndarray[Any, np.dtype[Any]]
Segment = Callable[[Picture], Picture]
"""Draw an XSeg mask (256, 256) of a face (256, 256, 3), B, G, R."""
NAME = f"XSeg_{SIDE}.npy"


def load_segment(place: Path, device: torch.device) -> Segment:
    """Load an XSeg by its file or its folder. CheckpointError if there is none, or several."""
    found = [place] if place.is_file() else sorted(place.glob(f"*{NAME}"))
    if len(found) != 1:
        what = f"holds {', '.join(path.name for path in found)}: name one" if found else f"there is no {NAME}"
        raise CheckpointError(f"{place}: {what}")
    return partial(draw_mask, load_network(XSeg(), found[0]).to(device), device=device)
