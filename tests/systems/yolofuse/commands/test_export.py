"""`mpt yolofuse export`: files that other programs and mpt itself open, and find the same boxes with."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mpt.cli import main
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.state.state import capture
from mpt.errors import GateError
from mpt.run.checkpoints import checkpoint
from mpt.run.records.layout import RunDirectory, create_run
from mpt.systems.yolofuse.commands.shared.fewer_bits import Measured, compare_measured
from mpt.systems.yolofuse.tasks.shared.decoded import decoded_outputs
from tests.systems.yolofuse.published import read_json
from tests.systems.yolofuse.tasks.small import config

CLASSES = ("person",)


def mpt(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def make_run(folder: Path, fusion: str, **sections: Any) -> Path:
    cameras = fusion if fusion in ("rgb", "ir") else "pair"
    settings = config(
        model={"name": "yolofuse", "fusion": fusion, "image_size": 64},
        dataset={"name": "rgb_ir_scenes", "count": 8, "test_count": 6, "cameras": cameras},
        task={"confidence": 0.0001, "most_detections": 20},
        **sections,
    )
    data, _ = build_datasets(settings)
    run = build_run(settings, torch.device("cpu"), data.spec)
    with torch.no_grad():
        for name, weight in run.task.modules["net_ema"].named_parameters():
            if name.endswith("lora_b"):
                weight.normal_(std=0.1)
    directory = create_run(folder, fusion)
    directory.config_path.write_text(settings.to_yaml())
    checkpoint.save(directory, 0, capture(run), keep_last=1)
    return Path(directory.path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {fusion: make_run(folder, fusion) for fusion in ("rgb", "mid")}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pictures")
    for camera, mode in (("rgb", "RGB"), ("ir", "L")):
        pixels = np.random.default_rng(0).integers(0, 255, (50, 80, 3), dtype=np.uint8)
        Image.fromarray(pixels).convert(mode).save(folder / f"{camera}.png")
    return {camera: folder / f"{camera}.png" for camera in ("rgb", "ir")}


def detected(
    what: Path, pictures: dict[str, Path], cameras: tuple[str, ...], output: Path
) -> list[dict[str, Any]]:
    words = [word for camera in cameras for word in ("--input", f"{camera}={pictures[camera]}")]
    assert (
        mpt("yolofuse", "detect", what, *words, "-o", output, "--no-pictures", "--device", "cpu")
        == 0
    )
    found: list[dict[str, Any]] = json.loads((output / "detections.json").read_text())[0][
        "detections"
    ]
    return found


def assert_same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        assert one["class"] == other["class"]
        assert abs(one["score"] - other["score"]) <= 2e-4
        np.testing.assert_allclose(one["box"], other["box"], atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fusion", "options"),
    [("mid", ()), ("mid", ("--nms",)), ("mid", ("--ultralytics",)), ("rgb", ("--ultralytics",))],
)
def test_an_exported_file_finds_the_boxes_of_its_run_in_any_size(
    runs: dict[str, Path],
    pictures: dict[str, Path],
    tmp_path: Path,
    fusion: str,
    options: tuple[str, ...],
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    file = tmp_path / "a.onnx"
    assert mpt("yolofuse", "export", runs[fusion], file, *options) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"]
    cameras = ("rgb", "ir") if fusion == "mid" else ("rgb",)
    wanted = detected(runs[fusion], pictures, cameras, tmp_path / "run")
    assert_same(detected(file, pictures, cameras, tmp_path / "file"), wanted)
    opened = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    about = opened.get_modelmeta().custom_metadata_map
    assert ast.literal_eval(about["names"]) == {0: "person"}
    assert ast.literal_eval(about["imgsz"]) == [64, 64]
    assert (about["task"], about["stride"]) == ("detect", "32")
    assert about["channels"] == ("4" if fusion == "mid" else "3")
    assert about["mpt_fit"].startswith("letterbox: ")
    assert "grey 114" in about["mpt_fit"]
    assert json.loads(about["mpt_ranges"]) == dict.fromkeys(cameras)
    inputs = [slot.name for slot in opened.get_inputs()]
    assert inputs == (["images"] if "--ultralytics" in options else list(cameras))
    sizes = [
        4 if inputs == ["images"] and fusion == "mid" else slot.shape[1]
        for slot in opened.get_inputs()
    ]
    for batch, height, width in ((1, 64, 64), (3, 96, 160)):
        feeds = {
            name: np.zeros((batch, channels, height, width), np.float32)
            for name, channels in zip(inputs, sizes, strict=True)
        }
        made = opened.run(None, feeds)
        if options == ("--ultralytics",):
            assert made[0].shape == (batch, 5, height * width * 21 // 1024)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--half", "--int8"])
def test_fewer_bits_are_measured_and_open_everywhere(
    runs: dict[str, Path],
    pictures: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    option: str,
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    words = [
        "yolofuse",
        "export",
        runs["mid"],
        tmp_path / "a.onnx",
        option,
        *(["4"] if option == "--int8" else []),
    ]
    assert mpt(*words) == 0
    printed = capsys.readouterr().out
    assert "| mAP50 |" in printed
    assert "trtexec --onnx=" in printed
    sizes = [
        float(size)
        for size in printed.partition("| file, MiB | ")[2].partition(" |\n")[0].split(" | ")
    ]
    assert sizes[1] < 0.75 * sizes[0]
    assert detected(tmp_path / "a.onnx", pictures, ("rgb", "ir"), tmp_path / "file")


def test_a_file_that_loses_more_than_the_gate_allows_is_not_kept() -> None:
    figures = {"map50": 0.9, "map50_95": 0.6, "milliseconds": 1.0}
    before = Measured(100, figures)
    compare_measured(before, Measured(50, {**figures, "map50": 0.895}), "int8", 6, 0.01)
    with pytest.raises(GateError, match=r"int8 loses 0\.0200 of mAP50-95, and --gate allows 0\.01"):
        compare_measured(before, Measured(50, {**figures, "map50_95": 0.58}), "int8", 6, 0.01)


def test_each_layout_of_outputs_says_the_same() -> None:
    corners = torch.tensor([[[10.0, 20, 30, 60], [0, 0, 8, 8]], [[1, 2, 3, 4], [5, 5, 9, 9]]])
    scores = torch.tensor([[[0.9, 0.1], [0.2, 0.3]], [[0.4, 0.5], [0.6, 0.7]]])
    middle, size = (corners[..., :2] + corners[..., 2:]) / 2, corners[..., 2:] - corners[..., :2]
    together = torch.cat((middle, size, scores), 2).transpose(1, 2)
    for made in ([corners, scores.transpose(1, 2)], [together]):
        found = decoded_outputs(made)
        torch.testing.assert_close(found.boxes, corners)
        torch.testing.assert_close(found.scores, scores)
    kept = decoded_outputs(
        [torch.tensor([[1.0, 1, 2, 3, 4, 0.5, 1], [1, 5, 5, 9, 9, 0.6, 0]])], 2, 2
    )
    assert kept.scores.tolist()[0] == [[0, 0], [0, 0]]
    torch.testing.assert_close(kept.boxes[1], corners[1])
    torch.testing.assert_close(kept.scores[1], torch.tensor([[0, 0.5], [0.6, 0]]))


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_weights_have_the_names_of_ultralytics_models(
    runs: dict[str, Path], tmp_path: Path, suffix: str
) -> None:
    from safetensors.torch import load_file

    file = tmp_path / f"a.{suffix}"
    assert mpt("yolofuse", "export", runs["rgb"], file) == 0
    state = torch.load(file, weights_only=True) if suffix == "pt" else load_file(file)
    listing = read_json("listings.json.gz")["yolov8n_nc1"]["state_dict"]
    assert {name: list(value.shape) for name, value in state.items()} == listing


def test_weights_by_name_have_the_adapters_in_them(tmp_path: Path) -> None:
    adapted = make_run(tmp_path, "rgb", memory={"lora": {"rank": 2, "targets": ["convolutions"]}})
    assert mpt("yolofuse", "export", adapted, tmp_path / "a.pt") == 0
    state = torch.load(tmp_path / "a.pt", weights_only=True)
    listing = read_json("listings.json.gz")["yolov8n_nc1"]["state_dict"]
    assert {name: list(value.shape) for name, value in state.items()} == listing
    saved = checkpoint.load(RunDirectory(adapted)).state["modules"]["net_ema"]
    name = "model.1.conv"
    assert f"{name}.lora_b" in saved
    assert not torch.allclose(state[f"{name}.weight"], saved[f"{name}.weight"], atol=1e-3)


def test_a_least_score_of_zero_is_refused_as_in_detection(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        mpt("yolofuse", "export", runs["rgb"], tmp_path / "a.onnx", "--nms", "--confidence", "0")
        == 2
    )
    assert "task.confidence" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [("--nms", "--half"), ("--half", "--int8", "4"), ("--nms", "--ultralytics")],
)
def test_options_that_exclude_each_other_are_named(
    runs: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
) -> None:
    assert mpt("yolofuse", "export", runs["mid"], tmp_path / "a.onnx", *options) == 2
    assert "choose one" in capsys.readouterr().err
    assert mpt("yolofuse", "export", runs["mid"], tmp_path / "a.pt", options[0], *options[2:]) == 2
    assert not list(tmp_path.iterdir())


def test_another_ending_than_those_that_are_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mpt("yolofuse", "export", "run", tmp_path / "a.pkl") == 2
    assert "a.pkl ends in none of .onnx, .pt, .safetensors" in capsys.readouterr().err
