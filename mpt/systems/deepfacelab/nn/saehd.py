"""SAEHD: a shared face encoder, an intermediate code, and decoders that redraw either of two identities with a mask.

The structure is DeepFaceLab's, written from its facts (layer sizes, activations, names), so that weights travel both
ways (`leras_weights`). Options of `archi`, after the dash: `u` normalises the flat encoding, `d` draws twice
the resolution from four convolutions, `t` adds a stage and residuals, `c` uses x*cos(x) for the leaky rectifier.

Three things differ from the published code without changing a value. depth_to_space is `pixel_shuffle`, the
convolution before it having its outputs permuted. The shuffle comes before the activation, which is elementwise. And
the rectifier keeps its output for the backward pass instead of its input: the next convolution
keeps that output anyway, so a stage holds one tensor where it held three. Images are RGB in [0, 1]; DeepFaceLab's are
BGR, which the conversion turns round.

Shapes: b batch, c channels, h height, w width, f flat features.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from mpt.config.options import ModelOptions
from mpt.seams import DataSpec
from mpt.systems.deepfacelab.nn.shared.patch_discriminator import PatchDiscriminator
from mpt.systems.deepfacelab.nn.shared.saehd_layers import (
    Convolution,
    Dense,
    Downscale,
    Residual,
    Upscale,
)

TASK = "face_swap"


class Settings(ModelOptions):
    """DeepFaceLab's options of the same meaning: image_size is its resolution; the rest have their names."""

    archi: str = "df-ud"
    """Architecture: `df` or `liae`, optionally a dash and any of the letters u, d, t, c."""
    image_size: int = Field(128, ge=64, le=640)
    channels: Literal[3] = 3
    ae_dims: int = Field(256, ge=1)
    """Channels of the intermediate code."""
    e_dims: int = Field(64, ge=1)
    """Base channels of the encoder."""
    d_dims: int = Field(64, ge=1)
    """Base channels of the decoders."""
    d_mask_dims: int = Field(22, ge=1)
    """Base channels of the mask decoders."""
    true_face_power: float = Field(0.0, ge=0.0, le=1.0)
    """Weight of the code discriminator's loss (`df` only); 0 builds no code discriminator."""
    gan_power: float = Field(0.0, ge=0.0, le=5.0)
    """Weight of the patch discriminator's loss; 0 builds no patch discriminator."""
    gan_patch_size: int | None = Field(None, ge=3, le=640)
    """Patch size of the patch discriminator in pixels; null is `image_size` / 8."""
    gan_dims: int = Field(16, ge=4, le=512)
    """Base channels of the patch discriminator."""

    @model_validator(mode="after")
    def check_archi_and_size(self) -> Settings:
        family, _, options = self.archi.partition("-")
        if (
            family not in ("df", "liae")
            or set(options) - set("udtc")
            or len(set(options)) != len(options)
        ):
            raise ValueError(
                f"archi is {self.archi!r}; write df or liae, optionally a dash and any of the letters u d t c, "
                "each once, for example df-ud or liae-udt"
            )
        step = 32 if set(options) & set("dt") else 16
        if self.image_size % step:
            following = -(-self.image_size // step) * step
            raise ValueError(
                f"image_size {self.image_size} is not a multiple of {step}, which archi {self.archi} needs; "
                f"the next legal one is {following}"
            )
        if self.true_face_power and family != "df":
            raise ValueError(
                "true_face_power needs a df archi: liae has no separate codes to tell apart; set it to 0"
            )
        return self

    @property
    def family(self) -> str:
        return self.archi.partition("-")[0]

    @property
    def options(self) -> str:
        return self.archi.partition("-")[2]

    @property
    def lowest_size(self) -> int:
        """Side of the intermediate code before its upscaling."""
        return self.image_size // (32 if "d" in self.options else 16)

    @property
    def code_size(self) -> int:
        """Side of the code that the decoders receive."""
        return self.lowest_size if "t" in self.options else self.lowest_size * 2


class Face(NamedTuple):
    """A drawn face (b 3 h w) and its mask (b 1 h w), both in [0, 1]."""

    image: Tensor
    mask: Tensor


class Encoder(nn.Module):
    """Fold an image into one vector by four (with `t` five) strided convolutions."""

    def __init__(self, width: int, options: str) -> None:
        super().__init__()
        self.normalized = "u" in options
        cosine = "c" in options
        if "t" in options:
            self.down1: nn.Module = Downscale(3, width, cosine)
            self.res1 = Residual(width, cosine)
            self.down2 = Downscale(width, width * 2, cosine)
            self.down3 = Downscale(width * 2, width * 4, cosine)
            self.down4 = Downscale(width * 4, width * 8, cosine)
            self.down5 = Downscale(width * 8, width * 8, cosine)
            self.res5 = Residual(width * 8, cosine)
        else:
            widths = [3, width, width * 2, width * 4, width * 8]
            self.down1 = nn.Sequential(
                *(Downscale(widths[i], widths[i + 1], cosine) for i in range(4))
            )

    def forward(self, image_bchw: Tensor) -> Tensor:
        x = image_bchw
        for stage in self.children():
            x = stage(x)
        flat_bf = x.flatten(1)
        if self.normalized:
            # The sum of squares over up to 10^6 features leaves float16's range, so the norm is taken in float32.
            norm = torch.rsqrt(flat_bf.float().square().mean(dim=1, keepdim=True) + 1e-6)
            flat_bf = (flat_bf.float() * norm).to(flat_bf.dtype)
        return flat_bf


class Inter(nn.Module):
    """Squeeze the encoding through `code` features and unfold it as a small image."""

    def __init__(self, features: int, code: int, channels: int, size: int, options: str) -> None:
        super().__init__()
        self.shape = (channels, size, size)
        self.dense1 = Dense(features, code)
        self.dense2 = Dense(code, channels * size * size)
        self.upscale1 = None if "t" in options else Upscale(channels, channels, "c" in options)

    def forward(self, flat_bf: Tensor) -> Tensor:
        x: Tensor = self.dense2(self.dense1(flat_bf)).reshape(-1, *self.shape)
        if self.upscale1 is not None:
            x = self.upscale1(x)
        return x


class Decoder(nn.Module):
    """Draw a face and its mask from a code, by two branches that share nothing."""

    def __init__(self, channels: int, width: int, mask_width: int, options: str) -> None:
        super().__init__()
        cosine, self.doubled = "c" in options, "d" in options
        factors = (8, 8, 4, 2) if "t" in options else (8, 4, 2)
        self.stages = len(factors)
        widths = [channels, *(width * factor for factor in factors)]
        for index, (before, after) in enumerate(pairwise(widths)):
            self.add_module(f"upscale{index}", Upscale(before, after, cosine))
        for index, after in enumerate(widths[1:]):
            self.add_module(f"res{index}", Residual(after, cosine))
        mask_widths = [
            channels,
            *(mask_width * factor for factor in factors),
            *([mask_width] if self.doubled else []),
        ]
        self.mask_stages = len(mask_widths) - 1
        for index, (before, after) in enumerate(pairwise(mask_widths)):
            self.add_module(f"upscalem{index}", Upscale(before, after, cosine))
        self.out_conv = Convolution(widths[-1], 3, 1)
        if self.doubled:
            self.out_conv1 = Convolution(widths[-1], 3, 3)
            self.out_conv2 = Convolution(widths[-1], 3, 3)
            self.out_conv3 = Convolution(widths[-1], 3, 3)
        self.out_convm = Convolution(mask_widths[-1], 1, 1)

    def forward(self, code_bchw: Tensor) -> Face:
        x = code_bchw
        for index in range(self.stages):
            x = self.get_submodule(f"res{index}")(self.get_submodule(f"upscale{index}")(x))
        if self.doubled:
            # The four convolutions are the pixels (0,0) (0,1) (1,0) (1,1) of each 2x2 square.
            pixels = [self.out_conv(x), self.out_conv1(x), self.out_conv2(x), self.out_conv3(x)]
            image = F.pixel_shuffle(torch.stack(pixels, dim=2).flatten(1, 2), 2)
        else:
            image = self.out_conv(x)
        mask = code_bchw
        for index in range(self.mask_stages):
            mask = self.get_submodule(f"upscalem{index}")(mask)
        return Face(torch.sigmoid(image), torch.sigmoid(self.out_convm(mask)))


class DFAutoencoder(nn.ModuleDict):
    """One encoder and code, a decoder per identity: a swap is the destination's code through the source's decoder.

    A ModuleDict is networks that are trained together, each called alone.
    """

    def __init__(self, settings: Settings) -> None:
        inter = (
            encoded_features(settings),
            settings.ae_dims,
            settings.ae_dims,
            settings.lowest_size,
            settings.options,
        )
        decoder = (settings.ae_dims, settings.d_dims, settings.d_mask_dims, settings.options)
        super().__init__(
            {
                "encoder": Encoder(settings.e_dims, settings.options),
                "inter": Inter(*inter),
                "decoder_src": Decoder(*decoder),
                "decoder_dst": Decoder(*decoder),
            }
        )

    def encode_src(self, image: Tensor) -> Tensor:
        code: Tensor = self["inter"](self["encoder"](image))
        return code

    encode_dst = encode_swap = encode_src

    def draw_src(self, code: Tensor) -> Face:
        face: Face = self["decoder_src"](code)
        return face

    draw_swap = draw_src

    def draw_dst(self, code: Tensor) -> Face:
        face: Face = self["decoder_dst"](code)
        return face


class LIAEAutoencoder(nn.ModuleDict):
    """Two codes and one decoder: `inter_AB` serves both identities, `inter_B` the destination alone."""

    def __init__(self, settings: Settings) -> None:
        channels = settings.ae_dims * 2
        inter = (
            encoded_features(settings),
            settings.ae_dims,
            channels,
            settings.lowest_size,
            settings.options,
        )
        super().__init__(
            {
                "encoder": Encoder(settings.e_dims, settings.options),
                "inter_AB": Inter(*inter),
                "inter_B": Inter(*inter),
                "decoder": Decoder(
                    channels * 2, settings.d_dims, settings.d_mask_dims, settings.options
                ),
            }
        )

    def encode_src(self, image: Tensor) -> Tensor:
        shared = self["inter_AB"](self["encoder"](image))
        return torch.cat((shared, shared), dim=1)

    encode_swap = encode_src

    def encode_dst(self, image: Tensor) -> Tensor:
        flat = self["encoder"](image)
        return torch.cat((self["inter_B"](flat), self["inter_AB"](flat)), dim=1)

    def draw_src(self, code: Tensor) -> Face:
        face: Face = self["decoder"](code)
        return face

    draw_dst = draw_swap = draw_src


class CodeDiscriminator(nn.Module):
    """Distinguish the two identities' codes; the source's code learns to pass for the destination's ("true face")."""

    def __init__(self, channels: int, code_size: int, width: int = 256) -> None:
        super().__init__()
        stages = 1 + code_size // 8
        widths = [channels, *(width * min(2**index, 8) for index in range(stages))]
        self.convs = nn.ModuleList(
            Convolution(widths[index], widths[index + 1], 4 if index == 0 else 3, stride=2)
            for index in range(stages)
        )
        self.out_conv = Convolution(widths[-1], 1, 1)

    def forward(self, code_bchw: Tensor) -> Tensor:
        x = code_bchw
        for convolution in self.convs:
            x = F.leaky_relu(convolution(x), 0.1)
        logits: Tensor = self.out_conv(x)
        return logits


def build(settings: Settings, data: DataSpec) -> dict[str, nn.Module]:
    """Return `autoencoder`, and the discriminators whose power is not zero. Pretraining has no patch discriminator, and
    a code discriminator that is not trained.
    """
    pretrains = bool(data.extra.get("pretrain"))
    modules: dict[str, nn.Module] = {
        "autoencoder": DFAutoencoder(settings)
        if settings.family == "df"
        else LIAEAutoencoder(settings)
    }
    if settings.true_face_power:
        modules["code_discriminator"] = CodeDiscriminator(settings.ae_dims, settings.code_size)
    if settings.gan_power and not pretrains:
        patch_size = settings.gan_patch_size or settings.image_size // 8
        modules["patch_discriminator"] = PatchDiscriminator(patch_size, 3, settings.gan_dims)
    return modules


def units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the repeated stages, in the order they run, for recomputation."""
    for child in module.modules():
        if isinstance(child, Downscale | Upscale | Residual):
            yield child


def encoded_features(settings: Settings) -> int:
    """Return the length of the encoder's vector."""
    side = settings.image_size // (32 if "t" in settings.options else 16)
    return settings.e_dims * 8 * side * side
