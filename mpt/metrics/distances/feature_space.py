"""Which feature space a Frechet distance is measured in, chosen from the data.

Grey digits (the shipped ones, MNIST) get the shipped digit classifier's features; anything else, Fashion-MNIST among
it, a fixed random convolutional network's. A data set is recognised by its classes' names. Neither space is
Inception: distances compare runs on one data set with one another, not with published FID.
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
    """Return the digit features for grey images of the classes 0 to 9 ("0 - zero" too), else the random features."""
    if data.fields["image"].shape[0] == 1 and [name[:1] for name in data.classes] == list(
        "0123456789"
    ):
        from mpt.metrics.distances.digit_features import DigitFeatures

        return DigitFeatures()
    from mpt.metrics.distances.random_conv_features import RandomConvFeatures

    return RandomConvFeatures()


def explain_distance(data: DataSpec) -> str:
    """Return one sentence on the feature space of the Frechet distance on this data."""
    name = choose_feature_space(data).name
    return f"Frechet distances are in {name} features: compare them on this data set alone, not with published FID"
