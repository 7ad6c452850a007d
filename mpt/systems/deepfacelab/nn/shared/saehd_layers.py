"""The layers SAEHD is made of: convolutions started as TensorFlow starts them, and rectifiers that keep their output.

`Convolution` pads by half its kernel on both sides, the meaning of "SAME" in DeepFaceLab's layers since June
2021 (TensorFlow's own SAME is uneven at stride 2). Weights start Glorot-uniform, biases at zero.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Convolution(nn.Conv2d):
    """A square convolution with padding of half its kernel."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2)

    def reset_parameters(self) -> None:
        start_glorot(self.weight, self.bias)


class Dense(nn.Linear):
    """A fully connected layer."""

    def reset_parameters(self) -> None:
        start_glorot(self.weight, self.bias)


class Downscale(nn.Module):
    """Halve the sides by a 5x5 convolution at stride 2."""

    def __init__(self, inputs: int, outputs: int, cosine: bool) -> None:
        super().__init__()
        self.conv1 = Convolution(inputs, outputs, 5, stride=2)
        self.cosine = cosine

    def forward(self, x_bchw: Tensor) -> Tensor:
        return activate(self.conv1(x_bchw), 0.1, self.cosine)


class Upscale(nn.Module):
    """Double the sides: a convolution to four times the channels, folded out 2x2."""

    def __init__(self, inputs: int, outputs: int, cosine: bool) -> None:
        super().__init__()
        self.conv1 = Convolution(inputs, outputs * 4, 3)
        self.cosine = cosine

    def forward(self, x_bchw: Tensor) -> Tensor:
        return activate(F.pixel_shuffle(self.conv1(x_bchw), 2), 0.1, self.cosine)


class Residual(nn.Module):
    """Two 3x3 convolutions added to their input."""

    def __init__(self, channels: int, cosine: bool) -> None:
        super().__init__()
        self.conv1 = Convolution(channels, channels, 3)
        self.conv2 = Convolution(channels, channels, 3)
        self.cosine = cosine

    def forward(self, x_bchw: Tensor) -> Tensor:
        inner = self.conv2(activate(self.conv1(x_bchw), 0.2, self.cosine))
        return activate(x_bchw + inner, 0.2, self.cosine)


class KeepOutput(torch.autograd.Function):
    """A leaky rectifier whose backward pass reads the sign off its own output: the slope being positive, they agree."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        result = F.leaky_relu(x, slope)
        ctx.save_for_backward(result)
        ctx.slope = slope
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        return torch.ops.aten.leaky_relu_backward(gradients[0], result, ctx.slope, True), None


def activate(x: Tensor, slope: float, cosine: bool) -> Tensor:
    """Apply x*cos(x), or the leaky rectifier of that slope."""
    if cosine:
        return x * torch.cos(x)
    if not torch.is_grad_enabled():
        return F.leaky_relu(x, slope)  # the same, and other programs know it
    return KeepOutput.apply(x, slope)  # type: ignore[no-any-return,no-untyped-call]


def start_glorot(weight: Tensor, bias: Tensor | None) -> None:
    """Start a layer as TensorFlow does: Glorot-uniform weights, zero biases."""
    nn.init.xavier_uniform_(weight)
    if bias is not None:
        nn.init.zeros_(bias)
