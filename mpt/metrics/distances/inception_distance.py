"""The published FID: Frechet distance in Inception's features, through torchmetrics and torch-fidelity.

An extra (`pip install 'mpt-trainer[fid]'`) with the weights from a local file: nothing is downloaded. The file is the
one that torch-fidelity names pt_inception-2015-12-05-6726825d.pth. The library would unpickle whatever it is given, so
it is given a copy of the tensors that mpt's own reader found in the file, and never the file.

Two choices make features torch-fidelity's of the same pictures: 8-bit values are rounded, as in a file of pictures, and
pictures are resized as TensorFlow 1 does. torchmetrics 1.9 resizes with antialiasing unless that is switched off.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mpt.vision_ops  # noqa: F401  before torchmetrics, whose torchvision may be built for another torch
from mpt.errors import CheckpointError, ConfigError, DataError
from mpt.weights.weights_file import load_weights_file

WEIGHTS_NAME = "pt_inception-2015-12-05-6726825d.pth"
LAST_LAYER = (1008, 2048)
"""Shape of `fc.weight`: TensorFlow's Inception of 2015, by which FID is defined."""


class InceptionDistance:
    """Accumulates real and generated images (b, c, h, w) in [0, 1]; raises when it cannot be had."""

    def __init__(self, weights: str, device: torch.device) -> None:
        state = require_inception(weights)
        from torchmetrics.image.fid import FrechetInceptionDistance

        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / WEIGHTS_NAME
            torch.save(state, copy)
            made: Any = FrechetInceptionDistance(feature_extractor_weights_path=str(copy))
        made.inception.use_antialias = False
        self.metric: Any = made.to(device)

    def features(self, image_bchw: Tensor) -> Tensor:
        """Return Inception's features (b, 2048) of images; the distance is the Frechet distance of two sets of them."""
        features: Tensor = self.metric.inception(_as_pixels(image_bchw))
        return features.reshape(len(image_bchw), -1)

    def update(self, image_bchw: Tensor, real: bool) -> None:
        """Add images of one kind."""
        self.metric.update(_as_pixels(image_bchw), real=real)

    def compute(self) -> float:
        """Return the distance."""
        return float(self.metric.compute())


def _as_pixels(image_bchw: Tensor) -> Tensor:
    """Return three channels of 8 bits: grey is repeated, an alpha channel is left out."""
    return (image_bchw[:, :3].float().clamp(0, 1) * 255).round().byte().expand(-1, 3, -1, -1)


def require_inception(weights: str) -> dict[str, Tensor]:
    """Return the weights; raise DataError or ConfigError, before any training, if FID cannot be had."""
    state = check_weights(weights)
    if not all(map(importlib.util.find_spec, ("torch_fidelity", "torchmetrics"))):
        raise ConfigError(
            "task.inception_weights: the published FID needs torch-fidelity and torchmetrics. Install them with "
            "`pip install 'mpt-trainer[fid]'`, or leave the setting out: the built-in distance is there."
        )
    return state


def check_weights(weights: str) -> dict[str, Tensor]:
    """Return the tensors of a file that looks like Inception's; raise DataError otherwise."""
    path = Path(weights)
    if not path.is_file():
        raise DataError(
            f"task.inception_weights: there is no file {path}. Download {WEIGHTS_NAME} (torch-fidelity's release page) "
            "and give its path, or leave the setting out."
        )
    state: dict[str, Tensor] = {}
    problem = ""
    try:
        state = load_weights_file(path)
    except CheckpointError as error:
        problem = str(error).removeprefix(f"{path} is ").partition(". Give")[0]
    else:
        last = state.get("fc.weight")
        if last is None:
            problem = "it holds no layer fc"
        elif tuple(last.shape) != LAST_LAYER:  # torchvision's Inception has 1000 classes
            problem = f"its last layer is {'x'.join(map(str, last.shape))}, not {'x'.join(map(str, LAST_LAYER))}"
    if problem:
        raise DataError(
            f"task.inception_weights: {path} is not the Inception feature file ({problem}). It should be "
            f"{WEIGHTS_NAME} of torch-fidelity."
        )
    return state
