import json

import numpy as np
import pytest
from PIL import Image

from mpt.commands import infer
from mpt.commands.infer import Command as InferArguments
from tests.systems.deepfacelab.commands.small_run import make_run


@pytest.fixture
def run_path(tmp_path):
    return make_run(tmp_path / "runs", 3).path


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
