"""A feature space for any images: a small convolutional network with fixed random weights, 48 numbers per image.

Images are averaged down (or stretched up) to 32x32 and pass three stride-2 convolutions with ReLU, pooling to 2x2,
and a random projection. Untrained features of this kind react to colour, layout, edges and coarse texture, which is
enough to distinguish a generator that learns from one that does not.

It is a number that falls as colours and layouts come to agree, the same on every machine, needing no download
and no training. Measured on 1,000 of the coloured shapes at 64x64: against another 1,000 1.5, blurred eightfold 11,
without colour 31, four of them repeated 99, noise 141. It is not FID. It knows no objects, it sees no detail
finer than 32x32, and its scale is arbitrary (fixed by `GAIN`). Rank runs on one data set with it; do not compare
across data sets, and look at the pictures.

Source of the idea: random features separate distributions, as in Saxe et al., "On Random Weights and Unsupervised
Feature Learning", 2011. The weights are He-scaled uniform numbers from PCG64's raw stream, which NumPy guarantees
never to change.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from mpt.metrics.shared.float64 import in_float64

SEED = 48
SIDE = 32
WIDTHS = (3, 16, 32, 64)
FEATURES = 48
GAIN = 10.0


class RandomConvFeatures:
    """The fixed random network. Computes in float64 on the images' device, so that TF32 and autocast do not touch
    it.
    """

    name = "random-conv-48"

    def __init__(self) -> None:
        bits = numpy.random.PCG64(SEED)
        self.kernels = [
            uniform(bits, (wide, narrow, 3, 3), math.sqrt(6 / (narrow * 9)))
            for narrow, wide in pairwise(WIDTHS)
        ]
        self.biases = [uniform(bits, (wide,), 0.5) for wide in WIDTHS[1:]]
        flat = WIDTHS[-1] * 4
        self.projection = uniform(bits, (FEATURES, flat), GAIN * math.sqrt(3 / flat))

    def features(self, image_bchw: Tensor) -> Tensor:
        """Return features (b, 48) in float64 of images in [0, 1] with 1, 3 or 4 channels, of any size."""
        with torch.no_grad(), torch.autocast(image_bchw.device.type, enabled=False):
            hidden = in_float64(image_bchw[:, :3]).expand(-1, 3, -1, -1) * 2 - 1
            mode = "area" if min(hidden.shape[-2:]) >= SIDE else "bilinear"
            if hidden.shape[-2:] != (SIDE, SIDE):
                hidden = functional.interpolate(hidden, (SIDE, SIDE), mode=mode)
            for kernel, bias in zip(self.kernels, self.biases):
                kernel, bias = kernel.to(hidden.device), bias.to(hidden.device)
                hidden = torch.relu(functional.conv2d(hidden, kernel, bias, stride=2, padding=1))
            pooled = functional.adaptive_avg_pool2d(hidden, 2).flatten(1)
            return pooled @ self.projection.to(hidden.device).T


def uniform(bits: numpy.random.PCG64, shape: tuple[int, ...], bound: float) -> Tensor:
    """Return float64 numbers uniform in (-bound, bound) from the bit generator's raw stream."""
    raw = bits.random_raw(math.prod(shape))
    unit = (raw >> numpy.uint64(11)).astype(numpy.float64) * 2.0**-53
    return torch.from_numpy((2 * unit - 1) * bound).view(shape)
