"""Small runs for the engine's tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.seams import Batch, DataSpec, FieldSpec, Run

DIGITS = DataSpec(
    fields={"image": FieldSpec((1, 16, 16), torch.float32), "label": FieldSpec((), torch.int64)},
    size=64,
    classes=tuple("0123456789"),
    extra={"class_counts": [7] * 4 + [6] * 6},
)


def classifier(precision: Mapping[str, Any] | str = "fp32", **sections: Any) -> Run:
    """Build a tiny classifier run on the CPU."""
    data = {
        "model": {"name": "small_cnn", "features": 4, "image_size": 16},
        "dataset": "digits",
        "precision": precision,
        "optimizer": {"name": "sgd", "lr": 0.1},
        "train": {"steps": 4, "batch_size": 8},
        **sections,
    }
    return build_run(load_config(data), torch.device("cpu"), DIGITS)


def gan(precision: Mapping[str, Any] | str = "fp32", **sections: Any) -> Run:
    """Build a tiny DCGAN run on the CPU."""
    data = {
        "model": {"name": "dcgan", "features": 4, "image_size": 16, "latent_size": 8},
        "dataset": "digits",
        "precision": precision,
        "optimizer": {"name": "adam", "lr": 2e-4},
        "train": {"steps": 4, "batch_size": 8},
        **sections,
    }
    return build_run(load_config(data), torch.device("cpu"), DIGITS)


def batch(seed: int = 0, size: int = 8) -> Batch:
    """Return random images and labels."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "image": torch.rand(size, 1, 16, 16, generator=generator),
        "label": torch.randint(0, 10, (size,), generator=generator),
    }


def mode(settings: Mapping[str, Any] | str) -> Any:
    """Return a precision mode on the CPU, with no run around it."""
    data = {"model": {"name": "dcgan"}, "dataset": {"name": "digits"}, "precision": settings}
    choice = load_config(data).precision
    return choice.member("build")(choice.mode, choice.native_settings(), torch.device("cpu"))
