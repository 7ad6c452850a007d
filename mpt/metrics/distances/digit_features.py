"""A feature space for handwritten digits: the 32 hidden units of a small classifier whose weights are in the package.

The classifier (64 pixels, 64 ReLU, 32 ReLU, 10 classes) was trained once on the training split of the shipped digits by
`scripts/documents/make_digit_features.py`, with noise added to its input so that it is smooth around the data. Images
of any size are averaged down to 8x8 first, so it sees strokes and not textures: two generators that differ in sharpness
only may score the same.

It is a number that falls as generated digits come to look like the real ones, comparable between runs of this
program, needing no download. Measured at 8x8: two halves of the real digits are 1.4 apart, pixels drawn from each
pixel's own Gaussian 42, uniform noise 68; train and test split 0.5. It is not FID. It has no meaning for
anything but digits, and no published figure can be compared with it.
"""

from __future__ import annotations

from importlib import resources

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from mpt.metrics.shared.float64 import in_float64

SIDE = 8
LUMINANCE = (0.299, 0.587, 0.114)


class DigitFeatures:
    """The fixed classifier. Computes in float64 on the images' device, so that TF32 and autocast do not touch it."""

    name = "digit-classifier-32"

    def __init__(self) -> None:
        weights = (resources.files("mpt.metrics") / "digit_features.npz").open("rb")
        with weights as file, numpy.load(file, allow_pickle=False) as stored:
            self.weights = [torch.from_numpy(stored[f"weight{n}"]).double() for n in range(3)]
            self.biases = [torch.from_numpy(stored[f"bias{n}"]).double() for n in range(3)]

    def features(self, image_bchw: Tensor) -> Tensor:
        """Return features (b, 32) in float64 of images in [0, 1] with 1 or 3 channels, of any size."""
        with torch.no_grad(), torch.autocast(image_bchw.device.type, enabled=False):
            hidden = pixels(image_bchw)
            for weight, bias in zip(self.weights[:2], self.biases[:2]):
                hidden = torch.relu(hidden @ weight.to(hidden.device).T + bias.to(hidden.device))
            return hidden

    def logits(self, image_bchw: Tensor) -> Tensor:
        """Return the classifier's scores (b, 10): which digit it takes each image for."""
        features = self.features(image_bchw)
        return features @ self.weights[2].to(features.device).T + self.biases[2].to(features.device)


def pixels(image_bchw: Tensor) -> Tensor:
    """Return images as (b, 64) float64: luminance, averaged down to 8x8."""
    image = in_float64(image_bchw)
    if image.shape[1] > 1:
        image = (image[:, :3] * image.new_tensor(LUMINANCE).view(1, 3, 1, 1)).sum(1, keepdim=True)
    if image.shape[-2:] != (SIDE, SIDE):
        image = functional.interpolate(image, (SIDE, SIDE), mode="area")
    return image.flatten(1)
