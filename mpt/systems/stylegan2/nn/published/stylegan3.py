"""StyleGAN3's generator for inference: Fourier features, modulated convolutions, and activations between filters.

It is built from a network pickle, whose modules hold their sizes, factors, paddings and filters, so nothing is designed
here. Float32 only, in plain PyTorch: the nonlinearity between upsampling and downsampling is not fused.

Source: Karras et al. 2021, "Alias-free generative adversarial networks".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpt.systems.stylegan2.nn.shared.mapping import Mapping as StyleMapping
from mpt.systems.stylegan2.nn.shared.stylegan2_layers import EqualLinear

State = Mapping[str, Any]


class Features(nn.Module):
    """Map a style (b, d) to Fourier features (b, c, h, w), rotated and shifted as the style says."""

    freqs: Tensor
    phases: Tensor
    transform: Tensor

    def __init__(self, state: State, style_size: int, size: int) -> None:
        super().__init__()
        channels = int(state["channels"])
        self.size, self.rate, self.bandwidth = (
            size,
            float(state["sampling_rate"]),
            float(state["bandwidth"]),
        )
        self.weight = nn.Parameter(torch.empty(channels, channels))
        self.affine = EqualLinear(style_size, 4)
        for name, shape in (
            ("transform", (3, 3)),
            ("freqs", (channels, 2)),
            ("phases", (channels,)),
        ):
            self.register_buffer(name, torch.empty(shape))

    def forward(self, style_bd: Tensor) -> Tensor:
        motion = self.affine(style_bd)
        cos, sin, x, y = (motion / motion[:, :2].norm(dim=1, keepdim=True)).unbind(1)
        zero, one = torch.zeros_like(cos), torch.ones_like(cos)
        rotation = matrix([[cos, -sin, zero], [sin, cos, zero], [zero, zero, one]])
        shift = matrix([[one, zero, -x], [zero, one, -y], [zero, zero, one]])
        moved = rotation @ shift @ self.transform
        phases_bc = self.phases + (self.freqs @ moved[:, :2, 2:]).squeeze(2)
        freqs_bcx = self.freqs @ moved[:, :2, :2]
        beyond = (freqs_bcx.norm(dim=2) - self.bandwidth) / (self.rate / 2 - self.bandwidth)
        amplitudes_bc = (1 - beyond).clamp(0, 1)
        place = (
            torch.arange(self.size, device=style_bd.device) + 0.5
        ) / self.rate - 0.5 * self.size / self.rate
        grid_hwx = torch.stack(torch.meshgrid(place, place, indexing="xy"), -1)
        angle = torch.einsum("hwx,bcx->bhwc", grid_hwx, freqs_bcx) + phases_bc[:, None, None]
        waves = torch.sin(2 * math.pi * angle) * amplitudes_bc[:, None, None]
        features: Tensor = waves @ (self.weight / math.sqrt(len(self.weight))).T
        return features.permute(0, 3, 1, 2)


class Layer(nn.Module):
    """A modulated convolution, then bias and leaky ReLU at a higher rate between two filters."""

    up_filter: Tensor | None
    down_filter: Tensor | None
    magnitude_ema: Tensor

    def __init__(self, state: State, style_size: int, filters: Mapping[str, Tensor | None]) -> None:
        super().__init__()
        inputs, outputs, kernel = (
            int(state[name]) for name in ("in_channels", "out_channels", "conv_kernel")
        )
        self.is_image, self.clamp = bool(state["is_torgb"]), state["conv_clamp"]
        self.up, self.down = int(state["up_factor"]), int(state["down_factor"])
        self.padding = [int(side) for side in state["padding"]]
        self.affine = EqualLinear(style_size, inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs, kernel, kernel))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.register_buffer("magnitude_ema", torch.empty(()))
        for name, value in filters.items():
            self.register_buffer(name, value)

    def forward(self, x_bchw: Tensor, style_bd: Tensor) -> Tensor:
        style: Tensor = self.affine(style_bd)
        weight: Tensor = self.weight
        kernel = weight.shape[-1]
        if self.is_image:
            y = style / math.sqrt(weight[0].numel())
        else:
            weight = weight * weight.square().mean((1, 2, 3), keepdim=True).rsqrt()
            y = style = style * style.square().mean().rsqrt()
        x = F.conv2d(
            x_bchw * (y * self.magnitude_ema.rsqrt())[:, :, None, None], weight, padding=kernel - 1
        )
        if not self.is_image:
            energy_oi = weight.square().sum((2, 3))
            x = x * (style.square() @ energy_oi.T + 1e-8).rsqrt()[:, :, None, None]
        x = x + self.bias[:, None, None]
        x = resample(x, self.up_filter, up=self.up, padding=self.padding)
        if not self.is_image:
            x = F.leaky_relu(x, 0.2) * math.sqrt(2)
        if self.clamp is not None:
            x = x.clamp(-self.clamp, self.clamp)
        return resample(x, self.down_filter, down=self.down)


class AliasFreeGenerator(nn.Module):
    """StyleGAN3: latents to images, with `mapping` and `synthesis` apart as truncation and mixing need them."""

    def __init__(
        self, arguments: State, states: Mapping[str, State], tensors: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        style_size, self.latent_size, self.classes = (
            arguments[name] for name in ("w_dim", "z_dim", "c_dim")
        )
        mapping, synthesis = states["mapping"], states["synthesis"]
        sizes = (self.latent_size, style_size, int(mapping["num_layers"]))
        self.mapping = StyleMapping(*sizes, classes=self.classes, tracks_mean=True)
        first = states["synthesis.input"]
        self.names = [str(name) for name in synthesis["layer_names"]]
        self.scale, self.style_count = float(synthesis["output_scale"]), len(self.names) + 1
        margin = 2 * int(synthesis["margin_size"])
        self.features = Features(first, style_size, int(float(first["sampling_rate"])) + margin)
        self.layers = nn.ModuleList(
            Layer(
                states[f"synthesis.{name}"], style_size, filters_of(tensors, f"synthesis.{name}.")
            )
            for name in self.names
        )

    def synthesis(self, style_bld: Tensor, noise_bn: Tensor | None = None) -> Tensor:
        """Return images (b, c, h, w), about -1 to 1. There is no noise in this network."""
        first, *others = style_bld.float().unbind(1)
        x = self.features(first)
        for layer, style in zip(self.layers, others, strict=True):
            x = layer(x, style)
        image: Tensor = x * self.scale
        return image


def filters_of(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor | None]:
    """Return a layer's two filters; None if its rate does not change."""
    return {name: tensors.get(f"{prefix}{name}") for name in ("up_filter", "down_filter")}


