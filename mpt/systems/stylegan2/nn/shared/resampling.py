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

    def filter(
        self, x_bchw: Tensor, pad: tuple[int, int, int, int], gain: float = 1.0, stride: int = 1
    ) -> Tensor:
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
    def forward(
        context: Any, slope: Tensor, kernel: Tensor, shape: torch.Size, stride: int
    ) -> Tensor:
        context.save_for_backward(kernel)
        context.stride = stride
        # Under autocast the forward ran in half, and so does this.
        image: Tensor = conv2d_input(
            shape, kernel.to(slope.dtype), slope, stride=stride, groups=len(kernel)
        )  # type: ignore[no-untyped-call]
        return image

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        (kernel,) = context.saved_tensors
        return _Filter.apply(slope, kernel, context.stride), None, None, None  # type: ignore[no-untyped-call]


class _Sample(torch.autograd.Function):
    """`grid_sample` (bilinear, reflected borders), differentiable any number of times with respect to the image."""

    @staticmethod
    def forward(context: Any, image: Tensor, grid: Tensor, corners: bool) -> Tensor:
        context.save_for_backward(grid)
        context.shape, context.corners = image.shape, corners
        return F.grid_sample(
            image, grid, mode="bilinear", padding_mode="reflection", align_corners=corners
        )

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        (grid,) = context.saved_tensors
        return _SampleTransposed.apply(slope, grid, context.shape, context.corners), None, None  # type: ignore[no-untyped-call]


class _SampleTransposed(torch.autograd.Function):
    """The adjoint of `_Sample`: spread each value over the pixels that it was read from."""

    @staticmethod
    def forward(
        context: Any, slope: Tensor, grid: Tensor, shape: torch.Size, corners: bool
    ) -> Tensor:
        context.save_for_backward(grid)
        context.corners = corners
        slope = slope.to(grid.dtype)  # later operators may have run in half
        image = slope.new_zeros(shape)
        bilinear, reflection = 0, 2
        found: Tensor = torch.ops.aten.grid_sampler_2d_backward(
            slope, image, grid, bilinear, reflection, corners, [True, False]
        )[0]
        return found

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        (grid,) = context.saved_tensors
        return _Sample.apply(slope, grid, context.corners), None, None, None  # type: ignore[no-untyped-call]


def sample_affine(image_bchw: Tensor, matrix_b23: Tensor) -> Tensor:
    """Return float32 images read at `matrix @ (x, y, 1)`, coordinates from -1 to 1 over the image."""
    grid = F.affine_grid(matrix_b23.float(), list(image_bchw.shape), align_corners=False)
    sampled: Tensor = _Sample.apply(image_bchw.float(), grid, False)  # type: ignore[no-untyped-call]
    return sampled


SYM6 = (
    *(
        0.015404109327027373,
        0.0034907120842174702,
        -0.11799011114819057,
        -0.048311742585633,
        0.4910559419267466,
    ),
    *(
        0.787641141030194,
        0.3379294217276218,
        -0.07263752278646252,
        -0.021060292512300564,
        0.04472490177066578,
    ),
    *(0.0017677118642428036, -0.007800708325034148),
)
"""Low-pass filter of the symlet of order 6 (Daubechies 1992), as PyWavelets lists it."""
CUT = len(SYM6) // 4
"""Pixels of the border that the filter needs on each side."""


def symlet() -> Tensor:
    """Return the filter's taps, whose sum is 1."""
    taps = torch.tensor(SYM6, dtype=torch.float64)
    return (taps / taps.sum()).float()


def sample_affine_filtered(image_bchw: Tensor, matrix_b23: Tensor, taps: Tensor) -> Tensor:
    """Return the result of `sample_affine` between two low-pass filters: read at twice the resolution, then halved.

    `taps` are those of `symlet`. As in the original (Karras et al. 2020, ADA, appendix B) the image goes on beyond its
    border by reflection; it is doubled through the filter, read bilinearly, and halved through the filter the other way
    round. One period of the reflected image is doubled, 16 times the image's size, so that no shape depends on the
    matrix; the original pads by as much as a batch needs, and shows black beyond one more image on each side.
    """
    image = image_bchw.float()
    side = image.shape[-1]
    for dim in (2, 3):
        image = torch.cat((image, image.flip(dim).narrow(dim, 1, side - 2)), dim)
    period = 4 * side - 4
    doubled = F.pad(spread(image), (6, 5, 6, 5), mode="circular")
    doubled = F.pad(filtered(doubled, taps.flip(0) * 2), (0, 1, 0, 1), mode="circular")
    count = 2 * (side + 2 * CUT)
    place = torch.arange(count, device=image.device) + 1.0 - count / 2
    grid_hwx = torch.stack(torch.meshgrid(place, place, indexing="xy"), -1) / side
    read_bhwx = (
        torch.einsum("bij,hwj->bhwi", matrix_b23[:, :, :2].float(), grid_hwx)
        + matrix_b23[:, None, None, :, 2]
    )
    index_bhwx = (read_bhwx * side + side - 1).remainder(period)
    sampled: Tensor = _Sample.apply(doubled, index_bhwx * (2 / period) - 1, True)  # type: ignore[no-untyped-call]
    border = 2 * CUT - 5
    return filtered(sampled[..., border : count - border + 1, border : count - border + 1], taps)[
        ..., ::2, ::2
    ]


def spread(image_bchw: Tensor) -> Tensor:
    """Return an image of twice the size with zeros between its pixels."""
    count, channels, height, width = image_bchw.shape
    wide = image_bchw.new_zeros(count, channels, height, 2, width, 2)
    wide[:, :, :, 0, :, 0] = image_bchw
    return wide.reshape(count, channels, 2 * height, 2 * width)


def filtered(image_bchw: Tensor, taps: Tensor) -> Tensor:
    """Return an image correlated with taps in both directions, as much smaller as they are long."""
    channels = image_bchw.shape[1]
    for shape in ((1, 1, 1, -1), (1, 1, -1, 1)):
        kernel = taps.reshape(shape).expand(channels, 1, -1, -1)
        image_bchw = _Filter.apply(image_bchw, kernel, 1)  # type: ignore[no-untyped-call]
    return image_bchw
