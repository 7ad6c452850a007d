"""A run of the smallest SAEHD on drawn faces, as it is before its first step."""

from __future__ import annotations

from pathlib import Path

import torch

from mpt.config.load import load_config
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.state.state import capture
from mpt.run.checkpoints import checkpoint
from mpt.run.records.layout import RunDirectory, create_run


def make_run(folder: Path, test_count: int) -> RunDirectory:
    """Make the run `faces` in a folder, with so many faces to test."""
    sizes = {"image_size": 64, "ae_dims": 6, "e_dims": 4, "d_dims": 4, "d_mask_dims": 2}
    config = load_config(
        {
            "model": {"name": "saehd", **sizes},
            "dataset": {"name": "procedural_faces", "count": 4, "test_count": test_count},
            "optimizer": {"name": "adabelief"},
            "precision": {"mode": "fp32"},
            "train": {"batch_size": 2, "steps": 1},
        }
    )
    data, _ = build_datasets(config)
    directory = create_run(folder, "faces")
    directory.config_path.write_text(config.to_yaml())
    run = build_run(config, torch.device("cpu"), data.spec)
    checkpoint.save(directory, 0, capture(run), keep_last=1)
    return directory
