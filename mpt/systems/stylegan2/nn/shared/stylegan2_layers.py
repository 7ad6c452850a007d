"""The layers of StyleGAN2: equalised learning rate, modulation and demodulation, and measures for half precision.

Weights are kept with unit variance and scaled at their use. Four measures make the convolutions safe in
float16 without a loss scale: activations are clamped (`conv_clamp`), and if the arithmetic is float16 and
demodulation cancels the factor anyway, weights are divided by their largest entry per output channel and styles by
their largest per sample, and the demodulation coefficients are computed in float32. Every weight is cast to its
input's dtype at its use, so the same layers run under autocast, with half weights, or with a dtype per block
(`mpt.precision.native`).

Modulation scales the input and the output of one shared convolution instead of making a kernel per sample: the same
function, with less memory.

Shapes: b batch, c channels, h height, w width, d style dimension; o, i, k: a weight's outputs, inputs and kernel
size. Source: Karras et al. 2020 (StyleGAN2) sections 2-3; Karras et al. 2020 (ADA) appendix D for the half precision.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpt.systems.stylegan2.nn.shared.resampling import Blur


def activate(x: Tensor) -> Tensor:
    """Apply leaky ReLU with slope 0.2 and the gain that keeps the variance."""
    return F.leaky_relu(x, 0.2) * math.sqrt(2)


def computes_in_float16(x: Tensor) -> bool:
    """Return whether a convolution of x runs in float16, by its dtype or by autocast."""
    if x.dtype == torch.float16:
        return True
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return False
    return torch.get_autocast_dtype(device) == torch.float16


class Convolution(nn.Module):
    """A convolution with an activation and a clamp after it."""

    clamp: float | None
    is_differentiated_twice = False
    """Set while gradients are differentiated again: the activation then keeps the tensors of torch's own operators, so
    that second derivatives are added up in their order."""

    def finish(self, y: Tensor, gain: float = 1.0) -> Tensor:
        """Return the activation of the convolution's biased result."""
        if self.is_differentiated_twice:
            return activated_and_clamped(y, self.clamp, gain)
        return activate_and_clamp(y, self.clamp, gain)


class EqualLinear(nn.Module):
    """A linear layer whose weight is stored with deviation 1 / lr_multiplier and scaled at run time."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        lr_multiplier: float = 1.0,
        bias: float = 0.0,
        activated: bool = False,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / lr_multiplier)
        self.bias = nn.Parameter(torch.full((outputs,), bias / lr_multiplier))
        self.gain, self.lr_multiplier, self.activated = (
            lr_multiplier / math.sqrt(inputs),
            lr_multiplier,
            activated,
        )

    def forward(self, x_bd: Tensor) -> Tensor:
        weight, bias = (
            (self.weight * self.gain).to(x_bd.dtype),
            (self.bias * self.lr_multiplier).to(x_bd.dtype),
        )
        y = F.linear(x_bd, weight, bias)
        return activate(y) if self.activated else y


class EqualConv(Convolution):
    """A convolution of the discriminator, optionally filtered and strided to half the size, activated and clamped."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        halves: bool = False,
        bias: bool = True,
        activated: bool = True,
        clamp: float | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.scale, self.activated, self.clamp = 1 / math.sqrt(inputs * kernel**2), activated, clamp
        self.blur = Blur() if halves else None

    def forward(self, x_bchw: Tensor, gain: float = 1.0) -> Tensor:
        weight = (self.weight * self.scale).to(x_bchw.dtype)
        kernel = weight.shape[-1]
        if self.blur is None:
            y = F.conv2d(x_bchw, weight, padding=kernel // 2)
        elif kernel == 1:
            y = F.conv2d(self.blur.downsample(x_bchw), weight)
        else:
            y = F.conv2d(self.blur.filter(x_bchw, (2, 2, 2, 2)), weight, stride=2)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)[:, None, None]
        return self.finish(y, gain) if self.activated else clamp(y * gain, self.clamp, gain)


class StyledConv(Convolution):
    """A modulated convolution, optionally to twice the size, with noise, bias and activation."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        style_size: int,
        doubles: bool = False,
        clamp: float | None = None,
    ) -> None:
        super().__init__()
        self.affine = EqualLinear(style_size, inputs, bias=1.0)
        self.weight = nn.Parameter(torch.randn(outputs, inputs, 3, 3))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.noise_strength = nn.Parameter(torch.zeros(()))
        self.clamp = clamp
        self.blur = Blur() if doubles else None

    def forward(self, x_bchw: Tensor, style_bd: Tensor, noise_b1hw: Tensor | None) -> Tensor:
        style_bi, weight_oikk = self.affine(style_bd).float(), self.weight.float()
        if computes_in_float16(x_bchw):
            # Demodulation undoes both factors exactly; without them products of large styles leave float16's range.
            fan_in = weight_oikk[0].numel()
            weight_oikk = weight_oikk / (
                math.sqrt(fan_in) * weight_oikk.abs().amax((1, 2, 3), keepdim=True)
            )
            style_bi = style_bi / style_bi.abs().amax(1, keepdim=True)
        demodulation_bo = demodulate(weight_oikk, style_bi)
        x = x_bchw * style_bi.to(x_bchw.dtype)[:, :, None, None]
        weight = weight_oikk.to(x.dtype)
        if self.blur is None:
            y = F.conv2d(x, weight, padding=1)
        else:
            y = self.blur.filter(
                F.conv_transpose2d(x, weight.transpose(0, 1), stride=2), (1, 1, 1, 1), gain=4.0
            )
        y = y * demodulation_bo.to(y.dtype)[:, :, None, None]
        if noise_b1hw is not None:
            y = y + (noise_b1hw * self.noise_strength).to(y.dtype)
        return self.finish(y + self.bias.to(y.dtype)[:, None, None])


class ToImage(nn.Module):
    """A modulated 1x1 convolution to image channels, without demodulation; its output is float32."""

    def __init__(
        self, inputs: int, channels: int, style_size: int, clamp: float | None = None
    ) -> None:
        super().__init__()
        self.affine = EqualLinear(style_size, inputs, bias=1.0)
        self.weight = nn.Parameter(torch.randn(channels, inputs, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.scale, self.clamp = 1 / math.sqrt(inputs), clamp

    def forward(self, x_bchw: Tensor, style_bd: Tensor) -> Tensor:
        style_bi = self.affine(style_bd).float() * self.scale
        x = x_bchw * style_bi.to(x_bchw.dtype)[:, :, None, None]
        y = F.conv2d(x, self.weight.to(x.dtype)) + self.bias.to(x.dtype)[:, None, None]
        return clamp(y, self.clamp).float()


def demodulate(weight_oikk: Tensor, style_bi: Tensor) -> Tensor:
    """Return float32 (b, o): one over the norm of each sample's modulated weights.

    A matrix product of squares; a kernel per sample would take b times the weight's memory for the same numbers.
    """
    with torch.autocast(
        weight_oikk.device.type if weight_oikk.device.type != "meta" else "cpu", enabled=False
    ):
        energy_oi = weight_oikk.float().square().sum((2, 3))
        return (style_bi.float().square() @ energy_oi.T + 1e-8).rsqrt()


def clamp(x: Tensor, limit: float | None, gain: float = 1.0) -> Tensor:
    """Clamp to the limit times the layer's gain."""
    return x if limit is None else x.clamp(-limit * gain, limit * gain)


