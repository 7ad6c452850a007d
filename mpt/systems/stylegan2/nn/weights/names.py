"""NVIDIA's names and settings for StyleGAN2's networks, and ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpt.errors import CheckpointError

CONVOLUTION = ("weight", "bias", "noise_strength", "affine.weight", "affine.bias")
LAYERS = {"conv0": "first", "conv1": "second", "torgb": "to_image"}
MOST_LAYERS = 64
"""Of a mapping network."""
DEFAULTS: dict[str, Any] = {
    "architecture": None,
    "activation": "lrelu",
    "resample_filter": [1, 3, 3, 1],
    "use_noise": True,
    "lr_multiplier": 0.01,
    "w_avg_beta": 0.995,
    "mbstd_num_channels": 1,
}
"""Settings of the original that have one value here; the architecture depends on the network."""
FREE = (
    "fp16_channels_last",
    "freeze_layers",
    "conv_clamp",
    "num_fp16_res",
    "class_name",
    "fused_modconv_default",
)
"""Settings that change no network that is read here."""
OUTER = (
    "z_dim",
    "c_dim",
    "w_dim",
    "img_resolution",
    "img_channels",
    "mapping_kwargs",
    "synthesis_kwargs",
)
"""Arguments of a generator; stylegan3's version of it takes those of its synthesis network alongside them."""
MAPPING_DEFAULTS = {"num_layers": 8, "embed_features": None, "layer_features": None}


