"""The published FID is refused clearly when its parts are not there."""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path

import pytest
import torch

from mpt.errors import ConfigError, DataError
from mpt.metrics.inception_distance import WEIGHTS_NAME, InceptionDistance, check_weights


def test_a_missing_file_says_what_to_fetch(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=WEIGHTS_NAME):
        check_weights(str(tmp_path / "weights.pth"))


def test_a_file_that_is_no_feature_file_is_named(tmp_path: Path) -> None:
    text = tmp_path / "notes.pth"
    text.write_text("not weights")
    with pytest.raises(DataError, match=r"notes\.pth is not the Inception feature file"):
        check_weights(str(text))
    other = tmp_path / "other.pth"
    torch.save({"layer.weight": torch.zeros(2)}, other)
    with pytest.raises(DataError, match="no layer named Mixed_7c"):
        check_weights(str(other))


def test_a_hostile_file_is_refused_and_nothing_in_it_runs(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (str(canary),))

    path = tmp_path / "hostile.pth"
    path.write_bytes(pickle.dumps({"Mixed_7c": Hostile()}))
    with pytest.raises(DataError, match="is not the Inception feature file"):
        check_weights(str(path))
    assert not canary.exists()


@pytest.mark.skipif(importlib.util.find_spec("torch_fidelity") is not None, reason="torch-fidelity is installed")
def test_without_the_extra_the_message_says_how_to_get_it(tmp_path: Path) -> None:
    path = tmp_path / WEIGHTS_NAME
    torch.save({"Mixed_7c.branch_pool.conv.weight": torch.zeros(1)}, path)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[fid\]'"):
        InceptionDistance(str(path), torch.device("cpu"))
