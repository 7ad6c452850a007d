import json

import numpy as np
import pytest
import torch
from PIL import Image

from mpt.commands import infer
from mpt.commands.infer import Command as InferArguments
from mpt.config.load import load_config
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.state.state import capture
from mpt.run.checkpoints import checkpoint
from mpt.run.records.layout import create_run


@pytest.fixture
def run_path(tmp_path):
    config = load_config(
        {
            "model": {
                "name": "saehd",
                "image_size": 64,
                "ae_dims": 6,
                "e_dims": 4,
                "d_dims": 4,
                "d_mask_dims": 2,
            },
            "dataset": {"name": "procedural_faces", "count": 4, "test_count": 3},
            "optimizer": {"name": "adabelief"},
            "precision": {"mode": "fp32"},
            "train": {"batch_size": 2, "steps": 1},
        }
    )
    data, _ = build_datasets(config)
    run = build_run(config, torch.device("cpu"), data.spec)
    directory = create_run(tmp_path / "runs", "faces")
    directory.config_path.write_text(config.to_yaml())
    checkpoint.save(directory, 0, capture(run), keep_last=1)
    return directory.path


def test_pictures_become_swaps_and_masks_side_by_side(run_path, tmp_path):
    faces = tmp_path / "faces"
    faces.mkdir()
    for index in range(3):
        picture = np.random.default_rng(index).integers(0, 255, (50, 50, 3), dtype=np.uint8)
        Image.fromarray(picture).save(faces / f"{index}.png")
    output = tmp_path / "out"
    infer.run(InferArguments(run=str(run_path), input=(str(faces),), output=str(output)))
    names = {path.name for path in output.iterdir()}
    assert {"samples.png", "swap-0.png", "mask-2.png"} <= names
    with Image.open(output / "samples.png") as grid:
        assert grid.width > grid.height  # six pictures a row, three rows


def test_half_states_its_distance_from_float32(run_path, tmp_path):
    output = tmp_path / "out"
    infer.run(InferArguments(run=str(run_path), half=True, output=str(output)))
    said = json.loads((output / "half.json").read_text())
    assert 0 < said["distance"]["max_error"] < 0.1
    assert said["metric_name"] == "source_psnr"
    assert abs(said["half"]["metric"] - said["full"]["metric"]) < 0.3
