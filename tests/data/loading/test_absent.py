"""A run that was copied to where its data are not still infers and is converted."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from mpt.commands import convert, infer
from mpt.commands.convert import Command as ConvertArguments
from mpt.commands.infer import Command as InferArguments
from mpt.commands.train import Command as TrainArguments
from mpt.commands.train import run as train
from mpt.data.loading.absent import AbsentDataset
from mpt.errors import DataError
from mpt.run.records.data_layout import read_layout, write_layout
from mpt.seams import DataSpec, FieldSpec

SPEC = DataSpec(
    {"image": FieldSpec((3, 8, 8), torch.float32), "label": FieldSpec((), torch.int64)},
    7,
    ("cat", "dog"),
    {"a": 1},
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of a classifier and a generator whose pictures are gone."""
    tmp_path = tmp_path_factory.mktemp("trained")
    for split in ("train", "test"):
        for index in range(8):
            folder = tmp_path / "pictures" / split / ("cat" if index % 2 else "dog")
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("L", (16, 16), 30 * index).save(folder / f"{index}.png")
    for name, model in (
        ("classifier", "{name: small_cnn, features: 4}"),
        ("generator", "{name: lsgan}"),
    ):
        config = tmp_path / f"{name}.yaml"
        config.write_text(
            f"model: {model}\ndataset: {{name: image_folder, root: {tmp_path / 'pictures'}, image_size: 8}}\n"
            f"precision: fp32\ntrain: {{steps: 1, batch_size: 4}}\nname: {name}\n".replace(
                "lsgan", "lsgan, image_size: 8"
            )
        )
        train(TrainArguments(config=config, runs=str(tmp_path / "runs"), quiet=True))
    shutil.move(tmp_path / "pictures", tmp_path / "elsewhere")
    return tmp_path


@pytest.fixture
def moved(trained: Path, tmp_path: Path) -> Path:
    """A copy of those runs."""
    return shutil.copytree(trained, tmp_path / "copy") / "runs"


def test_pictures_are_labelled_with_the_classes_of_the_data_that_are_not_here(
    moved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = next((moved.parent / "elsewhere").rglob("*.png"))
    for half in (False, True):
        infer.run(
            InferArguments(
                run="classifier", runs=str(moved), input=(str(picture),), half=half, device="cpu"
            )
        )
        said = capsys.readouterr().out
        assert f"{picture}: label cat" in said or f"{picture}: label dog" in said


def test_samples_need_no_data_and_without_input_the_missing_data_set_is_named(moved: Path) -> None:
    infer.run(InferArguments(run="generator", runs=str(moved), device="cpu"))
    assert (moved / "generator" / "inference" / "samples.png").is_file()
    with pytest.raises(DataError, match=r"no folder .*pictures.* give --input to infer without it"):
        infer.run(InferArguments(run="classifier", runs=str(moved), device="cpu"))


@pytest.mark.parametrize("name", ["classifier", "generator"])
def test_weights_are_converted_without_the_data(moved: Path, name: str) -> None:
    convert.run(ConvertArguments(run=name, runs=str(moved), half=True))
    assert (moved / name / f"{name}-half.safetensors").is_file()


def test_a_run_that_remembers_no_layout_misses_its_data_as_before(moved: Path) -> None:
    (moved / "generator" / "data.json").unlink()
    with pytest.raises(DataError, match="no folder"):
        infer.run(InferArguments(run="generator", runs=str(moved), device="cpu"))


def test_a_layout_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    write_layout(tmp_path / "data.json", SPEC)
    assert read_layout(tmp_path / "data.json") == SPEC
    assert len(AbsentDataset(SPEC, "")) == 7


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"fields": 3}', "[" * 10_000, json.dumps({**SPEC.to_record(), "size": None})],
)
def test_a_damaged_layout_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "data.json").write_text(text)
    assert read_layout(tmp_path / "data.json") is None
    hostile = json.dumps(SPEC.to_record()).replace("float32", "nn")
    (tmp_path / "data.json").write_text(hostile)
    assert read_layout(tmp_path / "data.json") is None
