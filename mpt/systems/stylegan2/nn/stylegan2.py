"""StyleGAN2 from 16 to 1024 pixels: a mapping network, a synthesis network with skip connections, a residual
discriminator.

Half precision is designed in: `set_half` gives the highest `num_fp16_res` resolutions a lower dtype, never the
lowest; the image is accumulated, and the mapping and the discriminator's last layers run, in float32. That is what
`precision.mode: native` switches on; under the other modes blocks follow their input. The noise of the synthesis
layers is an argument, so that one draw serves a whole batch however it is split. The mean style for truncation is
computed from the weights when it is needed, so it cannot lag behind them; with `published` it is the running mean that
the paper's program tracks, which its files hold.

NVIDIA's network pickles are read by `mpt.systems.stylegan2.nn.weights`. Not here: projection, and the fused CUDA
kernels of the original.
Source: Karras et al. 2020 (StyleGAN2), configuration F, and Karras et al. 2020 (ADA) for sizes by resolution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping as Names
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor, nn

from mpt.config.options import ModelOptions
from mpt.errors import ConfigError
from mpt.nn.shared.generative_bodies import check_image
from mpt.seams import DataSpec
from mpt.systems.stylegan2.nn.shared.mapping import Mapping
from mpt.systems.stylegan2.nn.shared.resampling import Blur
from mpt.systems.stylegan2.nn.shared.stylegan2_layers import (
    EqualConv,
    EqualLinear,
    StyledConv,
    ToImage,
    batch_deviation,
)

TASK = "stylegan2"
CLASS_LAYERS = 8
"""Layers by which the discriminator maps labels."""
SIZES = (16, 32, 64, 128, 256, 512, 1024)
MEAN_STYLE_SEED = 0x7374796C65
"""No run's seed: with that, the first latents would equal the weights of the mapping's first layer."""


class Settings(ModelOptions):
    image_size: int = 256
    """16, 32, ... 1024."""
    channels: int = Field(3, ge=1, le=4)
    latent_size: int = Field(512, ge=1)
    """Length of the latent vector."""
    style_size: int = Field(512, ge=1)
    """Length of the style vector."""
    mapping_layers: int = Field(8, ge=1)
    """Layers of the mapping network."""
    channel_base: int = Field(16384, ge=64)
    """A block at resolution r has channel_base / r channels: 32768 for 512 pixels and more, 16384 below."""
    channel_max: int = Field(512, ge=4)
    """Largest number of channels of a block."""
    num_fp16_res: int = Field(4, ge=0)
    """How many of the highest resolutions run in half under `precision.mode: native`."""
    conv_clamp: float | None = Field(256.0, gt=0)
    """Limit of every convolution's output."""
    classes: int = Field(0, ge=0)
    """Number of classes whose labels condition both networks; 0: labels are not used."""
    deviation_group: int = Field(4, ge=1)
    """Samples over which the discriminator's deviation of the batch is taken."""
    published: bool = False
    """Keep the further state of NVIDIA's files: the running mean of styles, for truncation, and fixed noise."""

    def width(self, resolution: int) -> int:
        """Return the number of channels at a resolution."""
        return max(min(self.channel_base // resolution, self.channel_max), 1)

    def resolutions(self) -> list[int]:
        """Return 4, 8, ... image_size."""
        return [2**power for power in range(2, int(math.log2(self.image_size)) + 1)]


class SynthesisBlock(nn.Module):
    """One resolution: an upsampling layer (not at 4 pixels), another layer, and its share of the image."""

    half_dtype: torch.dtype | None = None

    def __init__(self, settings: Settings, resolution: int) -> None:
        super().__init__()
        width, style, limit = settings.width(resolution), settings.style_size, settings.conv_clamp
        self.first: StyledConv | None = None
        if resolution > 4:
            self.first = StyledConv(
                settings.width(resolution // 2), width, style, doubles=True, clamp=limit
            )
        self.second = StyledConv(width, width, style, clamp=limit)
        self.to_image = ToImage(width, settings.channels, style, clamp=limit)
        self.blur = Blur()
        self.layers = 1 if resolution == 4 else 2

    def forward(
        self, x: Tensor, image: Tensor | None, style_bld: Tensor, noise: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """`style_bld` holds a style per convolution and one for the image, `noise` one per convolution."""
        if self.half_dtype is not None:
            x = x.to(self.half_dtype)
        if self.first is not None:
            x = self.first(x, style_bld[:, 0], noise[0])
        x = self.second(x, style_bld[:, self.layers - 1], noise[-1])
        part = self.to_image(x, style_bld[:, self.layers])
        return x, part if image is None else self.blur.upsample(image) + part


class Synthesis(nn.Module):
    """Map one style per layer (b, layers, style) and the layers' noise to an image (b, c, h, w) in float32."""

    fixed_noise: Tensor | None

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.resolutions = settings.resolutions()
        self.constant = nn.Parameter(torch.randn(settings.width(4), 4, 4))
        self.blocks = nn.ModuleList(
            SynthesisBlock(settings, resolution) for resolution in self.resolutions
        )
        self.style_count = 2 * len(self.resolutions)
        self.noise_shapes = [
            size for size in self.resolutions for _ in range(1 if size == 4 else 2)
        ]
        self.register_buffer(
            "fixed_noise", torch.randn(self.noise_size) if settings.published else None
        )

    @property
    def noise_size(self) -> int:
        """Return how many random numbers one sample's noise takes."""
        return sum(size**2 for size in self.noise_shapes)

    def forward(self, style_bld: Tensor, noise_bn: Tensor | None = None) -> Tensor:
        noise = self._split_noise(noise_bn)
        x = self.constant.expand(len(style_bld), -1, -1, -1)
        image: Tensor | None = None
        layer = 0
        for block in self.blocks:
            assert isinstance(block, SynthesisBlock)
            styles = style_bld[:, layer : layer + block.layers + 1]
            x, image = block(x, image, styles, noise[layer : layer + block.layers])
            # the style of one block's image is also that of the next block's first layer
            layer += block.layers
        assert image is not None
        return image

    def _split_noise(self, noise_bn: Tensor | None) -> list[Tensor | None]:
        if noise_bn is None:
            return [None] * len(self.noise_shapes)
        pieces = torch.split(noise_bn, [size**2 for size in self.noise_shapes], dim=1)
        return [
            piece.reshape(-1, 1, size, size)
            for piece, size in zip(pieces, self.noise_shapes, strict=True)
        ]


class Generator(nn.Module):
    """Map latents to images in [-1, 1], with style mixing in training and truncation in use."""

    image_range = (-1.0, 1.0)
    prior = "normal"

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.latent_size, self.classes = settings.latent_size, settings.classes
        sizes = (settings.latent_size, settings.style_size, settings.mapping_layers)
        self.mapping = Mapping(*sizes, classes=settings.classes, tracks_mean=settings.published)
        self.synthesis = Synthesis(settings)
        self.num_fp16_res = settings.num_fp16_res

    def set_half(self, dtype: torch.dtype) -> int:
        """Run the highest `num_fp16_res` resolutions in `dtype`; return how many that are."""
        return _set_half(
            self.synthesis.blocks, self.synthesis.resolutions, dtype, self.num_fp16_res
        )

    def styles(
        self,
        latent_bd: Tensor,
        other_bd: Tensor | None = None,
        crossover_b: Tensor | None = None,
        label_b: Tensor | None = None,
    ) -> Tensor:
        """Return one style per layer; from layer `crossover` on, those of the other latents."""
        count = self.synthesis.style_count
        style: Tensor = self.mapping(latent_bd, label_b).unsqueeze(1).expand(-1, count, -1)
        if other_bd is None or crossover_b is None:
            return style
        other = self.mapping(other_bd, label_b).unsqueeze(1).expand(-1, count, -1)
        first = torch.arange(count, device=latent_bd.device) < crossover_b.unsqueeze(1)
        mixed: Tensor = torch.where(first.unsqueeze(2), style, other)
        return mixed

    def forward(
        self,
        latent_bd: Tensor,
        noise_bn: Tensor | None = None,
        other_bd: Tensor | None = None,
        crossover_b: Tensor | None = None,
        mean_style_d: Tensor | None = None,
        truncation: float = 1.0,
        label_b: Tensor | None = None,
    ) -> Tensor:
        style = self.styles(latent_bd, other_bd, crossover_b, label_b)
        if mean_style_d is not None:
            style = truncated(style, mean_style_d, truncation)
        image: Tensor = self.synthesis(style, noise_bn)
        return image

    @torch.no_grad()
    def mean_style(self, samples: int = 4096, seed: int = MEAN_STYLE_SEED) -> Tensor:
        """Return the mean style (d,), towards which truncation moves: the tracked one, or that of fixed latents.

        The latents go through all classes in turn.
        """
        if self.mapping.average is not None:
            return self.mapping.average.float()
        numbers = torch.Generator().manual_seed(seed)
        device = self.synthesis.constant.device
        latents = torch.randn(samples, self.latent_size, generator=numbers).to(device)
        label = torch.arange(samples, device=device) % self.classes if self.classes else None
        mean: Tensor = self.mapping(latents, label).float().mean(0)
        return mean


def truncated(
    style_bld: Tensor, mean_d: Tensor, amount: float, cutoff: int | None = None
) -> Tensor:
    """Return the styles of the first `cutoff` layers (None: all) moved to the mean, by 1 - `amount` of the way."""
    moved = mean_d.to(style_bld.dtype).lerp(style_bld, amount)
    return moved if cutoff is None else torch.cat((moved[:, :cutoff], style_bld[:, cutoff:]), 1)


class DiscriminatorBlock(nn.Module):
    """A residual block that halves the resolution."""

    half_dtype: torch.dtype | None = None

    def __init__(self, settings: Settings, resolution: int) -> None:
        super().__init__()
        width, wider, limit = (
            settings.width(resolution),
            settings.width(resolution // 2),
            settings.conv_clamp,
        )
        self.first = EqualConv(width, width, 3, clamp=limit)
        self.second = EqualConv(width, wider, 3, halves=True, clamp=limit)
        # not clamped, as the original
        self.skip = EqualConv(width, wider, 1, halves=True, bias=False, activated=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.half_dtype is not None:
            x = x.to(self.half_dtype)
        half_power = math.sqrt(0.5)
        y: Tensor = self.second(self.first(x), gain=half_power) + self.skip(x, gain=half_power)
        return y


class Discriminator(nn.Module):
    """Judge images in [-1, 1] by one logit each (b,)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.resolutions = settings.resolutions()[::-1]
        width = settings.width(4)
        self.from_image = EqualConv(
            settings.channels, settings.width(settings.image_size), 1, clamp=settings.conv_clamp
        )
        self.blocks = nn.ModuleList(
            DiscriminatorBlock(settings, size) for size in self.resolutions[:-1]
        )
        self.last = EqualConv(width + 1, width, 3, clamp=settings.conv_clamp)
        self.hidden = EqualLinear(width * 16, width, activated=True)
        self.score = EqualLinear(width, width if settings.classes else 1)
        self.classes, self.deviation_group = settings.classes, settings.deviation_group
        self.mapping = (
            Mapping(0, width, CLASS_LAYERS, classes=settings.classes) if settings.classes else None
        )
        self.num_fp16_res = settings.num_fp16_res

    def set_half(self, dtype: torch.dtype) -> int:
        """Run the highest `num_fp16_res` resolutions in `dtype`; return how many that are."""
        return _set_half(self.blocks, self.resolutions[:-1], dtype, self.num_fp16_res)

    def forward(self, image_bchw: Tensor, label_b: Tensor | None = None) -> Tensor:
        dtype = self.blocks[0].half_dtype
        x = self.from_image(image_bchw if dtype is None else image_bchw.to(dtype))  # type: ignore[arg-type]
        for block in self.blocks:
            x = block(x)
        if dtype is not None:
            x = x.float()  # the deviation over the batch and the last layers stay in full precision
        x = self.last(batch_deviation(x, self.deviation_group))
        score: Tensor = self.score(self.hidden(x.flatten(1)))
        if self.mapping is None:
            return score.flatten()
        assert label_b is not None, "a conditional discriminator judges images by their labels"
        wanted = self.mapping(None, label_b)
        projected: Tensor = (score * wanted.to(score.dtype)).sum(1) / math.sqrt(wanted.shape[1])
        return projected


def _set_half(
    blocks: nn.ModuleList, resolutions: Sequence[int], dtype: torch.dtype, count: int
) -> int:
    """Give the blocks of the `count` highest resolutions a dtype, and the others float32; return how many got it.

    The 4-pixel block never does, and a `count` of 0 leaves everything as it is.
    """
    chosen = sorted((size for size in resolutions if size > 4), reverse=True)[:count]
    for block, resolution in zip(blocks, resolutions, strict=True):
        assert isinstance(block, SynthesisBlock | DiscriminatorBlock)
        block.half_dtype = (dtype if resolution in chosen else torch.float32) if chosen else None
    return len(chosen)


def build(settings: Settings, data: DataSpec) -> dict[str, nn.Module]:
    """Return "gen" and "disc"."""
    if settings.image_size not in SIZES:
        raise ConfigError(
            f"model.image_size: stylegan2 cannot make {settings.image_size} pixels; it can make "
            f"{', '.join(map(str, SIZES))}. Set one of them; the data set's images are resized to it."
        )
    check_image(data, settings.image_size, settings.channels, "stylegan2")
    if settings.classes and settings.classes != len(data.classes):
        raise ConfigError(
            f"model.classes: stylegan2 is to tell {settings.classes} classes apart, and the data have "
            f"{len(data.classes) or 'none'}; set their number, or 0 to leave labels out"
        )
    return {"gen": Generator(settings), "disc": Discriminator(settings)}


def read_weights(path: Path) -> dict[str, Tensor] | None:
    """Return the tensors of an NVIDIA network pickle by its names, "G_ema." and the like in front; None for others."""
    from mpt.systems.stylegan2.nn.weights.network_pickle import (
        is_network_pickle,
        read_network_pickle,
    )

    return read_network_pickle(path).tensors() if is_network_pickle(path) else None


def translate_weights(
    networks: Names[str, nn.Module], tensors: Names[str, Tensor]
) -> dict[str, Tensor] | None:
    """Return the tensors of an NVIDIA network by our names, at the resolutions that both have; None for others."""
    from mpt.systems.stylegan2.nn.weights.names import to_ours

    if not any(name.startswith(("G.", "D.", "G_ema.")) for name in tensors):
        return None
    return to_ours(networks["gen"].synthesis.resolutions, tensors)  # type: ignore[union-attr, arg-type]
