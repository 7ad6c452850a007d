"""Models of other packages by name: `torchvision:resnet50`, `timm:NAME`, and `package.module:Name` of a granted
package.

Nothing in a YAML file imports code on its own: torchvision and timm are built in, any other package must be granted
on the command line (`--allow package`), which the config package has checked before this file is asked. A granted
callable gets the settings' `options` as keyword arguments, `num_classes` among them unless the options name it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import Field
from torch import nn

from mpt.config.options import ModelOptions
from mpt.errors import ConfigError
from mpt.seams import DataSpec

TASK = "classify"
RGB = 3
"""Channels that all of torchvision's classifiers are built for."""


class Settings(ModelOptions):
    """How to call the model's constructor."""

    image_size: int = Field(224, ge=8)
    """Side of the images in pixels; models that are made for one size (vision transformers) are made for this one."""
    channels: int = Field(3, ge=1)
    """Channels of the images; torchvision's networks get another first convolution if they are not 3."""
    small_stem: bool = False
    """For torchvision's ResNets on small images: a 3x3 stem of stride 1 and no max-pooling."""
    options: dict[str, str | int | float | bool | list[str | int | float | bool] | None] = Field(
        default_factory=dict
    )
    """Keyword arguments of the model's constructor: numbers, names, or lists of them."""


def build(settings: Settings, data: DataSpec, name: str) -> dict[str, nn.Module]:
    """Build `net` by its full name ("torchvision:resnet50").

    Raises ConfigError for an unknown name or refused options.
    """
    package, _, attribute = name.partition(":")
    options: dict[str, Any] = dict(settings.options)
    if package == "torchvision":
        net = _torchvision(
            attribute, settings.image_size, {"num_classes": len(data.classes), **options}
        )
        if settings.channels != RGB:
            _take_channels(net, name, settings.channels)
    elif package == "timm":
        given = {"num_classes": len(data.classes), "in_chans": settings.channels, **options}
        net = _timm(attribute, settings.image_size, given)
    else:
        net = _granted(package, attribute, len(data.classes), options)
    if settings.small_stem:
        if not hasattr(net, "conv1") or not hasattr(net, "maxpool"):
            raise ConfigError(
                f"model.small_stem: {name} has no ResNet stem (conv1, maxpool) to replace"
            )
        width = int(net.conv1.out_channels)  # type: ignore[arg-type, union-attr]
        net.conv1 = nn.Conv2d(settings.channels, width, 3, padding=1, bias=False)
        net.maxpool = nn.Identity()
    return {"net": net}


def published_scaling(name: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return the mean and standard deviation of images for which a library publishes weights; None if it has none.

    Both are in the library itself: nothing is downloaded.
    """
    from mpt import vision_ops

    torchvision = vision_ops.import_torchvision()
    package, _, attribute = name.partition(":")
    if package == "torchvision":
        preset = torchvision.models.get_model_weights(attribute).DEFAULT.transforms()
        return tuple(preset.mean), tuple(preset.std)
    if package == "timm":
        import timm

        published = timm.models.get_pretrained_cfg(attribute)
        return None if published is None else (tuple(published.mean), tuple(published.std))
    return None


def _call(name: str, constructor: Any, options: dict[str, Any], is_own: bool = False) -> nn.Module:
    try:
        net = constructor(**options)
    except (TypeError, ValueError) as error:
        if is_own and error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # in the constructor itself, of which its author wants to know the line
        raise ConfigError(f"model.options: {name} refused {options}: {error}") from error
    if not isinstance(net, nn.Module):
        raise ConfigError(f"model.name: {name} made a {type(net).__name__}, not a torch.nn.Module")
    return net


def _nearest(names: Sequence[str]) -> str:
    return f"; nearest: {', '.join(names)}" if names else ""


def _torchvision(attribute: str, image_size: int, options: dict[str, Any]) -> nn.Module:
    from mpt import vision_ops

    vision_ops.import_torchvision()
    import torchvision

    if attribute not in torchvision.models.list_models(module=torchvision.models):
        near = get_close_matches(
            attribute, torchvision.models.list_models(module=torchvision.models), 3
        )
        raise ConfigError(
            f"model.name: torchvision has no classifier {attribute!r}{_nearest(near)}"
        )
    # the others take any size, or a size by another name
    if attribute.startswith("vit_") and image_size != 224:
        options = {"image_size": image_size, **options}
    return _call(
        f"torchvision:{attribute}", torchvision.models.get_model_builder(attribute), options
    )


def _take_channels(net: nn.Module, name: str, channels: int) -> None:
    """Replace the first convolution by one of that many channels. Raises ConfigError if there is none to replace."""
    for path, layer in net.named_modules():
        if isinstance(layer, nn.Conv2d) and layer.in_channels == RGB:
            made = nn.Conv2d(
                channels,
                layer.out_channels,
                layer.kernel_size,  # type: ignore[arg-type]
                layer.stride,  # type: ignore[arg-type]
                layer.padding,  # type: ignore[arg-type]
                layer.dilation,  # type: ignore[arg-type]
                bias=layer.bias is not None,
            )
            net.set_submodule(path, made)
            return
    raise ConfigError(f"model.channels: {name} has no convolution of {RGB} channels to replace")


def _timm(attribute: str, image_size: int, options: dict[str, Any]) -> nn.Module:
    try:
        from mpt import vision_ops

        vision_ops.import_torchvision()
        import timm
    except ImportError as error:
        raise ConfigError(
            "model.name: timm is not installed; `pip install timm` adds it"
        ) from error
    if not timm.is_model(attribute):
        names = timm.list_models()
        near = [name for name in names if attribute in name][:3] or get_close_matches(
            attribute, names, 3, cutoff=0.5
        )
        raise ConfigError(f"model.name: timm has no model {attribute!r}{_nearest(near)}")
    published = timm.models.get_pretrained_cfg(attribute)
    if (
        published is not None
        and published.fixed_input_size
        and published.input_size[-1] != image_size
    ):
        # position embeddings and windows are made for one size
        options = {"img_size": image_size, **options}
    return _call(
        f"timm:{attribute}",
        lambda **kw: timm.create_model(attribute, pretrained=False, **kw),
        options,
    )


def _granted(module_name: str, attribute: str, classes: int, options: dict[str, Any]) -> nn.Module:
    try:
        constructor = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"model.name: cannot find {attribute!r} in {module_name!r}: {error}"
        ) from error
    accepts = inspect.signature(constructor).parameters
    if "num_classes" in accepts or any(p.kind is p.VAR_KEYWORD for p in accepts.values()):
        options = {"num_classes": classes, **options}
    return _call(f"{module_name}:{attribute}", constructor, options, is_own=True)
