"""The 1,797 handwritten digits of UCI, 8x8 grey, shipped with the package: the data set that always works.

Source: Alpaydin & Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998, CC BY
4.0, as distributed with scikit-learn. `DIGITS.md` alongside this file holds the attribution and lists the changes.
The split is fixed in the file: 1,437 for training, 36 of each class (360) for testing.
"""

from __future__ import annotations

from importlib import resources

import numpy
import torch

from mpt.config.options import DatasetOptions
from mpt.data.pictures.in_memory import InMemory

LEVELS = 16.0


class Settings(DatasetOptions):
    pass


def read_digits(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images (n, 1, 8, 8), float32 in [0, 1], and labels (n,) of `train`, `test` or `all`."""
    with (
        (resources.files("mpt.data") / "digits.npz").open("rb") as file,
        numpy.load(file, allow_pickle=False) as stored,
    ):
        images = torch.from_numpy(stored["images"]).unsqueeze(1).float() / LEVELS
        labels = torch.from_numpy(stored["labels"]).long()
        is_test = torch.zeros(len(labels), dtype=torch.bool)
        is_test[torch.from_numpy(stored["test_indices"]).long()] = True
    if split == "all":
        return images, labels
    chosen = is_test if split == "test" else ~is_test
    return images[chosen], labels[chosen]


def build(settings: Settings, split: str, seed: int) -> InMemory:
    """Return the digits of one split."""
    images, labels = read_digits(split)
    return InMemory(
        images,
        labels,
        tuple("0123456789"),
        image_size=settings.image_size,
        channels=settings.channels,
        augment=settings.augment if split == "train" else (),
        seed=seed,
    )
