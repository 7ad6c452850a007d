"""`mpt yolofuse detect`, `export` and `prune` on a run, and `mpt infer` on the same."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from mpt.cli import main
from mpt.data.loading.absent import AbsentDataset
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.state.details import write_details
from mpt.engine.state.state import capture
from mpt.report.run_page.page import write_report
from mpt.run.checkpoints import checkpoint
from mpt.run.records.data_layout import write_layout
from mpt.run.records.layout import create_run
from mpt.seams import DataSpec
from mpt.systems.yolofuse.commands.shared.onnx_file import without_partner
from mpt.systems.yolofuse.data.shared.given_files import in_own_pixels
from mpt.systems.yolofuse.data.shared.scene_augmentation import letterbox_offset
from mpt.systems.yolofuse.metrics.shared.average_precision import Pictures, measure
from mpt.systems.yolofuse.metrics.shared.detection_details import describe
from tests.systems.yolofuse.data.test_detection_files import make_pairs
from tests.systems.yolofuse.tasks.small import config


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = config(task={"confidence": 0.0001, "most_detections": 20})
    data, _ = build_datasets(settings)
    run = build_run(settings, torch.device("cpu"), data.spec)
    directory = create_run(tmp_path_factory.mktemp("runs"), "small")
    directory.config_path.write_text(settings.to_yaml())
    checkpoint.save(directory, 0, capture(run), keep_last=1)
    return Path(directory.path)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    for camera, mode in (("rgb", "RGB"), ("ir", "L")):
        (folder / camera / "deep").mkdir(parents=True)
        for number, name in enumerate(("a", "deep/b")):
            pixels = np.random.default_rng(number).integers(0, 255, (50, 80, 3), dtype=np.uint8)
            Image.fromarray(pixels).convert(mode).save(folder / camera / f"{name}.png")
    return folder


def mpt(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def test_pairs_become_json_labels_and_pictures(run_path: Path, pairs: Path, tmp_path: Path) -> None:
    words = [
        "yolofuse",
        "detect",
        run_path,
        "--input",
        f"rgb={pairs / 'rgb'}",
        "--input",
        f"ir={pairs / 'ir'}",
    ]
    assert mpt(*words, "-o", tmp_path, "--half", "--device", "cpu") == 0
    found = json.loads((tmp_path / "detections.json").read_text())
    assert [one["name"] for one in found] == ["a", "deep/b"]
    assert found[0]["width"] == 80
    for box in (entry["box"] for one in found for entry in one["detections"]):
        assert 0 <= box[0] <= box[2] <= 80
        assert 0 <= box[1] <= box[3] <= 50
    labels = (tmp_path / "labels/deep/b.txt").read_text().splitlines()
    assert len(labels) == len(found[1]["detections"])
    assert all(len(line.split()) == 6 for line in labels)
    with Image.open(tmp_path / "pictures/a.png") as picture:
        assert picture.width == 2 * picture.height / 50 * 80


def test_pictures_stored_on_their_side_are_detected_in_upright(
    run_path: Path, pairs: Path, tmp_path: Path
) -> None:
    """Width, height and boxes are those of the upright picture, whichever command finds them."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for path in pairs.rglob("*.png"):
        target = tmp_path / "turned" / path.relative_to(pairs)
        target.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as upright:
            upright.transpose(Image.Transpose.ROTATE_90).save(target, exif=exif)
    found = []
    for number, root in enumerate((pairs, tmp_path / "turned")):
        words = [
            "yolofuse",
            "detect",
            run_path,
            "--input",
            f"rgb={root / 'rgb'}",
            "--input",
            f"ir={root / 'ir'}",
        ]
        assert mpt(*words, "-o", tmp_path / str(number), "--device", "cpu", "--no-pictures") == 0
        found.append((tmp_path / str(number) / "detections.json").read_text())
    assert json.loads(found[0])[0]["detections"]
    assert found[1] == found[0]


