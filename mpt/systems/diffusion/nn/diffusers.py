"""Networks of diffusers by their `config.json` in a local folder, or by the shape of a published one.

Known are UNet2DModel and DiTTransformer2DModel, which may have classes, and, with cached text embeddings,
UNet2DConditionModel (Stable Diffusion 1, 2, SDXL), SD3Transformer2DModel and FluxTransformer2DModel. With
`text_encoders` those of CLIP are part of the network. Weights begin at random unless `model.weights` names a file of
them, or a pipeline's folder. Nothing is downloaded.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from torch import Tensor, nn

from mpt.config.options import ModelOptions
from mpt.errors import ConfigError
from mpt.seams import DataSpec
from mpt.systems.diffusion.nn.shared.captioned_networks import wrap_with_encoders
from mpt.systems.diffusion.nn.shared.library import import_package, read_mapping
from mpt.systems.diffusion.nn.shared.library_networks import KNOWN, LibraryDenoiser, wrap
from mpt.systems.diffusion.nn.shared.published_shapes import SHAPES
from mpt.systems.diffusion.nn.shared.text_encoders import build_encoder, read_pipeline

TASK = "diffusion"
NETWORK_FOLDERS = ("unet", "transformer")


class Settings(ModelOptions):
    folder: str | None = None
    """Local folder with the network's config.json, or a pipeline's folder with `unet` or `transformer` in it."""
    shape: Literal["sd15", "sdxl", "sd3_medium", "flux_dev", "dit_xl_2"] | None = None
    """A published network's shape, instead of a folder."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Values of config.json to replace, such as {num_layers: 2}."""
    text_encoders: bool = False
    """Encode captions in each step, by the pipeline's CLIP text encoders, which `memory.lora` then trains too."""
    image_size: int = Field(32, ge=1)
    """Side of the pictures in pixels, of networks that see pixels."""
    channels: int = Field(3, ge=1, le=4)
    """Channels of the pictures, of networks that see pixels."""


def build(settings: Settings, data: DataSpec) -> dict[str, nn.Module]:
    """Return `net`. Raises ConfigError for a folder of another layout and a network that is not known here."""
    config = network_config(settings) | settings.options
    name = config.pop("_class_name", None)
    if name not in KNOWN:
        raise ConfigError(
            f"model.folder: its config.json is of {name or 'no class'}; known here are {', '.join(KNOWN)}"
        )
    library = import_package("diffusers", "model.name")
    kind: Any = getattr(library, name)
    unknown = set(settings.options) - parameters_of(kind)
    if unknown:
        raise ConfigError(f"model.options: {name} has no {', '.join(sorted(unknown))}")
    try:
        inner = kind(**{key: value for key, value in config.items() if key in parameters_of(kind)})
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"model: diffusers refused to build {name} of this config.json: {error}"
        ) from error
    if settings.text_encoders:
        net = wrap_with_encoders(
            inner,
            len(data.classes),
            lambda name: build_encoder(settings.folder, settings.shape, name),
        )
    else:
        net = wrap(inner, len(data.classes))
    check_picture(data, net.channels)
    check_conditions(data, net)
    return {"net": net}


def read_weights(path: Path) -> dict[str, Tensor] | None:
    """Return the tensors of a pipeline's folder: its denoising network and CLIP text encoders. None for other paths."""
    return read_pipeline(path) if (path / "model_index.json").is_file() else None


def parameters_of(kind: Any) -> set[str]:
    """Return the names of the values that a class's config.json may have."""
    return set(inspect.signature(kind.__init__).parameters) - {"self"}


def check_picture(data: DataSpec, channels: int) -> None:
    """Refuse data of another number of channels than the network's."""
    name = "latent" if "latent" in data.fields else "image"
    found = data.require(name, "model diffusers").shape[0]
    if found != channels:
        advice = (
            "model.channels" if name == "image" else "the folder that the latents were made with"
        )
        raise ConfigError(
            f"model: the network sees {channels} channels, and the data's {name} has {found}; see {advice}"
        )


def check_conditions(data: DataSpec, net: LibraryDenoiser) -> None:
    """Refuse embeddings of another length than the network's; absent ones are the task's to refuse."""
    for name, features in net.features().items():
        found = data.fields[name].shape if name in data.fields else (features,)
        if name in net.conditions and found[-1:] != (features,):
            raise ConfigError(
                f"model: the network is given '{name}' of {features} features, and the data's is of shape "
                f"{list(found)}; prepare the data with the pipeline that the network is of"
            )


def network_config(settings: Settings) -> dict[str, Any]:
    """Return the content of config.json. Raises ConfigError if there is none to read."""
    if (settings.folder is None) == (settings.shape is None):
        raise ConfigError(
            "model: give diffusers a local folder (model.folder) or a published shape (model.shape)"
        )
    if settings.shape is not None:
        return dict(SHAPES[settings.shape])
    folder = Path(str(settings.folder)).expanduser()
    places = [folder / "config.json", *(folder / name / "config.json" for name in NETWORK_FOLDERS)]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise ConfigError(
            f"model.folder: {folder} has no config.json, nor have {' or '.join(NETWORK_FOLDERS)} in it; expected is a "
            "network's folder in diffusers' layout"
        )
    return read_mapping(path, "model.folder")
