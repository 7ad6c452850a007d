"""A model beside data that it cannot learn from is refused when it is built, in words."""

from pathlib import Path

import pytest
import torch

from mpt.config.finding.registry import INSTALLED
from mpt.config.load import load_config
from mpt.data.pictures.images import write_grid
from mpt.engine.building.build import build_datasets, build_run
from mpt.errors import DataError
from mpt.seams import DataSpec, FieldSpec

IMAGES = DataSpec(
    {"image": FieldSpec((3, 64, 64), torch.float32), "label": FieldSpec((), torch.int64)},
    8,
    ("a", "b"),
)
FACES = DataSpec(
    {"src_warped": FieldSpec((3, 64, 64), torch.float32), "age": FieldSpec((), torch.float32)}, 8
)


WITHOUT_DEFAULTS = {"diffusers"}
"""Built from a folder or a published shape, which a test of data does not have."""

NEEDED = {"face_swap": "src_warped", "face_mask": "face", "interpolate": "first", "detect": "rgb"}
"""What tasks read that no data of images deliver."""


@pytest.mark.parametrize("model", sorted(set(INSTALLED.names("nn")) - WITHOUT_DEFAULTS))
def test_data_of_another_kind_is_named_with_what_is_missing(model: str) -> None:
    config = load_config({"model": {"name": model}})
    needed = {
        "face_swap": "src_warped",
        "face_mask": "face",
        "interpolate": "first",
        "detect": "rgb",
    }.get(config.task.name)
    data, wanted = (IMAGES, needed) if needed else (FACES, "image")
    with pytest.raises(
        DataError, match=rf"it needs '{wanted}' of each sample, but this data set delivers "
    ) as caught:
        build_run(config, torch.device("cpu"), data)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    "model",
    [name for name in INSTALLED.names("nn") if INSTALLED.find("nn", name).task not in NEEDED],
)
def test_a_test_set_too_small_to_evaluate_on_is_met_before_training(
    model: str, tmp_path: Path
) -> None:
    for split, count in (("train", 4), ("test", 1)):
        for label in ("a", "b"):
            (tmp_path / split / label).mkdir(parents=True)
            for number in range(count if label == "a" or split == "train" else 0):
                write_grid(torch.rand(1, 3, 16, 16), tmp_path / split / label / f"{number}.png")
    config = load_config(
        {"model": {"name": model}, "dataset": {"name": "image_folder", "root": str(tmp_path)}}
    )
    if config.task.name == "classify":
        assert len(build_datasets(config)[1]) == 1
        return
    with pytest.raises(DataError, match=rf"1 sample\(s\), and {config.task.name} needs 2 at least"):
        build_datasets(config)
