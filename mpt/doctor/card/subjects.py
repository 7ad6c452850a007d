"""Subjects of the checks: one shipped configuration of each task, with a small batch, and a network of convolutions."""

from __future__ import annotations

from typing import Any

import torch

from mpt.config.finding.shipped import shipped_configs
from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.engine.building.build import build_datasets
from mpt.errors import ConfigError, MptError
from mpt.seams import Batch, Dataset

BATCH = 4
SHIPPED_DATA = ("digits", "shapes")
"""Data sets that need no files of the user's, in addition to those of the demos."""
MODES = (
    *("fp32", "tf32", "amp", "bf16", "O1", "O2", "fp16-pure", "bf16-pure"),
    *("bf16-sr", "bf16-kahan", "bf16-24bit", "fp16-24bit"),
)


def subject_names() -> list[str]:
    """Return one shipped configuration for each task whose data come with mpt, demos first."""
    found: dict[str, str] = {}
    for name in sorted(shipped_configs(), key=lambda one: (not one.endswith("_demo"), one)):
        config = load_config(shipped_configs()[name])
        has_data = name.endswith("_demo") or config.dataset.name in SHIPPED_DATA
        if has_data and config.task.name not in found:
            found[config.task.name] = name
    return list(found.values())


def small_config(name: str, mode: str | None = None, **sections: Any) -> Config:
    """Return a shipped configuration with a small batch and deterministic kernels. Raises ConfigError."""
    overrides = [
        f"train.batch_size={BATCH}",
        "dataset.workers=0",
        "train.deterministic=true",
        "train.epochs=null",
    ]
    overrides += ["train.steps=1000"]
    config = load_config(shipped_configs()[name], overrides)
    data = config.to_data()
    if mode is not None:
        data["precision"] = mode
    for section, values in sections.items():
        data[section] = {**data.get(section, {}), **values} if isinstance(values, dict) else values
    return load_config(data)


def mode_config(mode: str, **sections: Any) -> Config:
    """Return a small classifier in a precision mode, on drawn pictures. Raises ConfigError."""
    data = {
        "model": {"name": "small_cnn", "features": 16, "image_size": 16},
        "dataset": "digits",
        "optimizer": {"name": "sgd", "lr": 0.01},
        "precision": mode,
        "train": {"batch_size": 16, "steps": 100, "deterministic": True},
    }
    return load_config({**data, **sections})


def first_batch(data: Dataset, count: int = BATCH) -> Batch:
    """Return the first samples of a data set."""
    return data.fetch(list(range(count)), 0)


def on_device(batch: Batch, data: Dataset, device: torch.device) -> Batch:
    """Return a batch on a device, as a task sees it."""
    return data.spec.as_floats({name: value.to(device) for name, value in batch.items()})


def supported(mode: str, config: Any, device: torch.device) -> str:
    """Return why a card refuses a mode, "" if it takes it."""
    from mpt.engine.building.build import build_run

    try:
        data, _ = build_datasets(config)
        build_run(config, device, data.spec)
    except (ConfigError, MptError) as error:
        return str(error).splitlines()[0]
    return ""
