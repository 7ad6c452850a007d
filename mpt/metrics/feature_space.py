"""Which feature space a Frechet distance is measured in, chosen from the data.

Small grey images (the shipped digits, MNIST and their like) get the shipped digit classifier's features; anything
else a fixed random convolutional network's. Neither is Inception: distances compare runs of this program with one
another, not with published FID.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from mpt.seams import DataSpec


class FeatureSpace(Protocol):
    """Images (b, c, h, w) in [0, 1] to features (b, d)."""

    name: str

    def features(self, image_bchw: Tensor) -> Tensor: ...


def choose_feature_space(data: DataSpec) -> FeatureSpace:
    """Return the digit features for ten-class grey images, the random convolutional features for the rest."""
    if data.fields["image"].shape[0] == 1 and len(data.classes) == 10:
        from mpt.metrics.digit_features import DigitFeatures

        return DigitFeatures()
    from mpt.metrics.random_conv_features import RandomConvFeatures

    return RandomConvFeatures()
