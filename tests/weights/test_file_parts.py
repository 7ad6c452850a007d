"""Weights in several files with an index, as libraries write large ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mpt.errors import CheckpointError
from mpt.weights.weights_file import load_weights_file

pytestmark = pytest.mark.tier("fast")


def write(folder: Path, places: dict[str, str]) -> Path:
    for part in set(places.values()):
        own = {
            name: torch.full((2,), float(len(name)))
            for name, where in places.items()
            if where == part
        }
        save_file(own, str(folder / Path(part).name))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index


def test_the_tensors_of_all_parts_are_read(tmp_path: Path) -> None:
    index = write(
        tmp_path,
        {"a": "model-1.safetensors", "bb": "model-2.safetensors", "ccc": "model-1.safetensors"},
    )
    found = load_weights_file(index)
    assert {name: value[0].item() for name, value in found.items()} == {
        "a": 1.0,
        "bb": 2.0,
        "ccc": 3.0,
    }


def test_a_missing_part_a_foreign_one_and_one_elsewhere_are_refused(tmp_path: Path) -> None:
    index = write(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    save_file({"other": torch.zeros(1)}, str(tmp_path / "model-2.safetensors"))
    with pytest.raises(CheckpointError, match=r"b is not in model-2.safetensors"):
        load_weights_file(index)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2.safetensors cannot be read"):
        load_weights_file(index)
    with pytest.raises(CheckpointError, match=r"names ../model-1.safetensors, and its parts are"):
        load_weights_file(write(tmp_path, {"a": "../model-1.safetensors"}))
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="it has no weight_map"):
        load_weights_file(index)
