"""A library's weights under the default scaling of images are warned of, and so are classes without test samples."""

from typing import Any

import pytest
import torch

from mpt.config.load import load_config
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.building.initial_weights import Start
from mpt.engine.building.start_notes import other_scaling, untested_classes
from mpt.seams.samples import DataSpec

THEIRS, OURS = Start("", (), is_own=False), Start("", (), is_own=True)


@pytest.mark.parametrize(
    ("model", "overrides", "start", "warns"),
    [
        ("torchvision:resnet18", (), THEIRS, True),
        ("torchvision:resnet18", ("task.mean=[0.5, 0.5, 0.5]",), THEIRS, False),
        ("torchvision:resnet18", ("model.channels=1",), THEIRS, False),
        ("torchvision:resnet18", (), OURS, False),
        ("small_cnn", (), THEIRS, False),
    ],
)
def test_published_weights_and_the_default_scaling(
    model: str, overrides: tuple[str, ...], start: Start, warns: bool
) -> None:
    said = other_scaling(load_config({"model": model, "dataset": "image_folder"}, overrides), start)
    assert bool(said) == warns
    if said:
        assert "set task.mean='[0.485, 0.456, 0.406]' task.std='[0.229, 0.224, 0.225]'" in said[0]


def test_timm_says_what_each_of_its_models_was_published_for() -> None:
    pytest.importorskip("timm")
    config = load_config({"model": "timm:resnet10t", "dataset": "image_folder"})
    assert "0.456" in other_scaling(config, THEIRS)[0]
    same = load_config({"model": "timm:vit_base_patch16_224", "dataset": "image_folder"})
    assert other_scaling(same, THEIRS) == []


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (
            [2, 0, 1, 1, 3],
            "none of the 7 test samples is of b: nothing is measured for 1 of 5 classes",
        ),
        (
            [7, 0, 0, 0, 0],
            "none of the 7 test samples is of b, c, d and 1 more: nothing is measured for 4 of 5",
        ),
        ([1, 1, 1, 1, 1], None),
        ([0, 0, 0, 0, 0], None),
        (None, None),
    ],
)
def test_classes_without_test_samples_are_warned_of(counts, said):
    notes = untested_classes(
        DataSpec({}, 7, tuple("abcde"), {} if counts is None else {"class_counts": counts})
    )
    assert [note[: len(said)] for note in notes] == [said] if said else notes == []


@pytest.mark.parametrize(
    ("mode", "optimizer", "is_lost"),
    [
        ("bf16-pure", {"name": "adamw", "weight_decay": 0.1, "lr": 1e-3}, True),
        ("bf16-pure", {"name": "adamw", "weight_decay": 0.1, "lr": 0.1}, False),
        ("bf16-pure", {"name": "sgd", "weight_decay": 0.1, "lr": 1e-3}, True),
        ("bf16-pure", {"name": "adam", "weight_decay": 0.0, "lr": 1e-3}, False),
        ("O3", {"name": "lion", "weight_decay": 0.1, "lr": 1e-4}, True),
        ("O3", {"name": "muon", "weight_decay": 0.1, "lr": 1e-4}, True),
        ("bf16-sr", {"name": "adamw", "weight_decay": 0.1, "lr": 1e-3}, False),
        ("bf16", {"name": "adamw", "weight_decay": 0.1, "lr": 1e-3}, False),
    ],
)
def test_weight_decay_that_rounding_takes_whole_is_told(
    mode: str, optimizer: dict[str, Any], is_lost: bool
) -> None:
    model = {"name": "small_cnn", "image_size": 8, "features": 4}
    config = load_config(
        {"model": model, "dataset": "digits", "precision": mode, "optimizer": optimizer}
    )
    run = build_run(config, torch.device("cpu"), build_datasets(config)[0].spec)
    notes = [note for note in run.notes if "weight_decay" in note]
    assert len(notes) == int(is_lost)
    assert (
        not is_lost or f"weight_decay 0.1 at optimizer.lr {optimizer['lr']:g} is lost" in notes[0]
    )
