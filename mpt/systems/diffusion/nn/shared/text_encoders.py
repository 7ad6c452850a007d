"""CLIP text encoders of a pipeline's folder, or of a published shape, and the weights of such a folder.

Of transformers, whose newer versions hold `CLIPTextModel` without the module `text_model`: weights are read by its own
loader, which knows both. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mpt.errors import CheckpointError, ConfigError
from mpt.systems.diffusion.nn.shared.library import import_package, read_mapping
from mpt.systems.diffusion.nn.shared.published_shapes import TEXT_SHAPES
from mpt.weights.weights_file import read_weights_file

KINDS = ("CLIPTextModel", "CLIPTextModelWithProjection")
NAMES = ("text_encoder", "text_encoder_2")
NETWORKS = ("unet", "transformer")
FILES = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json")
READER = "model.text_encoders"
"""The setting that asks for them."""
HOW_NUMBERS_ARE_STORED = ("dtype", "torch_dtype")
"""Left out of a config.json: a part of the encoder would be built in it, and the rest in float32."""


def build_encoder(folder: str | None, shape: str | None, name: str) -> nn.Module:
    """Return a text encoder with random weights. Raises ConfigError if there is none, or one of another kind."""
    config = (
        encoder_config(Path(str(folder)).expanduser() / name)
        if shape is None
        else shape_of(shape, name)
    )
    kind = str((config.get("architectures") or [""])[0])
    if kind not in KINDS:
        raise ConfigError(
            f"model.text_encoders: {name} is a {kind or 'model without a class'}; trained are {' and '.join(KINDS)}"
        )
    library = import_package("transformers", READER)
    given = {key: value for key, value in config.items() if key not in HOW_NUMBERS_ARE_STORED}
    built: nn.Module = getattr(library, kind)(library.CLIPTextConfig.from_dict(given))
    return built


def shape_of(shape: str, name: str) -> dict[str, Any]:
    """Return the settings of a published network's text encoder."""
    if name not in TEXT_SHAPES.get(shape, {}):
        raise ConfigError(
            f"model.text_encoders: shape {shape} has none that is trained; {', '.join(TEXT_SHAPES)} have"
        )
    return dict(TEXT_SHAPES[shape][name])


def encoder_config(folder: Path) -> dict[str, Any]:
    """Return the content of an encoder's config.json. Raises ConfigError if there is none to read."""
    advice = "; model.folder is to be a pipeline's folder"
    return read_mapping(folder / "config.json", READER, advice)


def network_file(folder: Path) -> Path | None:
    """Return the file of a denoising network's weights, or of its parts' index; None if there is none."""
    return next((folder / name for name in FILES if (folder / name).is_file()), None)


def read_pipeline(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a pipeline's denoising network, and of its CLIP text encoders.

    Raises CheckpointError for a folder without the former, or with files that cannot be read.
    """
    files = [file for name in NETWORKS if (file := network_file(folder / name)) is not None]
    if not files:
        raise CheckpointError(
            f"model.weights: {folder} has no {FILES[0]} in {' or '.join(NETWORKS)}"
        )
    tensors = {
        f"inner.{name}": value for name, value in read_weights_file(files[0]).tensors.items()
    }
    for name in NAMES:
        if not (folder / name / "config.json").is_file():
            continue
        kind = str((encoder_config(folder / name).get("architectures") or [""])[0])
        if kind in KINDS:
            tensors |= {
                f"{name}.{key}": value for key, value in read_encoder(folder / name, kind).items()
            }
    return tensors


def read_encoder(folder: Path, kind: str) -> dict[str, Tensor]:
    """Return the tensors of a text encoder, by the names of the installed transformers."""
    library = import_package("transformers", READER)
    try:
        with warnings.catch_warnings(), no_progress_bar(library):
            warnings.simplefilter("ignore")
            encoder = getattr(library, kind).from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"model.weights: {folder} cannot be read: {str(error).splitlines()[0]}"
        ) from error
    tensors: dict[str, Tensor] = encoder.state_dict()
    return tensors


@contextlib.contextmanager
def no_progress_bar(library: Any) -> Iterator[None]:
    """Keep transformers from drawing its own bar into the lines of `mpt train` inside the block."""
    logging = library.utils.logging
    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()
