"""A small detector on drawn scenes, for the tests of the task and of what is built on it."""

from __future__ import annotations

from typing import Any

import torch

from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.engine.building.build import build_datasets, build_run
from mpt.seams import Batch, Run


def config(precision: str = "fp32", **sections: Any) -> Config:
    """Return a configuration of a few steps."""
    content: dict[str, Any] = {
        "model": {"name": "yolofuse", "fusion": "mid", "image_size": 64},
        "dataset": {"name": "rgb_ir_scenes", "count": 8, "test_count": 6},
        "precision": precision,
        "optimizer": {"name": "sgd_warmup", "warmup": 2},
        "train": {"steps": 3, "batch_size": 4, "threads": 1},
        **sections,
    }
    return load_config(content)


def build(precision: str = "fp32", **sections: Any) -> tuple[Run, Batch]:
    """Return a run and a batch of its data, on the CPU."""
    settings = config(precision, **sections)
    train, _ = build_datasets(settings)
    run = build_run(settings, torch.device("cpu"), train.spec)
    return run, train.spec.as_floats(train.fetch(list(range(4)), 0))
