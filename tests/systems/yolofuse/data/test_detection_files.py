"""Pairs of picture files: layouts, what is wrong with them, and the changes by chance."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from pydantic import ValidationError

from mpt.cli import main
from mpt.config.finding.shipped import find_shipped
from mpt.data.loading.loader import Loader
from mpt.errors import ConfigError, DataError
from mpt.systems.yolofuse.data.detection_files import DetectionFiles, Settings, assume, build
from mpt.systems.yolofuse.data.shared.scene_augmentation import Scene, letterbox
from mpt.systems.yolofuse.metrics.shared.average_precision import Pictures, gather_pictures, measure

SIZE = (80, 60)
MARK = (16, 12, 48, 36)
"""Where the one object of each picture is: its pixels are bright in both cameras."""


def picture(mode: str, number: int, size: tuple[int, int] = SIZE) -> Image.Image:
    image = Image.new(mode, size, 20 + number if mode == "L" else (20 + number, 30, 40))
    image.paste(250 if mode == "L" else (250, 250, 250), MARK)
    return image


def label() -> str:
    left, top, right, bottom = MARK
    width, height = SIZE
    middle = f"{(left + right) / 2 / width} {(top + bottom) / 2 / height}"
    return f"0 {middle} {(right - left) / width} {(bottom - top) / height}"


def make_pairs(root: Path, count: int = 4, splits: tuple[str, str] = ("train", "val")) -> Path:
    """Write YOLOFuse's layout."""
    for split in splits:
        for folder in ("images", "imagesIR", "labels"):
            (root / folder / split).mkdir(parents=True)
        for number in range(count):
            picture("RGB", number).save(root / "images" / split / f"{number}.png")
            picture("L", number).save(root / "imagesIR" / split / f"{number}.png")
            (root / "labels" / split / f"{number}.txt").write_text(label())
    return root


def opened(root: Path, split: str = "train", seed: int = 0, **settings: Any) -> DetectionFiles:
    return build(Settings(root=str(root), image_size=96, **settings), split, seed)


def test_yolofuses_layout_is_found_and_letterboxed_for_testing(tmp_path: Path) -> None:
    data = opened(make_pairs(tmp_path), "test")
    batch = data.fetch([0, 1], 0)
    assert batch.pop("shown").tolist() == [[0, 12, 96, 84]] * 2
    assert {name: (tuple(v.shape), v.dtype) for name, v in batch.items()} == {
        name: ((2, *spec.shape), spec.dtype) for name, spec in data.spec.fields.items()
    }
    # 80 x 60 in 96 x 96: 1.2 times as large, 12 pixels of grey above and below.
    torch.testing.assert_close(batch["boxes"][0, 0], torch.tensor([19.2, 26.4, 57.6, 55.2]))
    assert batch["box_mask"].tolist() == [[True], [True]]
    assert batch["rgb"][0, :, 5, 5].tolist() == [114] * 3
    assert batch["ir"][0, 0, 40, 40] == 250


def test_a_crowd_of_coco_is_tested_by_and_not_learnt_from(tmp_path: Path) -> None:
    root = make_pairs(tmp_path)
    for split in ("train", "val"):
        files = sorted((root / "images" / split).iterdir())
        mark = {"image_id": 0, "category_id": 5, "bbox": [8, 6, 16, 12], "iscrowd": 0}
        crowd = {"image_id": 0, "category_id": 9, "bbox": [40, 30, 40, 30], "iscrowd": 1}
        content = {
            "images": [
                {"id": n, "file_name": file.name, "width": 80, "height": 60}
                for n, file in enumerate(files)
            ],
            "categories": [{"id": 5, "name": "person"}, {"id": 9, "name": "car"}],
            "annotations": [mark, crowd],
        }
        (root / f"{split}.json").write_text(json.dumps(content))
    still = {"mosaic": 0, "translate": 0, "scale": 0, "flip_across": 0, "labels": "{split}.json"}
    train, test = (opened(root, split, **still).fetch([0], 0) for split in ("train", "test"))
    assert train["box_mask"].tolist() == [[True, False]]
    assert not train["boxes"][0, 1].any()
    assert test["box_mask"].tolist() == [[True, False]]
    assert test["classes"].tolist() == [[0, 1]]
    assert test["boxes"][0, 1].tolist() == [48, 48, 96, 84]
    found = torch.tensor([[[50.0, 50, 90, 80, 0.9, 1], [9.6, 19.2, 28.8, 33.6, 0.8, 0]]])
    pictures = gather_pictures([{"found": found, **test}])
    assert pictures.crowds[0].tolist() == [[48, 48, 96, 84, 1]]