def pairs(resolutions: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yield (their name, our name) of every tensor of generator and discriminator but the fixed noise."""
    yield "G.mapping.w_avg", "gen.mapping.average"
    for theirs, ours in (("G.mapping", "gen.mapping"), ("D.mapping", "disc.mapping")):
        for kind in ("weight", "bias"):
            yield f"{theirs}.embed.{kind}", f"{ours}.embed.{kind}"
            for layer in range(MOST_LAYERS):
                yield f"{theirs}.fc{layer}.{kind}", f"{ours}.layers.{layer}.{kind}"
    yield "G.synthesis.b4.const", "gen.synthesis.constant"
    for number, size in enumerate(resolutions):
        for theirs, ours in LAYERS.items():
            for kind in CONVOLUTION:
                yield (
                    f"G.synthesis.b{size}.{theirs}.{kind}",
                    f"gen.synthesis.blocks.{number}.{ours}.{kind}",
                )
    for number, size in enumerate(reversed(resolutions[1:])):
        for theirs, ours in (("conv0", "first"), ("conv1", "second"), ("skip", "skip")):
            for kind in ("weight", "bias"):
                yield f"D.b{size}.{theirs}.{kind}", f"disc.blocks.{number}.{ours}.{kind}"
    ends = {
        f"b{resolutions[-1]}.fromrgb": "from_image",
        "b4.conv": "last",
        "b4.fc": "hidden",
        "b4.out": "score",
    }
    for theirs, ours in ends.items():
        for kind in ("weight", "bias"):
            yield f"D.{theirs}.{kind}", f"disc.{ours}.{kind}"


def noise_names(resolutions: Sequence[int]) -> list[str]:
    """Return their names of the fixed noise, in the order of our one buffer."""
    layers = [(size, layer) for size in resolutions for layer in ((1,) if size == 4 else (0, 1))]
    return [f"G.synthesis.b{size}.conv{layer}.noise_const" for size, layer in layers]


def to_ours(resolutions: Sequence[int], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by our names: G as `gen`, D as `disc`, G_ema as `gen_ema`; those of other resolutions are left
    out.
    """
    found = {}
    for source, target in (("G", "gen"), ("G_ema", "gen_ema"), ("D", "disc")):
        kind = source[0]
        for theirs, ours in pairs(resolutions):
            name = f"{source}{theirs[1:]}"
            if theirs.startswith(f"{kind}.") and name in tensors:
                found[f"{target}.{ours.partition('.')[2]}"] = tensors[name]
        noise = [f"{source}{name[1:]}" for name in noise_names(resolutions)] if kind == "G" else []
        if noise and all(name in tensors for name in noise):
            found[f"{target}.synthesis.fixed_noise"] = torch.cat(
                [tensors[name].flatten() for name in noise]
            )
    return found


def to_theirs(resolutions: Sequence[int], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of `gen` and `disc`, by our names, under theirs ("G.", "D.")."""
    found = {theirs: tensors[ours] for theirs, ours in pairs(resolutions) if ours in tensors}
    noise = tensors.get("gen.synthesis.fixed_noise")
    if noise is not None:
        names = noise_names(resolutions)
        sizes = [int(name.split(".b")[1].partition(".")[0]) for name in names]
        pieces = torch.split(noise, [size**2 for size in sizes])
        found |= {
            name: piece.reshape(size, size)
            for name, piece, size in zip(names, pieces, sizes, strict=True)
        }
    return found


def settings_of(
    generator: Mapping[str, Any], discriminator: Mapping[str, Any] | None, where: str
) -> dict[str, Any]:
    """Return the settings of `model` for networks that were made with these arguments.

    Without a discriminator its own settings are left out. Raises CheckpointError for architectures that are not built.
    """
    flat = {name: value for name, value in generator.items() if name not in OUTER}
    synthesis = {**flat, **(generator.get("synthesis_kwargs") or {})}
    mapping = {**MAPPING_DEFAULTS, **(generator.get("mapping_kwargs") or {})}
    refuse_other(
        {**synthesis, **mapping}, "skip", ("channel_base", "channel_max", *MAPPING_DEFAULTS), where
    )
    if not {mapping["embed_features"], mapping["layer_features"]} <= {None, generator["w_dim"]}:
        raise CheckpointError(
            f"{where}: its mapping network has layers of several widths, which are not built here"
        )
    settings = {
        "name": "stylegan2",
        "published": True,
        "image_size": generator["img_resolution"],
        "channels": generator["img_channels"],
        "latent_size": generator["z_dim"],
        "style_size": generator["w_dim"],
        "classes": generator["c_dim"],
        "mapping_layers": mapping["num_layers"],
        "channel_base": synthesis.get("channel_base", 32768),
        "channel_max": synthesis.get("channel_max", 512),
        "num_fp16_res": synthesis.get("num_fp16_res", 0),
        "conv_clamp": synthesis.get("conv_clamp"),
    }
    if discriminator is not None:
        settings |= discriminator_settings(discriminator, settings, where)
    return settings


def discriminator_settings(
    arguments: Mapping[str, Any], own: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Return the settings that a discriminator adds to a generator's. Raises CheckpointError if it is built unlike."""
    epilogue = {"mbstd_group_size": 4, **(arguments.get("epilogue_kwargs") or {})}
    block = arguments.get("block_kwargs") or {}
    mapping = (arguments.get("mapping_kwargs") or {}) if own["classes"] else {}
    outer = {"architecture": arguments.get("architecture", "resnet")}
    refuse_other({**epilogue, **block, **outer}, "resnet", ("mbstd_group_size",), where)
    refuse_other(mapping, "", tuple(MAPPING_DEFAULTS), where)
    sizes = {
        "channel_base": arguments.get("channel_base", 32768),
        "channel_max": arguments.get("channel_max", 512),
    }
    if mapping.get("num_layers", 8) != 8 or any(
        own[name] != value for name, value in sizes.items()
    ):
        raise CheckpointError(
            f"{where}: its discriminator has other widths than its generator, which is not built here"
        )
    return {"deviation_group": epilogue["mbstd_group_size"] or 1 << 20}


def refuse_other(
    given: Mapping[str, Any], architecture: str, known: Sequence[str], where: str
) -> None:
    """Raise CheckpointError for a setting that these networks do not have, or have with one other value."""
    for name, value in given.items():
        if name in known or name in FREE:
            continue
        fixed = architecture if name == "architecture" else DEFAULTS.get(name)
        if name not in DEFAULTS or value != fixed:
            raise CheckpointError(
                f"{where}: it was made with {name}={str(value)[:40]}, and only {name}={fixed} is built here"
                if name in DEFAULTS
                else f"{where}: it was made with the setting {name[:40]}, which is not known here"
            )
