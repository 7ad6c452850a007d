"""A U-Net patch discriminator: it judges the whole picture at its deepest point and every pixel at its output.

Only 3x3 convolutions of stride 1 or 2 are used; `find_strides` searches the strides whose receptive field is nearest
to the wanted patch. Structure and names are those of DeepFaceLab's `GAN` weights (facts only), after "A U-Net Based
Discriminator for Generative Adversarial Networks" (arXiv:2002.12655). Transposed convolutions follow TensorFlow's
SAME: at stride 2 the last row and column are dropped, at stride 1 the padding is one.
"""

from __future__ import annotations

from itertools import accumulate, product
from operator import mul

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpt.systems.deepfacelab.nn.shared.saehd_layers import Convolution, start_glorot


class PatchDiscriminator(nn.Module):
    """Return two maps of logits for an image: one at the deepest resolution, one per pixel.

    Sides that a stride does not divide are refused by the concatenation; multiples of 32 and up always pass.
    """

    def __init__(self, patch_size: int, channels: int, width: int) -> None:
        super().__init__()
        strides = find_strides(patch_size)
        # widths[0] is the input stage's, widths[i + 1] that of the i-th strided convolution.
        widths = [min(width * 2**index, 512) for index in range(len(strides) + 1)]
        deepest = len(strides) - 1
        self.in_conv = Convolution(channels, widths[0], 1)
        self.convs = nn.ModuleList(
            Convolution(widths[index], widths[index + 1], 3, stride)
            for index, stride in enumerate(strides)
        )
        self.upconvs = nn.ModuleList(
            TransposedConvolution(
                widths[index + 1] * (1 if index == deepest else 2), widths[index], strides[index]
            )
            for index in range(deepest, -1, -1)
        )
        self.out_conv = Convolution(widths[0] * 2, 1, 1)
        self.center_out = Convolution(widths[-1], 1, 1)
        self.center_conv = Convolution(widths[-1], widths[-1], 1)

    def forward(self, image_bchw: Tensor) -> tuple[Tensor, Tensor]:
        x = F.leaky_relu(self.in_conv(image_bchw), 0.2)
        skips = []
        for convolution in self.convs:
            skips.append(x)
            x = F.leaky_relu(convolution(x), 0.2)
        center = self.center_out(x)
        x = F.leaky_relu(self.center_conv(x), 0.2)
        for convolution in self.upconvs:
            skip = skips.pop()
            x = F.leaky_relu(convolution(x), 0.2)[..., : skip.shape[2], : skip.shape[3]]
            x = torch.cat((skip, x), dim=1)
        return center, self.out_conv(x)


class TransposedConvolution(nn.ConvTranspose2d):
    """TensorFlow's SAME transposed 3x3 convolution: output sides are input sides times the stride."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(inputs, outputs, 3, stride, padding=1 if stride == 1 else 0)

    def reset_parameters(self) -> None:
        start_glorot(self.weight, self.bias)

    def forward(self, x_bchw: Tensor, output_size: list[int] | None = None) -> Tensor:
        x = super().forward(x_bchw, output_size)
        return x if self.stride[0] == 1 else x[..., :-1, :-1]


def find_strides(patch_size: int, most_layers: int = 9) -> list[int]:
    """Return the strides of 3x3 convolutions, the first being 2, whose receptive field is nearest to `patch_size`.

    Among equal fields the fewest layers win, then the larger sum of strides, then the field found first in counting
    order; the smaller of two equally near fields wins.
    """
    best: dict[int, list[int]] = {}
    for layers in range(1, most_layers + 1):
        # Binary counting downward, the first choice varying fastest, decides between full ties.
        for choice in product((2, 1), repeat=layers - 1):
            strides = [2, *reversed(choice)]
            reach = receptive_field(strides)
            known = best.get(reach)
            if known is None or (len(known) == layers and sum(strides) > sum(known)):
                best[reach] = strides
    nearest = min(sorted(best), key=lambda reach: abs(reach - patch_size))
    return best[nearest]


def receptive_field(strides: list[int]) -> int:
    """Return how many input pixels, along one side, one output of stacked 3x3 convolutions sees."""
    jumps: list[int] = list(accumulate(strides[:-1], mul))
    return 3 + 2 * sum(jumps)
