"""MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100, read by torchvision from files that are already there.

`root` is the folder that torchvision was given when they were downloaded: it holds `MNIST/raw`, `FashionMNIST/raw`,
`cifar-10-batches-py` or `cifar-100-python`. Nothing is downloaded unless `download: true`. torchvision unpickles the
CIFAR files, but only after their MD5 sums have matched the published ones.

Sources: LeCun et al., 1998 (MNIST); Xiao et al., 2017, MIT licence (Fashion-MNIST); Krizhevsky, 2009 (CIFAR).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from mpt.config.options import DatasetOptions
from mpt.data.pictures.in_memory import InMemory
from mpt.errors import DataError
from mpt.vision_ops import import_torchvision

NAMES = {
    "mnist": {"source": "MNIST"},
    "fashion_mnist": {"source": "FashionMNIST"},
    "cifar10": {"source": "CIFAR10"},
    "cifar100": {"source": "CIFAR100"},
}
ABOUT = {
    "mnist": "MNIST: 70,000 handwritten digits of 28 pixels, from files that are already there.",
    "fashion_mnist": "Fashion-MNIST: 70,000 pieces of clothing of 28 pixels, from files that are already there.",
    "cifar10": "CIFAR-10: 60,000 photos of 32 pixels in 10 classes, from files that are already there.",
    "cifar100": "CIFAR-100: 60,000 photos of 32 pixels in 100 classes, from files that are already there.",
}
FOLDERS = {
    "MNIST": "MNIST/raw",
    "FashionMNIST": "FashionMNIST/raw",
    "CIFAR10": "cifar-10-batches-py",
    "CIFAR100": "cifar-100-python",
}


class Settings(DatasetOptions):
    root: str = Field("data", min_length=1)
    """The folder torchvision keeps its data sets in; `~` is your home."""
    download: bool = False
    """Download the data set to `root` if it is not there."""
    source: Literal["MNIST", "FashionMNIST", "CIFAR10", "CIFAR100"] = "MNIST"
    """torchvision's class; the YAML name sets it."""


def read_stored(settings: Settings, split: str) -> Any:
    """Return torchvision's data set object. Raises DataError when the files are missing, damaged or cannot be
    fetched.
    """
    root = Path(settings.root).expanduser()
    kind = getattr(import_torchvision("datasets"), settings.source)
    folder = root / FOLDERS[settings.source]
    try:
        return kind(str(root), train=split == "train", download=settings.download)
    except (RuntimeError, OSError, EOFError, ValueError, AssertionError) as error:
        if settings.download:
            raise DataError(f"{settings.source}: download to {root} failed: {error}") from error
        if folder.is_dir():
            raise DataError(
                f"{settings.source}: {folder} is incomplete or damaged ({error}). Remove it and set "
                "dataset.download=true, or set dataset.root to an intact copy"
            ) from error
        raise DataError(
            f"{settings.source}: no {folder}. Set dataset.root to the folder that holds {FOLDERS[settings.source]}, or "
            "dataset.download=true to fetch it"
        ) from error


def build(settings: Settings, split: str, seed: int) -> InMemory:
    """Return one split of the data set that `settings.source` names."""
    stored = read_stored(settings, split)
    images = torch.as_tensor(stored.data)
    images = images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()
    return InMemory(
        images,
        torch.as_tensor(stored.targets),
        tuple(stored.classes),
        image_size=settings.image_size,
        channels=settings.channels,
        augment=settings.augment if split == "train" else (),
        seed=seed,
    )
