"""Configurations that the planner's tests share, and the layout of their data."""

from __future__ import annotations

from typing import Any

import torch

from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.seams import DataSpec, FieldSpec

IMAGE_SIZE = 16
DIGITS = DataSpec(
    {
        "image": FieldSpec((1, IMAGE_SIZE, IMAGE_SIZE), torch.float32),
        "label": FieldSpec((), torch.int64),
    },
    1000,
    tuple("0123456789"),
)
UNET, VIT = "tests.planner.models:UNet", "tests.planner.models:TinyViT"


def photos(image_size: int) -> DataSpec:
    """Return the layout of labelled colour images."""
    fields = {
        "image": FieldSpec((3, image_size, image_size), torch.float32),
        "label": FieldSpec((), torch.int64),
    }
    return DataSpec(fields, 1000, tuple("0123456789"))


def make(
    model: str,
    precision: Any = "fp32",
    batch_size: int = 8,
    image_size: int = IMAGE_SIZE,
    channels: int = 1,
    **memory: Any,
) -> Config:
    """Return a small configuration; optimizers take the foreach path on every device, as on a GPU."""
    options = (
        {"options": {"channels": channels}} if model.startswith("tests.") and channels != 1 else {}
    )
    return load_config(
        {
            "model": {
                "name": model,
                "image_size": image_size,
                **({"channels": channels, **options} if ":" in model else {}),
            },
            "precision": precision,
            "optimizer": {"name": "adam", "foreach": True},
            "train": {"batch_size": batch_size},
            "memory": memory,
        },
        allow=["tests"],
    )