def test_llvip_as_published_is_found(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for folder, mode in (("visible", "RGB"), ("infrared", "RGB")):
            (tmp_path / folder / split).mkdir(parents=True)
            picture(mode, 1).save(tmp_path / folder / split / f"{split}1.jpg")
        (tmp_path / "Annotations").mkdir(exist_ok=True)
        left, top, right, bottom = MARK
        box = f"<xmin>{left}</xmin><ymin>{top}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax>"
        (tmp_path / "Annotations" / f"{split}1.xml").write_text(
            f"<annotation><size><width>{SIZE[0]}</width><height>{SIZE[1]}</height></size><object><name>person</name>"
            f"<bndbox>{box}</bndbox></object></annotation>"
        )
    for split in ("train", "test"):
        data = opened(tmp_path, split)
        assert len(data) == 1
        np.testing.assert_allclose(data.pairs[0].rows, [[0, 0.2, 0.2, 0.6, 0.6]])


def test_coco_labels_bring_their_own_classes(tmp_path: Path) -> None:
    make_pairs(tmp_path, 2)
    content = {
        "images": [{"id": n, "file_name": f"{n}.png", "width": 80, "height": 60} for n in range(2)],
        "categories": [{"id": 1, "name": "bicycle"}, {"id": 2, "name": "car"}],
        "annotations": [{"image_id": 0, "category_id": 2, "bbox": [16, 12, 32, 24]}],
    }
    (tmp_path / "train.json").write_text(json.dumps(content))
    data = opened(tmp_path, cameras="rgb", labels="{split}.json")
    assert data.spec.classes == ("bicycle", "car")
    assert [len(pair.rows) for pair in data.pairs] == [1, 0]
    assert set(data.spec.fields) == {"rgb", "boxes", "classes", "box_mask"}


def test_folders_can_be_named(tmp_path: Path) -> None:
    make_pairs(tmp_path / "x")
    root = tmp_path / "x"
    (root / "images").rename(root / "day")
    (root / "imagesIR").rename(root / "night")
    with pytest.raises(
        DataError, match=r"no train pictures; looked for images/train, .*dataset\.images"
    ):
        opened(root)
    data = opened(root, images="day/{split}", infrared="night/{split}")
    assert len(data) == 4
    assert opened(root, cameras="ir", infrared="night/{split}").spec.fields["ir"].shape == (
        1,
        96,
        96,
    )


FAULTS = {
    "partner": "no infrared partner 2",
    "label": r"labels/train/2\.txt: there is no such file; a picture without objects has an empty one",
    "outside": r"labels/train/2\.txt: line 1 has values outside",
    "class": r"labels/train/2\.txt: box 1 is of class 4",
    "size": "the cameras' pictures are 80x60 and 40x30 pixels",
    "picture": "cannot be decoded|not an image",
}


def spoil(root: Path, fault: str) -> None:
    if fault == "partner":
        (root / "imagesIR/train/2.png").unlink()
    elif fault == "label":
        (root / "labels/train/2.txt").unlink()
    elif fault == "outside":
        (root / "labels/train/2.txt").write_text("0 300 200 20 20")
    elif fault == "class":
        (root / "labels/train/2.txt").write_text("4 .5 .5 .1 .1")
    elif fault == "size":
        picture("L", 2).resize((40, 30)).save(root / "imagesIR/train/2.png")
    else:
        (root / "images/train/2.png").write_bytes(b"no picture")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_pair_stops_the_run_by_name(tmp_path: Path, fault: str) -> None:
    spoil(make_pairs(tmp_path), fault)
    with pytest.raises(DataError, match=FAULTS[fault]) as caught:
        opened(tmp_path, mosaic=0.0).fetch([0, 1, 2, 3], 0)
    assert "2" in str(caught.value)


def test_a_picture_that_cannot_be_decoded_names_this_data_sets_own_setting(tmp_path: Path) -> None:
    picture = make_pairs(tmp_path) / "imagesIR/train/2.png"
    picture.write_bytes(picture.read_bytes()[:60])
    with pytest.raises(DataError, match=r"imagesIR/train/2\.png: .*, or set dataset\.on_bad=skip"):
        opened(tmp_path, mosaic=0.0).fetch([2], 0)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_pair_is_left_out_and_counted_where_that_is_asked(tmp_path: Path, fault: str) -> None:
    spoil(make_pairs(tmp_path), fault)
    data = opened(tmp_path, on_bad="skip", mosaic=0.0)
    batch = data.fetch(list(range(len(data))), 0)
    assert batch["box_mask"].all()
    assert [Path(path).name for path in data.bad_files] == ["2.png"]


def test_a_pair_that_cannot_be_decoded_is_left_out_of_the_evaluation(tmp_path: Path) -> None:
    (make_pairs(tmp_path) / "imagesIR/val/2.png").write_bytes(b"no picture")
    data = opened(tmp_path, "test", on_bad="skip")
    data.fetch([0, 1, 2, 3], 0)
    assert [data.is_left_out(index) for index in range(4)] == [False, False, True, False]


def test_a_missing_label_can_mean_a_picture_without_objects(tmp_path: Path) -> None:
    spoil(make_pairs(tmp_path), "label")
    assert [len(pair.rows) for pair in opened(tmp_path, missing_label="empty").pairs] == [
        1,
        1,
        0,
        1,
    ]


def test_a_set_of_nothing_but_bad_pairs_is_refused(tmp_path: Path) -> None:
    make_pairs(tmp_path, 1)
    (tmp_path / "labels/train/0.txt").write_text("9 .5 .5 .1 .1")
    with pytest.raises(
        DataError, match=r"none of its 1 train pictures can be used; the first: .*class 9"
    ):
        opened(tmp_path, on_bad="skip")


def test_missing_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no folder .*nowhere"):
        opened(tmp_path / "nowhere")
    make_pairs(tmp_path)
    (tmp_path / "imagesIR").rename(tmp_path / "x")
    with pytest.raises(DataError, match=r"dataset\.cameras=rgb to train on one camera"):
        opened(tmp_path)


def test_samples_depend_on_seed_epoch_and_index_alone(tmp_path: Path) -> None:
    root = make_pairs(tmp_path, 6)
    second = opened(root)
    plain, worked = Loader(second, 3, 0).batches(), Loader(opened(root), 3, 0, workers=2).batches()
    for _ in range(4):
        one, other = next(plain), next(worked)
        assert all(torch.equal(one[name], other[name]) for name in one)
    worked.close()  # type: ignore[attr-defined]
    alone = second.fetch([5], 3)
    within = opened(root).fetch([1, 5], 3)
    assert all(torch.equal(alone[name][0], within[name][1]) for name in alone)
    assert not torch.equal(alone["rgb"], second.fetch([5], 4)["rgb"])
    assert not torch.equal(alone["rgb"], opened(root, seed=1).fetch([5], 3)["rgb"])


@pytest.mark.parametrize("mosaic", [0.0, 1.0])
@pytest.mark.parametrize("mixup", [0.0, 1.0])
def test_boxes_stay_on_their_objects_and_cameras_together(
    tmp_path: Path, mosaic: float, mixup: float
) -> None:
    """Every object is a bright block in both cameras, so its box must hold bright pixels, and the rest none."""
    data = opened(
        make_pairs(tmp_path, 5),
        mosaic=mosaic,
        mixup=mixup,
        flip_down=0.5,
        hue=0,
        saturation=0,
        brightness=0,
    )
    for epoch in range(6):
        batch = data.fetch([0, 1, 2], epoch)
        for rgb, ir, boxes, mask in zip(
            batch["rgb"], batch["ir"], batch["boxes"], batch["box_mask"], strict=True
        ):
            assert (rgb.float().mean(0) - ir[0].float()).abs().max() < 60
            inside = torch.zeros(96, 96, dtype=torch.bool)
            for left, top, right, bottom in boxes[mask].round().int().tolist():
                inside[top:bottom, left:right] = True
                middle = ir[0, (top + bottom) // 2, (left + right) // 2]
                assert middle > (240 if not mixup else 90)
            if not mixup:
                grown = torch.nn.functional.max_pool2d(inside[None].float(), 5, 1, 2)[0] > 0
                # What is cut to a sliver has no box: a few bright pixels may be left over.
                assert ((ir[0] > 200) & ~grown).float().mean() < 0.02


def test_no_mosaic_from_an_epoch_on(tmp_path: Path) -> None:
    data = opened(
        make_pairs(tmp_path), mosaic_epochs=2, translate=0, scale=0, flip_across=0, brightness=0
    )
    counts = [int(data.fetch([0], epoch)["box_mask"].sum()) for epoch in range(4)]
    assert counts[2:] == [1, 1]
    assert max(counts[:2]) > 1


def test_brightness_changes_both_cameras_alike(tmp_path: Path) -> None:
    data = opened(
        make_pairs(tmp_path), mosaic=0, translate=0, scale=0, flip_across=0, hue=0, saturation=0
    )
    for epoch in range(4):
        batch = data.fetch([0], epoch)
        visible, infrared = (
            batch["rgb"][0, :, 40, 40].float().mean(),
            batch["ir"][0, 0, 40, 40].float(),
        )
        assert abs(visible - infrared) <= 2


def crowd(root: Path, count: int) -> Path:
    """Write one pair whose label file has so many boxes, side by side."""
    make_pairs(root, 1)
    places = [((n % 25 + 0.5) / 25, (n // 25 + 0.5) / 25) for n in range(count)]
    for split in ("train", "val"):
        (root / "labels" / split / "0.txt").write_text(
            "".join(f"0 {x} {y} .04 .04\n" for x, y in places)
        )
    return root


@pytest.mark.parametrize(("split", "most"), [("train", 2000), ("test", 500)])
def test_no_box_of_a_crowd_is_left_out_and_the_fullest_sample_is_planned(
    tmp_path: Path, split: str, most: int
) -> None:
    data = opened(crowd(tmp_path, 500), split, translate=0, scale=0, mosaic_epochs=3)
    batch = data.fetch([0], 5)
    assert int(batch["box_mask"].sum()) == 500
    assert batch["boxes"].shape == (1, 512 if split == "train" else 500, 4)
    assert data.spec.fields["boxes"].shape == (most, 4)
    full = data.spec.filled(batch)
    assert full["boxes"].shape == (1, most, 4)
    assert int(full["box_mask"].sum()) == 500


def test_more_boxes_than_are_planned_for_are_kept(tmp_path: Path) -> None:
    data = opened(crowd(tmp_path, 60), mosaic=0, translate=0, scale=0, most_boxes=20)
    assert data.spec.fields["boxes"].shape == (20, 4)
    batch = data.fetch([0], 0)
    assert int(batch["box_mask"].sum()) == 60
    with pytest.raises(DataError, match="is the largest that the data set named"):
        data.spec.filled(batch)


def test_average_precision_of_a_crowd_is_that_of_pycocotools(tmp_path: Path) -> None:
    """Of 500 people in a picture the 300 best detections find 300."""
    pytest.importorskip("pycocotools")
    truth = opened(crowd(tmp_path, 500), "test").fetch([0], 0)
    found = torch.cat(
        (
            truth["boxes"][:, :300],
            torch.linspace(1, 0.5, 300)[None, :, None],
            torch.zeros(1, 300, 1),
        ),
        2,
    )
    evidence = {"found": found, **{name: truth[name] for name in ("boxes", "classes", "box_mask")}}
    pictures = gather_pictures([evidence])
    theirs = coco_ap50(pictures)
    assert 0.6 < theirs < 0.61
    assert abs(measure(pictures, 1, "coco", 300).map50 - theirs) < 1e-12


def coco_ap50(pictures: Pictures) -> float:
    """Return pycocotools' AP at IoU .5 of one picture's boxes of one class, 300 detections at most."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def entry(number: int, row: np.ndarray) -> dict[str, Any]:
        box = [*row[:2], *(row[2:4] - row[:2])]
        return {
            "id": number + 1,
            "image_id": 1,
            "category_id": 1,
            "bbox": box,
            "area": box[2] * box[3],
            "iscrowd": 0,
        }

    with contextlib.redirect_stdout(io.StringIO()):
        truth, found = COCO(), COCO()
        for api, rows in ((truth, pictures.truth[0]), (found, pictures.detections[0])):
            annotations = [entry(n, row) for n, row in enumerate(rows)]
            if api is found:
                annotations = [
                    {**one, "score": row[4]} for one, row in zip(annotations, rows, strict=True)
                ]
            api.dataset = {
                "images": [{"id": 1}],
                "categories": [{"id": 1}],
                "annotations": annotations,
            }
            api.createIndex()
        evaluation = COCOeval(truth, found, "bbox")
        evaluation.params.maxDets = [1, 100, 300]
        evaluation.evaluate()
        evaluation.accumulate()
    return float(evaluation.eval["precision"][0, :, 0, 0, 2].mean())


def test_pictures_need_not_be_square(tmp_path: Path) -> None:
    data = opened(make_pairs(tmp_path), "test", height=64)
    batch = data.fetch([0], 0)
    assert batch["rgb"].shape == (1, 3, 64, 96)
    # 80 x 60 in 96 x 64: limited by the height.
    torch.testing.assert_close(
        batch["boxes"][0, 0, 3] - batch["boxes"][0, 0, 1], torch.tensor(24 * 64 / 60)
    )


def test_cached_pictures_are_the_same(tmp_path: Path) -> None:
    root = make_pairs(tmp_path)
    plain, cached = opened(root), opened(root, cache=True)
    for _ in range(2):
        assert all(
            torch.equal(a, b)
            for a, b in zip(plain.fetch([0, 1], 1).values(), cached.fetch([0, 1], 1).values())
        )
    assert cached.cached


def test_settings_that_would_part_boxes_from_pictures_are_refused(tmp_path: Path) -> None:
    make_pairs(tmp_path)
    with pytest.raises(ValidationError, match="changed together with their boxes"):
        opened(tmp_path, augment=["RandomHorizontalFlip"])
    with pytest.raises(ValidationError, match="leave it out"):
        opened(tmp_path, channels=1)


def test_a_plan_needs_no_files() -> None:
    spec = assume(Settings(root="/nowhere", image_size=640))
    assert spec is not None
    assert spec.fields["ir"].shape == (1, 640, 640)
    assert spec.classes == ("person",)


DATA_FILES = {
    "beside the folders": (
        "path: .\ntrain: images/train\nval: images/val\nnames: {0: cat, 1: dog}",
        "sub",
    ),
    "in a folder of its own": (
        "path: ../set\ntrain: images/train\nval: images/val\nnc: 2\nnames: [cat, dog]",
        "set",
    ),
}


@pytest.mark.parametrize(("text", "where"), DATA_FILES.values(), ids=DATA_FILES)
def test_a_data_file_of_yolo_names_folders_and_classes(
    tmp_path: Path, text: str, where: str
) -> None:
    make_pairs(tmp_path / where)
    (tmp_path / "sub").mkdir(exist_ok=True)
    (tmp_path / "sub" / "data.yaml").write_text(text)
    for split in ("train", "test"):
        data = opened(tmp_path / "sub" / "data.yaml", split)
        assert len(data) == 4
        assert data.spec.classes == ("cat", "dog")
        assert [path.parts[-3] for path in data.pairs[0].paths] == ["images", "imagesIR"]
    planned = assume(Settings(root=str(tmp_path / "sub" / "data.yaml"), image_size=96))
    assert planned is not None
    assert planned.classes == ("cat", "dog")


def test_a_data_file_as_roboflow_writes_it_is_understood(tmp_path: Path) -> None:
    """Its folders begin with ../, though they are beside it."""
    make_pairs(tmp_path, splits=("a", "b"))
    for own, split in (("a", "train"), ("b", "valid")):
        (tmp_path / split).mkdir()
        for folder in ("images", "imagesIR", "labels"):
            (tmp_path / folder / own).rename(tmp_path / split / folder)
    (tmp_path / "data.yaml").write_text(
        "train: ../train/images\nval: ../valid/images\nnames: [cat]"
    )
    data = opened(tmp_path / "data.yaml", "test", cameras="rgb")
    assert data.pairs[0].paths == (tmp_path / "valid/images/0.png",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train: images/train\nnames: [cat]", "it has no val"),
        (
            "train: images/train\nval: images/val\nnc: 3\nnames: [cat]",
            "nc is 3, and there are 1 names",
        ),
        ("train: images/train\nval: images/val\nnames: {0: cat, 2: dog}", "0 to 1 are needed"),
        (
            "train: images/train\nval: [1, images/val]\nnames: [cat]",
            "write a folder, a text file of pictures, or a list",
        ),
        (
            "train: images/train\nval: [images/val, images/more]\nnames: [cat]",
            "there is no .*images/more, which it names",
        ),
        (
            "train: images/train\nval: val.txt\nnames: [cat]",
            r"there is no .*val\.txt, which it names for test",
        ),
        (
            "path: /nowhere\ntrain: a\nval: b\nnames: [cat]",
            "its path is /nowhere, and there is no such",
        ),
        ("train: photos/train\nval: photos/val\nnames: [cat]", "no part of it is called images"),
        ("- train", "it is no mapping"),
    ],
)
def test_what_a_data_file_lacks_is_said(tmp_path: Path, text: str, said: str) -> None:
    make_pairs(tmp_path)
    (tmp_path / "data.yaml").write_text(text)
    with pytest.raises(DataError, match=said):
        opened(tmp_path / "data.yaml", "test")


def test_classes_that_differ_from_the_data_files_are_refused(tmp_path: Path) -> None:
    make_pairs(tmp_path)
    (tmp_path / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [cat, dog]")
    with pytest.raises(ConfigError, match=r"leave dataset\.classes out"):
        opened(tmp_path / "data.yaml", classes=["cat", "cow"])


def turn_files(root: Path) -> None:
    """Store every picture as a camera held on its side does: turned, with the way back in its EXIF data."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for path in root.rglob("*.png"):
        with Image.open(path) as upright:
            turned = upright.transpose(Image.Transpose.ROTATE_90)
        turned.save(path, exif=exif)


@pytest.mark.parametrize("split", ["train", "test"])
def test_pictures_stored_on_their_side_give_the_samples_of_upright_ones(
    tmp_path: Path, split: str
) -> None:
    for name in ("upright", "turned"):
        make_pairs(tmp_path / name)
    turn_files(tmp_path / "turned")
    upright, turned = (
        opened(tmp_path / name, split).fetch([0, 1, 2], 0) for name in ("upright", "turned")
    )
    assert all(torch.equal(upright[name], turned[name]) for name in upright)


def test_labels_of_a_picture_as_stored_are_refused_where_it_is_turned(tmp_path: Path) -> None:
    turn_files(make_pairs(tmp_path, 1))
    for size in (SIZE, SIZE[::-1]):
        content = {
            "images": [{"id": 0, "file_name": "0.png", "width": size[0], "height": size[1]}],
            "categories": [{"id": 1, "name": "car"}],
            "annotations": [{"image_id": 0, "category_id": 1, "bbox": [16, 12, 32, 24]}],
        }
        (tmp_path / f"{size[0]}.json").write_text(json.dumps(content))
    assert opened(tmp_path, labels="80.json", mosaic=0.0).fetch([0], 0)["box_mask"].any()
    with pytest.raises(
        DataError, match=r"of a picture of 60x80 pixels, and turned upright .* it has 80x60"
    ):
        opened(tmp_path, labels="60.json", mosaic=0.0).fetch([0], 0)


def make_thermal(root: Path, suffix: str = "png") -> Path:
    """Make the infrared pictures 16-bit counts from 3000 to 4275, as a thermal camera writes them."""
    for path in make_pairs(root).rglob("imagesIR/*/*.png"):
        with Image.open(path) as grey:
            counts = (np.asarray(grey) * 5.0 + 3000).astype(np.uint16)
        path.unlink()
        Image.fromarray(counts).save(path.with_suffix(f".{suffix}"))
    return root


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_thermal_counts_give_the_samples_of_8_bits_where_the_range_is_set(
    tmp_path: Path, suffix: str, split: str
) -> None:
    make_pairs(tmp_path / "8")
    plain = opened(tmp_path / "8", split).fetch([0, 1], 0)
    thermal = opened(make_thermal(tmp_path / "16", suffix), split, ir_range=[3000, 4275]).fetch(
        [0, 1], 0
    )
    assert (plain["ir"].int() - thermal["ir"].int()).abs().max() <= 1
    assert torch.equal(plain["rgb"], thermal["rgb"])


@pytest.mark.parametrize("on_bad", ["stop", "skip"])
def test_thermal_counts_without_a_range_stop_the_run_with_what_to_set(
    tmp_path: Path, on_bad: str
) -> None:
    """Never as 8 shifted bits, and never as bad files that are left out."""
    data = opened(make_thermal(tmp_path), on_bad=on_bad)
    with pytest.raises(
        ConfigError, match=r"16-bit whole numbers from 3\d+ to 4250.*dataset\.ir_range"
    ):
        data.fetch([0], 0)


REFUSED = {
    "ir_range=[4275,3000]": "the lower first",
    "ir_range=[3000]": "the lower first",
    "ir_percentiles=[99,1]": "the lower first",
    "channels=3": "leave it out",
    "augment=[RandomHorizontalFlip]": "leave augment out",
    "height=640": "above image_size=96, which is the width",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_validation_refuses_what_training_would(
    setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = find_shipped("@yolofuse_mid")
    with pytest.raises(SystemExit) as ended:
        main(["validate", str(config), "dataset.image_size=96", f"dataset.{setting}"])
    assert ended.value.code == 2
    assert REFUSED[setting] in " ".join(capsys.readouterr().err.split())


def lists(root: Path, how: str) -> Path:
    """Write a data file of one split's pictures in two folders, and return it."""
    make_pairs(root, 2, ("a", "b"))
    (root / "images/a/0.png").rename(root / "images/a/x.png")
    (root / "imagesIR/a/0.png").rename(root / "imagesIR/a/x.png")
    (root / "labels/a/0.txt").rename(root / "labels/a/x.txt")
    places = [*sorted((root / "images").rglob("*.png"))]
    lines = {
        "beside the list": [f"./{path.relative_to(root)}" for path in places],
        "below path": [str(path.relative_to(root)) for path in places],
        "absolute": [str(path) for path in places],
    }
    if how in lines:
        (root / "all.txt").write_text("\n".join([*lines[how], "", ""]))
    entry = (
        "all.txt"
        if how in lines
        else {"folders": "[images/a, images/b]", "one in all": "images"}[how]
    )
    (root / "data.yaml").write_text(f"path: .\ntrain: {entry}\nval: {entry}\nnames: [cat]")
    return root / "data.yaml"


@pytest.mark.parametrize(
    "how", ["folders", "one in all", "beside the list", "below path", "absolute"]
)
@pytest.mark.parametrize("cameras", ["pair", "rgb", "ir"])
def test_a_data_file_lists_folders_or_pictures(tmp_path: Path, how: str, cameras: str) -> None:
    data = opened(lists(tmp_path, how), cameras=cameras, mosaic=0.0)
    found = [[str(path.relative_to(tmp_path)) for path in pair.paths] for pair in data.pairs]
    wanted = {"rgb": ["images"], "ir": ["imagesIR"], "pair": ["images", "imagesIR"]}[cameras]
    names = ("a/1.png", "a/x.png", "b/0.png", "b/1.png")
    assert found == [[f"{folder}/{name}" for folder in wanted] for name in names]
    assert data.fetch([0, 1, 2, 3], 0)["box_mask"].all()
    planned = assume(Settings(root=str(tmp_path / "data.yaml"), image_size=96))
    assert planned is not None
    assert planned.classes == ("cat",)


def test_a_path_is_looked_for_beside_the_data_file_and_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pairs(tmp_path / "work" / "set", 2)
    (tmp_path / "files").mkdir()
    (tmp_path / "files/data.yaml").write_text(
        "path: set\ntrain: images/train\nval: images/val\nnames: [cat]"
    )
    with pytest.raises(DataError, match="its path is set, and there is no such folder"):
        opened(tmp_path / "files/data.yaml")
    monkeypatch.chdir(tmp_path / "work")
    assert len(opened(tmp_path / "files/data.yaml")) == 2
    make_pairs(tmp_path / "files" / "set", 3)
    assert len(opened(tmp_path / "files/data.yaml")) == 3
    (tmp_path / "beside").mkdir()
    make_pairs(tmp_path / "beside", 4)
    (tmp_path / "beside/data.yaml").write_text(
        "path: gone\ntrain: images/train\nval: images/val\nnames: [cat]"
    )
    assert len(opened(tmp_path / "beside/data.yaml")) == 4


def test_a_list_that_names_what_is_not_there_says_which_line(tmp_path: Path) -> None:
    file = lists(tmp_path, "absolute")
    (tmp_path / "all.txt").write_text("./images/a/x.png\n./images/a/gone.png\n")
    with pytest.raises(
        DataError, match=r"all\.txt: line 2: there is no picture \./images/a/gone\.png"
    ):
        opened(file)


def coco(root: Path, names: list[str]) -> None:
    content = {
        "images": [
            {"id": n, "file_name": name, "width": 80, "height": 60} for n, name in enumerate(names)
        ],
        "categories": [{"id": 1, "name": "car"}],
        "annotations": [
            {"image_id": n, "category_id": 1, "bbox": [16, 12, 8 * (n + 1), 24]}
            for n in range(len(names))
        ],
    }
    (root / "train.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "name",
    [
        "{}",
        "train/{}",
        "images/train/{}",
        "./train/{}",
        "/home/other/set/{}",
        "C:\\set\\{}",
        "train\\{}",
    ],
)
def test_names_in_a_coco_file_may_have_any_folders(tmp_path: Path, name: str) -> None:
    make_pairs(tmp_path, 2)
    coco(tmp_path, [name.format(f"{n}.png") for n in (1, 0)])
    data = opened(tmp_path, cameras="rgb", labels="{split}.json")
    widths = {
        pair.paths[0].name: round((pair.rows[0, 3] - pair.rows[0, 1]) * 80) for pair in data.pairs
    }
    assert widths == {"0.png": 16, "1.png": 8}


def test_a_coco_picture_of_another_folder_is_not_taken(tmp_path: Path) -> None:
    make_pairs(tmp_path, 1)
    coco(tmp_path, ["val/0.png"])
    with pytest.raises(DataError, match="does not list it"):
        opened(tmp_path, cameras="rgb", labels="{split}.json")
    coco(tmp_path, ["/a/0.png", "/b/0.png"])
    with pytest.raises(DataError, match="their folders do not say which"):
        opened(tmp_path, cameras="rgb", labels="{split}.json")


def test_without_folders_the_pictures_are_those_of_the_coco_file(tmp_path: Path) -> None:
    make_pairs(tmp_path / "x", 2)
    (tmp_path / "x/images").rename(tmp_path / "photos")
    coco(tmp_path, ["photos/train/1.png", "photos/val/0.png"])
    data = opened(tmp_path, cameras="rgb", labels="{split}.json")
    assert [str(pair.paths[0].relative_to(tmp_path)) for pair in data.pairs] == [
        "photos/train/1.png",
        "photos/val/0.png",
    ]
    coco(tmp_path, ["photos/train/7.png"])
    with pytest.raises(
        DataError, match=r"photos/train/7\.png: the COCO file lists it, and it is not there"
    ):
        opened(tmp_path, cameras="rgb", labels="{split}.json")


def test_true_boxes_of_a_test_picture_count_however_small_they_become() -> None:
    sides = [0.002, 0.02, 0.2]
    rows = np.array([[0, 0.5, 0.5, 0.5 + side, 0.5 + side] for side in sides])
    scene = Scene([Image.new("RGB", (1000, 1000))], rows)
    boxes = letterbox(scene, 64, 64).boxes
    np.testing.assert_allclose(boxes[:, 3] - boxes[:, 1], [64 * side for side in sides])


def test_on_a_canvas_test_pictures_keep_their_own_size_and_training_is_as_before(
    tmp_path: Path,
) -> None:
    make_pairs(tmp_path)
    data = opened(tmp_path, "test", canvas=128)
    batch = data.fetch([0], 0)
    assert batch["rgb"].shape == (1, 3, 128, 128)
    corner = torch.tensor([(128 - SIZE[0]) / 2, (128 - SIZE[1]) / 2] * 2)
    torch.testing.assert_close(
        batch["boxes"][0, 0], torch.tensor([float(side) for side in MARK]) + corner
    )
    assert opened(tmp_path, canvas=128).fetch([0], 0)["rgb"].shape == (1, 3, 96, 96)
    with pytest.raises(ConfigError, match="canvas=96 is for pictures"):
        opened(tmp_path, "test", canvas=96)
