"""A planned patch that is laid over something else is noticed."""

from pathlib import Path

import pytest

from mpt.config.load import load_config
from mpt.planner.recipes.patch_origin import (
    MARK,
    describe_origin,
    find_other_cards,
    find_strange_patches,
)

pytestmark = pytest.mark.tier("fast")


CONFIG = {"model": "small_cnn", "dataset": "digits", "train": {"steps": 1, "batch_size": 64}}


def test_a_patch_is_silent_over_what_it_was_planned_for_and_tells_of_anything_else(
    tmp_path: Path,
) -> None:
    config = load_config(CONFIG)
    path = tmp_path / "plan.yaml"
    path.write_text(describe_origin(config, "rtx2060", 6 << 30) + "\nmemory: {recompute: all}\n")
    assert find_strange_patches([path], config) == []
    (said,) = find_strange_patches([path], load_config(CONFIG, ["train.batch_size=128"]))
    assert "batch_size 64, not 128" in said
    (said,) = find_strange_patches(
        [path], load_config(CONFIG, ["model.features=99", "optimizer=sgd"])
    )
    assert "optimizer adam, not sgd" in said
    assert "model_settings.features" in said


def test_a_patch_of_another_card_is_named_with_what_may_happen(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        describe_origin(load_config(CONFIG), "rtx2060", 6 << 30) + "\nmemory: {recompute: all}\n"
    )
    assert find_other_cards([path], "rtx2060", (6 << 30) - (10 << 20)) == []
    (said,) = find_other_cards([path], "gtx1650", 4 << 30)
    assert said.endswith(
        "planned for rtx2060 with 6 GiB, not gtx1650 with 4 GiB: plan again, or memory may run out"
    )
    (said,) = find_other_cards([path], "rtx4090", 24 << 30)
    assert said.endswith("not rtx4090 with 24 GiB: planned again, a faster recipe may be found")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "memory: {}\n",
        MARK + "{\n",
        MARK + "[1]\n",
        MARK + "[" * 5000 + "\n",
        MARK + '{"gpu": 3}\n',
    ],
)
def test_a_patch_without_a_legible_origin_is_taken_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    assert find_strange_patches([path, tmp_path / "missing.yaml"], load_config(CONFIG)) == []
    assert find_other_cards([path, tmp_path / "missing.yaml"], "rtx2060", 1 << 30) == []
