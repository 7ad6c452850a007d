"""A planned patch that is laid over something else is noticed."""

from pathlib import Path

import pytest

from mpt.config.load import load_config
from mpt.config.patch_origin import MARK, describe_origin, find_strange_patches

CONFIG = {"model": "small_cnn", "dataset": "digits", "train": {"steps": 1, "batch_size": 64}}


def test_a_patch_is_silent_over_what_it_was_planned_for_and_tells_of_anything_else(tmp_path: Path) -> None:
    config = load_config(CONFIG)
    path = tmp_path / "plan.yaml"
    path.write_text(describe_origin(config, "rtx2060", 6 << 30) + "\nmemory: {recompute: all}\n")
    assert find_strange_patches([path], config) == []
    (said,) = find_strange_patches([path], load_config(CONFIG, ["train.batch_size=128"]))
    assert "batch_size 64, not 128" in said


@pytest.mark.parametrize("text", ["", "memory: {}\n", MARK + "{\n", MARK + "[1]\n", MARK + "[" * 5000 + "\n"])
def test_a_patch_without_a_legible_origin_is_taken_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    assert find_strange_patches([path, tmp_path / "missing.yaml"], load_config(CONFIG)) == []
