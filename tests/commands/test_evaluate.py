"""`mpt evaluate`: all metrics of a run or an export, on its own test set or on a folder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mpt.api import train
from mpt.commands.convert import Command as ConvertArguments
from mpt.commands.convert import run as convert
from mpt.commands.evaluate import Command as EvaluateArguments
from mpt.commands.evaluate import run
from mpt.config.load import load_config
from mpt.data.digits import read_digits
from mpt.engine.state.evaluation import evaluate
from mpt.errors import ConfigError, DataError, InputOutputError
from mpt.inference.evaluating import measure_in_half
from mpt.inference.trained import open_trained
from mpt.run.checkpoints.checkpoint import LoadedCheckpoint
from tests.commands.conftest import save_better


def measure(what: Path, output: Path, **options: Any) -> dict[str, Any]:
    run(EvaluateArguments(run=str(what), output=str(output), device="cpu", **options))
    assert (output / "evaluation.html").stat().st_size > 1000
    found: dict[str, Any] = json.loads((output / "evaluation.json").read_text())
    return found


@pytest.fixture
def digits_by_class(tmp_path: Path) -> Path:
    """Twenty test digits as pictures; of the ten classes those below 4 have no folder."""
    images, labels = read_digits("test")
    folder = tmp_path / "other"
    chosen = [index for index, label in enumerate(labels.tolist()) if label > 3][:20]
    for index in chosen:
        place = folder / str(int(labels[index]))
        place.mkdir(parents=True, exist_ok=True)
        pixels = (torch.as_tensor(images[index]).squeeze() * 255).round().byte().numpy()
        Image.fromarray(pixels).save(place / f"{index:03}.png")
    return folder


def test_the_figures_are_those_of_training_on_the_whole_test_set(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = open_trained(str(classifier), tmp_path, "cpu")
    expected = evaluate(trained.run, trained.test_data, 32)
    save_better(classifier, {1: expected["accuracy"]})
    trained = open_trained(str(classifier), tmp_path, "cpu")
    expected = evaluate(trained.run, trained.test_data, 32)
    found = measure(classifier, tmp_path / "out")
    assert found["tested"] == 360
    figures = found["figures"]["fp32"]
    assert {name: figures[name] for name in expected} == expected
    assert "top_five" in figures, "a metric that the settings do not name"
    assert len(found["per_class"]) == 10
    assert "Training measured accuracy" in capsys.readouterr().out


def test_a_folder_is_judged_by_the_classes_that_the_run_learnt(
    classifier: Path, digits_by_class: Path, tmp_path: Path
) -> None:
    found = measure(classifier, tmp_path / "out", data=str(digits_by_class))
    counts = {row["name"]: row["samples"] for row in found["per_class"]}
    assert found["tested"] == 20
    assert [counts[name] for name in "0123"] == [0, 0, 0, 0]
    assert sum(counts.values()) == 20
    (digits_by_class / "cat").mkdir()
    with pytest.raises(DataError, match="the run knows no class 'cat'; it learnt 0, 1, 2"):
        measure(classifier, tmp_path / "two", data=str(digits_by_class))


def test_an_export_is_measured_on_its_own_test_set_and_on_a_folder(
    classifier: Path, digits_by_class: Path, tmp_path: Path
) -> None:
    file = tmp_path / "net.safetensors"
    convert(ConvertArguments(run=str(classifier), to="safetensors", output=str(file)))
    own, of_run = measure(file, tmp_path / "a"), measure(classifier, tmp_path / "b")
    assert [*own["figures"].values()] == [*of_run["figures"].values()]
    other = measure(file, tmp_path / "c", data=str(digits_by_class))
    assert other["tested"] == 20


def test_half_is_measured_next_to_float32(classifier: Path, tmp_path: Path) -> None:
    found = measure(classifier, tmp_path / "out", half=True, dtype="bfloat16")
    assert list(found["figures"]) == ["float32", "bfloat16"]
    with pytest.raises(ConfigError, match="add --half"):
        measure(classifier, tmp_path / "two", dtype="bfloat16")
    file = tmp_path / "net.pt"
    convert(
        ConvertArguments(run=str(classifier), to="pt", half=True, dtype="float16", output=str(file))
    )
    assert list(measure(file, tmp_path / "three")["figures"]) == ["float16"], "as it is stored"
    convert(ConvertArguments(run=str(classifier), to="pt", output=str(file), overwrite=True))
    assert (
        measure(file, tmp_path / "four", half=True, dtype="bfloat16")["figures"] == found["figures"]
    )
    trained = open_trained(str(classifier), tmp_path, "cpu")
    exported = replace(trained, loaded=LoadedCheckpoint(0, {}, Path("net.onnx"), {}))
    with pytest.raises(ConfigError, match="computes in the dtype that it was written in"):
        measure_in_half(exported, trained.test_data, 8, None)


def test_nothing_is_written_over_and_a_data_set_without_folders_says_so(
    generator: Path, classifier: Path, tmp_path: Path
) -> None:
    measure(classifier, tmp_path / "out")
    with pytest.raises(InputOutputError, match=r"evaluation\.json already"):
        measure(classifier, tmp_path / "out")
    with pytest.raises(DataError, match="no folder"):
        measure(generator, tmp_path / "two", data=str(tmp_path / "nowhere"))


def test_by_default_each_evaluation_has_a_folder_of_its_own_in_the_run(
    classifier: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        run(EvaluateArguments(run="classifier", runs=str(tmp_path), device="cpu", json=True))
    assert sorted(path.name for path in (classifier / "evaluations").iterdir()) == [
        "step-00000001",
        "step-00000001-2",
    ]


@pytest.mark.parametrize("json", [False, True])
def test_the_figures_are_printed_although_the_disk_is_full(
    json: bool,
    classifier: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*given: Any) -> None:
        raise InputOutputError("evaluation.json could not be written: the disk is full")

    monkeypatch.setattr("mpt.commands.evaluate.write_details", full)
    with pytest.raises(InputOutputError, match="the disk is full"):
        run(EvaluateArguments("classifier", runs=str(tmp_path), device="cpu", json=json))
    printed = capsys.readouterr().out
    assert "cross_entropy" in printed
    assert "evaluation.html" not in printed, "a page that is not there"


def test_pictures_that_were_exchanged_since_the_training_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split, label, shade in (
        (split, label, shade) for split in ("train", "test") for label, shade in ("a0", "b9")
    ):
        folder = tmp_path / "pictures" / split / label
        folder.mkdir(parents=True)
        for number in range(4):
            Image.new("L", (8, 8), 20 * int(shade) + number).save(folder / f"{number}.png")
    data = {"name": "image_folder", "root": str(tmp_path / "pictures"), "channels": 1}
    model = {"name": "small_cnn", "image_size": 8, "features": 2}
    settings = {"dataset": data, "model": model, "train": {"steps": 1, "batch_size": 4}}
    trained = train(load_config(settings), runs=tmp_path)
    assert not measure(trained.path, tmp_path / "before")["saved_on_other_samples"]
    assert "at this step: the same." in capsys.readouterr().out
    Image.new("L", (8, 8), 99).save(tmp_path / "pictures" / "test" / "a" / "1.png")
    assert measure(trained.path, tmp_path / "after")["saved_on_other_samples"]
    said = " ".join(capsys.readouterr().out.split())
    assert "at this step: on other samples: the test set's files have changed since" in said
    assert not measure(trained.path, tmp_path / "named", data=str(tmp_path / "pictures"))[
        "saved_on_other_samples"
    ]


def test_bad_files_are_not_counted_among_the_samples_and_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "test"):
        for label in ("a", "b"):
            folder = tmp_path / "pictures" / split / label
            folder.mkdir(parents=True)
            for number in range(5):
                Image.new("L", (8, 8), 99 * (label == "b") + number).save(folder / f"{number}.png")
    (tmp_path / "pictures" / "test" / "b" / "4.png").write_bytes(b"no picture")
    data = {"name": "image_folder", "root": str(tmp_path / "pictures"), "on_bad_image": "skip"}
    model = {"name": "small_cnn", "image_size": 8, "features": 2}
    settings = {"dataset": data, "model": model, "train": {"steps": 1, "batch_size": 4}}
    path = train(load_config(settings), runs=tmp_path).path
    found = measure(path, tmp_path / "out")
    assert (found["tested"], found["passed_over"]) == (9, 1)
    said = " ".join(capsys.readouterr().out.split())
    assert "(9 samples, cpu)" in said
    assert "1 bad file was passed over; the first: " in said
    capsys.readouterr()
    convert(ConvertArguments(str(path), to="onnx", output=str(tmp_path / "x.onnx")))
    assert "on 9 test samples" in " ".join(capsys.readouterr().out.split())


def test_an_interrupt_while_measuring_leaves_no_empty_folder(
    classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next evaluation of the step would take another name for it."""

    def interrupted(*words: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("mpt.commands.evaluate.measure_trained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(EvaluateArguments(run=str(classifier), device="cpu"))
    assert not (classifier / "evaluations").exists()
