"""Weights are those of the best checkpoint unless another is asked for; which one it was is always printed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mpt.errors import CheckpointError, ConfigError
from mpt.run.checkpoints.checkpoint import TENSORS, save
from mpt.run.checkpoints.choice import load_wanted, read_wish
from mpt.run.records.layout import RunDirectory, create_run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run whose figures are .5, .9, none and .7 at steps 10 to 40."""
    run = create_run(tmp_path, "run")
    for step, metric in ((10, 0.5), (20, 0.9), (30, None), (40, 0.7)):
        save(run, step, {"weight": torch.full((1,), float(step))}, keep_last=9, metric=metric)
    return run


def test_the_best_is_the_default_and_the_newest_is_named_with_it(run: RunDirectory) -> None:
    for wanted in (None, "best"):
        loaded, words = load_wanted(run, wanted, "accuracy")
        assert loaded.step == 20
        assert words == "step 20, the best checkpoint (accuracy 0.9); --newest takes step 40"


def test_newest_and_a_step_are_taken_as_asked_for(run: RunDirectory) -> None:
    loaded, words = load_wanted(run, "newest", "accuracy")
    assert (loaded.step, words) == (40, "step 40, the newest checkpoint (accuracy 0.7)")
    loaded, words = load_wanted(run, 30, "accuracy")
    assert (loaded.step, words) == (30, "step 30, as asked for")
    assert load_wanted(run, 10, "accuracy")[1] == "step 10, as asked for (accuracy 0.5)"
    with pytest.raises(
        CheckpointError, match=r"holds no step-00000031; it has step-00000010, .*step-00000040"
    ):
        load_wanted(run, 31, "accuracy")


def test_without_a_metric_the_newest_is_the_default_and_best_is_refused(tmp_path: Path) -> None:
    run = create_run(tmp_path, "plain")
    for step in (1, 2):
        save(run, step, {}, keep_last=2)
    assert load_wanted(run, None, "accuracy")[1] == "step 2, the newest checkpoint"
    with pytest.raises(CheckpointError, match=r"none is best.*evaluate_every"):
        load_wanted(run, "best", "accuracy")


def test_a_damaged_best_one_gives_way_to_the_newest_with_a_note_and_a_damaged_step_to_none(
    run: RunDirectory,
) -> None:
    path = run.checkpoint_path(20) / TENSORS
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    loaded, words = load_wanted(run, None, "accuracy")
    assert (loaded.step, words) == (40, "step 40, the newest whole checkpoint (accuracy 0.7)")
    assert "the best checkpoint is passed over" in loaded.notes[0]
    assert "step-00000020" in loaded.notes[0]
    with pytest.raises(CheckpointError, match="step-00000020 is refused"):
        load_wanted(run, 20, "accuracy")


def test_two_wishes_are_refused() -> None:
    assert read_wish(best=False, newest=False, step=None) is None
    assert read_wish(best=False, newest=False, step=0) == 0
    with pytest.raises(ConfigError, match="--newest and --step name different checkpoints"):
        read_wish(best=False, newest=True, step=3)
