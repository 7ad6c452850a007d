"""Runs with weights and without training: built, captured and saved as a training would."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mpt.config.load import load_config
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.state.state import capture
from mpt.run.checkpoints import checkpoint
from mpt.run.records.layout import create_run, open_run

CLASSIFIER: dict[str, Any] = {
    "model": {"name": "small_cnn", "image_size": 16, "features": 8},
    "dataset": {"name": "digits"},
    "precision": {"mode": "fp32"},
    "train": {"batch_size": 32, "steps": 1},
    "name": "classifier",
}
GENERATOR: dict[str, Any] = {
    "model": {"name": "dcgan", "image_size": 16, "features": 8, "latent_size": 8},
    "task": {"ema": 0.9},
    "dataset": {"name": "digits"},
    "precision": {"mode": "amp"},
    "train": {"batch_size": 16, "steps": 1},
    "name": "generator",
}


def save_run(runs: Path, data: dict[str, Any], *overrides: str) -> Path:
    """Build a run and save its initial weights; return its folder."""
    config = load_config(data, overrides)
    train_data, _ = build_datasets(config)
    run = build_run(config, torch.device("cpu"), train_data.spec)
    directory = create_run(runs, config.run_name)
    directory.config_path.write_text(config.to_yaml())
    checkpoint.save(directory, 1, {**capture(run), "loop": {"step": 1}}, keep_last=1)
    return directory.path


def save_better(folder: Path, figures: dict[int, float]) -> None:
    """Save further checkpoints of a run, each with weights of its own and a metric."""
    directory = open_run(folder)
    loaded = checkpoint.load(directory)
    for step, metric in figures.items():
        for state in loaded.state["modules"].values():
            for tensor in state.values():
                if tensor.is_floating_point():
                    tensor.add_(0.01)
        checkpoint.save(directory, step, loaded.state, keep_last=9, metric=metric)


def move_adapters(folder: Path) -> None:
    """Give the adapters of a run, which begin at zero, values as after a training."""
    directory = open_run(folder)
    loaded = checkpoint.load(directory)
    for state in loaded.state["modules"].values():
        for name, tensor in state.items():
            if name.endswith("lora_b"):
                tensor.normal_(generator=torch.Generator().manual_seed(0))
    checkpoint.save(directory, 2, loaded.state, keep_last=9)


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    return save_run(tmp_path, CLASSIFIER)


@pytest.fixture
def generator(tmp_path: Path) -> Path:
    return save_run(tmp_path, GENERATOR)


@pytest.fixture
def make_classifier(tmp_path: Path) -> Callable[..., Path]:
    return lambda *overrides: save_run(tmp_path, CLASSIFIER, *overrides)
