"""Doubling and halving of feature maps through the binomial filter [1, 3, 3, 1], in plain PyTorch.

Each is one grouped convolution. It is linear in the image, so the backward of its backward, which gradient penalties
need, is the convolution again. PyTorch's own loops over the channels there, thousands of kernels in a step, and keeps
the image for a gradient of the filter that nobody asks for. `sample_affine` reads an image at transformed
coordinates; PyTorch has no second derivative of `grid_sample`, which is linear in the image too.

Source: Karras et al. 2020 (StyleGAN2), appendix B; Zhang 2019 for why to filter at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input

TAPS = (1.0, 3.0, 3.0, 1.0)


class Blur(nn.Module):
    """Hold the normalised 4x4 filter; it is no parameter and no state."""

    kernel: Tensor

    def __init__(self) -> None:
        super().__init__()
        taps = torch.tensor(TAPS)
        kernel = torch.outer(taps, taps)
        self.register_buffer("kernel", kernel / kernel.sum(), persistent=False)

    def filter(self, x_bchw: Tensor, pad: tuple[int, int, int, int], gain: float = 1.0, stride: int = 1) -> Tensor:
        """Return x padded by (left, right, top, bottom), filtered per channel and strided."""
        channels = x_bchw.shape[1]
        kernel = (self.kernel * gain).to(x_bchw.dtype).expand(channels, 1, 4, 4)
        filtered: Tensor = _Filter.apply(F.pad(x_bchw, pad), kernel, stride)  # type: ignore[no-untyped-call]
        return filtered

    def upsample(self, x_bchw: Tensor) -> Tensor:
        """Return x at twice the resolution: zeros between the pixels, then the filter."""
        count, channels, height, width = x_bchw.shape
        spread = x_bchw.new_zeros(count, channels, height, 2, width, 2)
        spread[:, :, :, 0, :, 0] = x_bchw
        spread = spread.reshape(count, channels, 2 * height, 2 * width)
        return self.filter(spread, (2, 1, 2, 1), gain=4.0)

    def downsample(self, x_bchw: Tensor) -> Tensor:
        """Return x at half the resolution."""
        if x_bchw.device.type == "cpu":
            # In bfloat16 the backward of a strided grouped convolution has no fast kernel: 17 ms here against 1 ms.
            return self.filter(x_bchw, (1, 1, 1, 1))[:, :, ::2, ::2]
        return self.filter(x_bchw, (1, 1, 1, 1), stride=2)


class _Filter(torch.autograd.Function):
    """A convolution per channel, differentiable any number of times with respect to the image."""

    @staticmethod
    def forward(context: Any, image: Tensor, kernel: Tensor, stride: int) -> Tensor:
        context.save_for_backward(kernel)
        context.shape, context.stride = image.shape, stride
        return F.conv2d(image, kernel.to(image.dtype), stride=stride, groups=len(kernel))

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        (kernel,) = context.saved_tensors
        return _FilterTransposed.apply(slope, kernel, context.shape, context.stride), None, None  # type: ignore[no-untyped-call]


class _FilterTransposed(torch.autograd.Function):
    """The adjoint of `_Filter`: spread each value over the pixels that it was made of."""

    @staticmethod
    def forward(context: Any, slope: Tensor, kernel: Tensor, shape: torch.Size, stride: int) -> Tensor:
        context.save_for_backward(kernel)
        context.stride = stride
        # Under autocast the forward ran in half, and so does this.
        image: Tensor = conv2d_input(shape, kernel.to(slope.dtype), slope, stride=stride, groups=len(kernel))  # type: ignore[no-untyped-call]
        return image

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        (kernel,) = context.saved_tensors
        return _Filter.apply(slope, kernel, context.stride), None, None, None  # type: ignore[no-untyped-call]


class _Sample(torch.autograd.Function):
    """`grid_sample` (bilinear, reflected borders), differentiable any number of times with respect to the image."""

    @staticmethod
    def forward(context: Any, image: Tensor, grid: Tensor) -> Tensor:
        context.save_for_backward(grid)
        context.shape = image.shape
        return F.grid_sample(image, grid, mode="bilinear", padding_mode="reflection", align_corners=False)

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor, None]:
        (grid,) = context.saved_tensors
        return _SampleTransposed.apply(slope, grid, context.shape), None  # type: ignore[no-untyped-call]


class _SampleTransposed(torch.autograd.Function):
    """The adjoint of `_Sample`: spread each value over the pixels that it was read from."""

    @staticmethod
    def forward(context: Any, slope: Tensor, grid: Tensor, shape: torch.Size) -> Tensor:
        context.save_for_backward(grid)
        slope = slope.to(grid.dtype)  # what follows may have run in half
        image = slope.new_zeros(shape)
        bilinear, reflection = 0, 2
        found: Tensor = torch.ops.aten.grid_sampler_2d_backward(
            slope, image, grid, bilinear, reflection, False, [True, False]
        )[0]
        return found

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        (grid,) = context.saved_tensors
        return _Sample.apply(slope, grid), None, None  # type: ignore[no-untyped-call]


def sample_affine(image_bchw: Tensor, matrix_b23: Tensor) -> Tensor:
    """Return float32 images read at `matrix @ (x, y, 1)`, coordinates from -1 to 1 over the image."""
    grid = F.affine_grid(matrix_b23.float(), list(image_bchw.shape), align_corners=False)
    sampled: Tensor = _Sample.apply(image_bchw.float(), grid)  # type: ignore[no-untyped-call]
    return sampled