def activated_and_clamped(x: Tensor, limit: float | None, gain: float = 1.0) -> Tensor:
    """Apply leaky ReLU, its gain, the layer's gain and the clamp, each with the tensors that torch keeps for it.

    Nothing is changed in place: `memory.recompute` could keep no result then, and computed all that leads to it again.
    """
    y = activate(x)
    if gain != 1:
        y = y * gain
    return clamp(y, limit, gain)


def activate_and_clamp(x: Tensor, limit: float | None, gain: float = 1.0) -> Tensor:
    """Apply leaky ReLU, its gain, the layer's gain and the clamp; for the backward only the result is kept.

    Forward and gradients are those of `activated_and_clamped`, which keeps two tensors of that size, but for the
    gradient of a value that is clamped and has the limit's value already: it is zero, as in the original's kernel.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        result: Tensor = ActivateAndClamp.apply(x, limit, gain)  # type: ignore[no-untyped-call]
        return result
    return activated_and_clamped(x, limit, gain)


class ActivateAndClamp(torch.autograd.Function):
    """The forward of `activate_and_clamp`. Signs and limits are read from its result, which other layers keep too."""

    @staticmethod
    def forward(x: Tensor, limit: float | None, gain: float) -> Tensor:
        """Return the result. The operators are those of `activated_and_clamped`, so a choice of outputs suits both."""
        return activated_and_clamped(x, limit, gain)

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the result."""
        _, context.limit, context.gain = inputs
        context.save_for_backward(output)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of x."""
        (y,) = context.saved_tensors
        return ActivationSlope.apply(gradients[0], y, context.limit, context.gain), None, None  # type: ignore[no-untyped-call]


class ActivationSlope(torch.autograd.Function):
    """The gradient of `activate_and_clamp`: linear in the one that comes in, so that it is its own gradient."""

    @staticmethod
    def forward(gradient: Tensor, y: Tensor, limit: float | None, gain: float) -> Tensor:
        """Return the gradient of x for that of y."""
        if limit is not None:
            reached = rounded(limit * gain, y.dtype)
            gradient = torch.ops.aten.hardtanh_backward(gradient, y, -reached, reached)
        if gain != 1:
            gradient = gradient * gain
        made: Tensor = torch.ops.aten.leaky_relu_backward(gradient * math.sqrt(2), y, 0.2, False)
        return made

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep y, of which only signs and limits count."""
        _, y, context.limit, context.gain = inputs
        context.save_for_backward(y)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the gradient."""
        (y,) = context.saved_tensors
        return ActivationSlope.apply(gradients[0], y, context.limit, context.gain), None, None, None  # type: ignore[no-untyped-call]


def rounded(value: float, dtype: torch.dtype) -> float:
    """Return a positive number as a tensor of a dtype holds it; no tensor is made, so a plan may ask too."""
    spacing: float = torch.finfo(dtype).eps * 2.0 ** (math.frexp(value)[1] - 1)
    return round(value / spacing) * spacing


def batch_deviation(x_bchw: Tensor, group: int = 4) -> Tensor:
    """Append one channel: the features' standard deviation over groups of samples, averaged; computed in float32.

    A group is as many neighbours as the largest divisor of the batch up to `group`. So a part of a batch (a rank's, a
    micro-batch) of a multiple of `group` samples has the groups of the whole; the original's are of samples far apart.
    It shows the discriminator a lack of variety.
    """
    count, _, height, width = x_bchw.shape
    size = max(divisor for divisor in range(1, min(group, count) + 1) if count % divisor == 0)
    grouped = x_bchw.float().reshape(-1, size, *x_bchw.shape[1:])
    variance = (grouped - grouped.mean(1, keepdim=True)).square().mean(1)
    deviation = (variance + 1e-8).sqrt().mean((1, 2, 3))
    plane = (
        deviation.unsqueeze(1).expand(-1, size).reshape(-1, 1, 1, 1).expand(-1, 1, height, width)
    )
    return torch.cat((x_bchw, plane.to(x_bchw.dtype)), dim=1)