def test_thermal_counts_are_detected_in_by_the_range_of_the_run(
    run_path: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Image.open(pairs / "ir/a.png") as grey:
        counts = (np.asarray(grey) * 5.0 + 3000).astype(np.uint16)
    Image.fromarray(counts).save(tmp_path / "a.tif")
    common = [
        "yolofuse",
        "detect",
        run_path,
        "--input",
        f"rgb={pairs / 'rgb/a.png'}",
        "--device",
        "cpu",
        "--no-pictures",
    ]
    assert mpt(*common, "--input", f"ir={tmp_path / 'a.tif'}", "-o", tmp_path / "none") == 2
    assert "dataset.ir_range" in capsys.readouterr().err
    ranged = ["dataset.ir_range=[3000,4275]"]
    assert (
        mpt(*common, "--input", f"ir={tmp_path / 'a.tif'}", "-o", tmp_path / "deep", *ranged) == 0
    )
    assert mpt(*common, "--input", f"ir={pairs / 'ir/a.png'}", "-o", tmp_path / "plain") == 0
    deep, plain = ((tmp_path / name / "detections.json").read_text() for name in ("deep", "plain"))
    assert deep == plain


def write_video(path: Path, frames: int) -> Path:
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as video:
        stream = video.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for number in range(frames):
            pixels = np.full((64, 96, 3), 20 * number, dtype=np.uint8)
            video.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        video.mux(stream.encode())
    return path


def test_two_videos_are_read_frame_by_frame_and_one_that_ends_early_is_named(
    run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer, shorter = write_video(tmp_path / "rgb.mp4", 5), write_video(tmp_path / "ir.mp4", 3)
    words = ["yolofuse", "detect", run_path, "--input", f"rgb={longer}", "--input", f"ir={shorter}"]
    assert mpt(*words, "-o", tmp_path / "found", "--device", "cpu") == 0
    found = json.loads((tmp_path / "found/detections.json").read_text())
    assert [one["name"] for one in found] == ["rgb-000000", "rgb-000001", "rgb-000002"]
    assert found[0]["width"] == 96
    assert len(list((tmp_path / "found/pictures").glob("*.png"))) == 3
    assert f"{shorter} ended after 3 frames" in capsys.readouterr().err
    shorter.write_bytes(shorter.read_bytes()[:700])
    assert mpt(*words, "-o", tmp_path / "other", "--device", "cpu") == 3
    assert str(shorter) in capsys.readouterr().err


def test_boxes_come_back_to_the_pictures_own_pixels() -> None:
    size, canvas = (1280, 1024), (640, 640)
    offset = letterbox_offset(size, canvas)
    own = np.array([[100.0, 200, 300, 400, 0.9, 0]])
    boxed = own.copy()
    boxed[:, :4] = own[:, :4] / 2 + [*offset, *offset]
    padded = np.concatenate((boxed, np.zeros((1, 6))))
    np.testing.assert_allclose(in_own_pixels(padded, size, canvas), own)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([], "name a picture, a folder or a video for each camera"),
        (["rgb=/nowhere"], "there is no file or folder /nowhere"),
        (["rgb={pairs}/rgb"], "yolofuse takes 2 inputs"),
        (["rgb={pairs}/rgb/a.png", "ir={pairs}/ir"], "not in both"),
    ],
)
def test_inputs_that_are_none_are_named(
    run_path: Path, pairs: Path, capsys: pytest.CaptureFixture[str], inputs: list[str], said: str
) -> None:
    words = [word for text in inputs for word in ("--input", text.format(pairs=pairs))]
    output = pairs / "found"
    assert mpt("yolofuse", "detect", run_path, *words, "--device", "cpu", "-o", output) in (2, 3)
    assert not output.exists()
    assert said in " ".join(capsys.readouterr().err.split())


def test_mpt_infer_takes_a_file_for_each_camera(
    run_path: Path, pairs: Path, tmp_path: Path
) -> None:
    words = ["--input", f"rgb={pairs / 'rgb/a.png'}", "--input", f"ir={pairs / 'ir/a.png'}"]
    assert (
        mpt("infer", run_path, *words, "--overwrite", "--output", tmp_path, "--device", "cpu") == 0
    )
    assert (tmp_path / "detected-a.png").is_file()
    assert "person" in (tmp_path / "labels.csv").read_text()


def test_mpt_infer_answers_with_the_boxes_of_detect_in_the_picture_s_own_pixels(
    run_path: Path, pairs: Path, tmp_path: Path
) -> None:
    """The picture is 80 x 50 and the network's 64 x 64: cropped, a box could not reach the left and right fifths."""
    words = ["--input", f"rgb={pairs / 'rgb'}", "--input", f"ir={pairs / 'ir'}", "--device", "cpu"]
    assert (
        mpt("yolofuse", "detect", run_path, *words, "-o", tmp_path / "detect", "--no-pictures") == 0
    )
    wanted = [
        [
            [entry["class"], f"{entry['score']:.2f}", *(f"{side:.0f}" for side in entry["box"])]
            for entry in one["detections"]
        ]
        for one in json.loads((tmp_path / "detect/detections.json").read_text())
    ]
    assert mpt("infer", run_path, *words, "--output", tmp_path / "infer") == 0
    with (tmp_path / "infer/labels.csv").open(newline="") as file:
        found = [[box.split() for box in row["boxes"].split("; ")] for row in csv.DictReader(file)]
    assert found == wanted
    assert any(float(box[4]) > 65 for boxes in found for box in boxes)


