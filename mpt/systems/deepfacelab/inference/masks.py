"""The merger's networks in addition to the model: a trained XSeg for masks, and DeepFaceLab's enhancer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpt.config.checking.precision_names import FLOAT32
from mpt.config.options import setting_of
from mpt.engine.state.moving_averages import evaluated_module
from mpt.errors import CheckpointError, ConfigError
from mpt.inference.half import rebuild
from mpt.inference.trained import open_trained
from mpt.run.records.layout import find_run
from mpt.systems.deepfacelab.data.leras.model_data import plain, read_model_data
from mpt.systems.deepfacelab.inference.extraction import PLACES
from mpt.systems.deepfacelab.nn.facelib.enhancer import Enhancer, enlarge
from mpt.systems.deepfacelab.nn.facelib.xseg import SIDE, XSeg, draw_mask
from mpt.systems.deepfacelab.nn.weights.facelib_weights import load_network

Picture = np.ndarray[Any, np.dtype[Any]]
Segment = Callable[[Picture], Picture]
"""Draw an XSeg mask (256, 256) of a face (256, 256, 3), B, G, R."""
Enhance = Callable[[Picture], Picture]
"""Draw a face (s, s, 3), B, G, R, with four times its sides."""
NAME = f"XSeg_{SIDE}.npy"
ENHANCER = "FaceEnhancer.npy"
DATA = "XSeg_data.dat"
FACE_TYPES = ("h", "mf", "f", "wf", "head")


@dataclass(frozen=True)
class TrainedMasks:
    """A trained XSeg, and the type of face that it was trained on, if its files say so."""

    segment: Segment
    face_type: str | None


def load_segment(place: Path, device: torch.device, runs: Path = Path("runs")) -> TrainedMasks:
    """Load an XSeg by its file or its folder, or by a run's name or folder.

    CheckpointError if there is none, or several; ConfigError for a run of another model.
    """
    found = [place] if place.is_file() else sorted(place.glob(f"*{NAME}"))
    if not found:
        return load_run(place, device, runs)
    if len(found) > 1:
        raise CheckpointError(f"{place}: holds {', '.join(path.name for path in found)}: name one")
    return TrainedMasks(
        partial(draw_mask, load_network(XSeg(), found[0]).to(device), device=device),
        type_at(found[0]),
    )


def load_run(place: Path, device: torch.device, runs: Path) -> TrainedMasks:
    """Load the XSeg that a run trained. Raises CheckpointError if it is no run."""
    try:
        checkpoint = find_run(str(place), runs)[1]
    except CheckpointError as error:
        raise CheckpointError(f"{place}: there is no {NAME}, and it is no run") from error
    trained = open_trained(str(place), runs, str(device), which=None if checkpoint else "newest")
    if trained.config.model.name != "xseg":
        raise ConfigError(
            f"{place}: its model is {trained.config.model.name}; masks are drawn by an xseg"
        )
    size = trained.config.model.settings.image_size
    if size != SIDE:
        raise ConfigError(f"{place}: its xseg has {size} pixels; masks are drawn at {SIDE}")
    network = evaluated_module(rebuild(trained, FLOAT32).task, "xseg").eval()
    face_type = setting_of(trained.config.dataset.settings, "face_type")
    return TrainedMasks(partial(draw_mask, network, device=device), face_type)


def load_enhancer(place: Path, device: torch.device) -> Enhance:
    """Load the enhancer from its file, or from the folder of DeepFaceLab or its facelib. CheckpointError if it is not
    there.
    """
    files = [place, *(place / folder / ENHANCER for folder in PLACES)]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise CheckpointError(
            f"{place}: there is no {ENHANCER}; name your DeepFaceLab's folder facelib"
        )
    return partial(enlarge, load_network(Enhancer(), found).to(device), device=device)


def type_at(path: Path) -> str | None:
    """Return the type of face that DeepFaceLab's options of an XSeg name; None if they are not there."""
    data = path.with_name(DATA)
    if not data.is_file():
        return None
    kind = plain(read_model_data(data)["options"].get("face_type"))
    return kind if kind in FACE_TYPES else None