def resample(
    x_bchw: Tensor,
    taps: Tensor | None,
    up: int = 1,
    down: int = 1,
    padding: list[int] | None = None,
) -> Tensor:
    """Return x with zeros between its pixels, padded (left, right, top, bottom; cropped below 0), filtered and thinned.

    `taps` of one dimension are used in both directions.
    """
    count, channels, height, width = x_bchw.shape
    x = x_bchw
    if up > 1:
        spread = x.new_zeros(count, channels, height, up, width, up)
        spread[:, :, :, 0, :, 0] = x
        x = spread.reshape(count, channels, height * up, width * up)
    x = F.pad(x, padding or [0, 0, 0, 0])
    if taps is not None:
        taps = taps.flip(tuple(range(taps.ndim))) * up ** (1 if taps.ndim == 1 else 2)
        shapes = [(1, -1), (-1, 1)] if taps.ndim == 1 else [tuple(taps.shape)]
        for shape in shapes:
            kernel = taps.reshape(shape).expand(channels, 1, -1, -1)
            x = F.conv2d(x, kernel.to(x.dtype), groups=channels)
    return x[:, :, ::down, ::down]


def matrix(rows: list[list[Tensor]]) -> Tensor:
    """Return (b, rows, columns) of entries (b,)."""
    return torch.stack([torch.stack(row, dim=1) for row in rows], dim=1)


def to_ours(tensors: Mapping[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """Return the original's tensors by our names."""
    renamed = {"mapping.w_avg": "mapping.average"}
    places = {
        "synthesis.input.": "features.",
        **{f"synthesis.{one}.": f"layers.{i}." for i, one in enumerate(names)},
    }
    found = {}
    for name, value in tensors.items():
        if name.startswith("mapping.fc"):
            name = f"mapping.layers.{name.removeprefix('mapping.fc')}"
        for theirs, ours in places.items():
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
                break
        found[renamed.get(name, name)] = value
    return found