def test_boxes_without_a_partner_are_counted() -> None:
    rows = torch.tensor([[0.0, 0, 10, 10, 0.5, 0], [20, 20, 30, 30, 0.4, 1]])
    assert without_partner(rows, rows.flip(0) + 1e-4) == 0
    assert without_partner(rows, rows + torch.tensor([0.0, 0, 0, 2, 0, 0])) == 2
    assert without_partner(rows, rows + torch.tensor([0.0, 0, 0, 0, 0, 1])) == 2
    assert without_partner(rows, rows[:0]) == 2


def test_a_pruned_run_trains_on(
    run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "prune",
        run_path,
        "--share",
        "0.5",
        "--steps",
        "1",
        "--runs",
        tmp_path,
        "--device",
        "cpu",
    ]
    assert mpt(*words, "--name", "narrow") == 0
    printed = capsys.readouterr()
    said = printed.out + " ".join(printed.err.split())
    assert "| parameters | 1,185,027 | 930,251 | 930,251 |" in said
    assert "memory.prune: hidden channels removed: " in said
    assert mpt("prune", tmp_path / "narrow", "--device", "cpu") == 2
    assert "pruned already" in " ".join(capsys.readouterr().err.split())


def test_evaluation_writes_figures_by_class_and_curves(
    run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mpt("yolofuse", "evaluate", run_path, "-o", tmp_path, "--device", "cpu") == 0
    assert "| person | " in capsys.readouterr().out
    content = json.loads((tmp_path / "evaluation.json").read_text())
    assert len(content["precision_at_recall"][0]) == 101
    assert content["confusion"]["names"] == ["person", "background"]
    page = (tmp_path / "evaluation.html").read_text()
    assert page.count("<svg") == 2
    assert "<td>person</td>" in page
    assert page.count("<script") == 1  # of our own


def test_evaluating_on_other_classes_names_them_in_one_line(
    run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(run_path, tmp_path / "small"))
    write_layout(run / "data.json", build_datasets(config())[0].spec)
    root = make_pairs(tmp_path / "other", 2)
    for names, code in (("cat, dog, person", 4), ("pedestrian", 0)):
        (root / "data.yaml").write_text(
            f"path: .\ntrain: images/train\nval: images/val\nnames: [{names}]\n"
        )
        dataset = ["dataset=null", f"dataset={{name: detection_files, root: {root / 'data.yaml'}}}"]
        assert mpt("yolofuse", "evaluate", run, *dataset, "-o", tmp_path, "--device", "cpu") == code
        said = " ".join(capsys.readouterr().err.split())
        assert f"the data set's classes are {names}, and {run} was trained on person" in said
        assert ("error: RUN: " in said) == (code == 4)
        assert "net.model" not in said


def test_a_run_s_page_shows_curves_and_confusions_of_its_last_evaluation(run_path: Path) -> None:
    """The numbers in the page are the evaluation's, and a class's name is no markup."""
    classes = "<b>a</b>"
    pictures = Pictures(
        [np.array([[0.0, 0, 10, 10, 0.9, 0], [50, 50, 60, 60, 0.8, 0]])],
        [np.array([[0.0, 0, 10, 10, 0]])],
    )
    found = [measure(pictures, 1, way) for way in ("coco", "ultralytics-8.3")]
    details = describe(pictures, [classes], *found, 0.25, 0.45)
    assert details["objects"] == {classes: 1}
    write_details(run_path / "evaluation.json", details, 7, AbsentDataset(DataSpec({}, 0), ""))
    write_report(run_path)
    page = (run_path / "report.html").read_text()
    assert "Detections, at step 7" in page
    assert "mAP 1.000" in page
    assert "&lt;b&gt;a&lt;/b&gt;" in page
    assert "<b>a</b>" not in page
    table = page.partition('class="heat confusion')[2].partition("</table>")[0]
    cells = re.findall(r"<td[^>]*>(\d*)</td>", table)
    # found; not missed; something found where there is nothing; nothing
    assert cells == ["1", "", "1", ""]
    for broken in (
        {**details, "section": 5},
        {**details, "section": {**details["section"], "charts": [{}]}},
    ):
        (run_path / "evaluation.json").write_text(json.dumps({"step": 7, **broken}))
        write_report(run_path)
        assert "Detections, at step" not in (run_path / "report.html").read_text()
