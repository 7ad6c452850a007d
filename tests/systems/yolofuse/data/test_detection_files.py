"""Pairs of picture files: layouts, what is wrong with them, and the changes by chance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mpt.data.loader import Loader
from mpt.errors import ConfigError, DataError
from mpt.systems.yolofuse.data.detection_files import DetectionFiles, Settings, assume, build

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
    assert {name: (tuple(v.shape), v.dtype) for name, v in batch.items()} == {
        name: ((2, *spec.shape), spec.dtype) for name, spec in data.spec.fields.items()
    }
    # 80 x 60 in 96 x 96: 1.2 times as large, 12 pixels of grey above and below.
    torch.testing.assert_close(batch["boxes"][0, 0], torch.tensor([19.2, 26.4, 57.6, 55.2]))
    assert batch["box_mask"].tolist() == [[True], [True]]
    assert batch["rgb"][0, :, 5, 5].tolist() == [114] * 3
    assert batch["ir"][0, 0, 40, 40] == 250


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
    with pytest.raises(DataError, match=r"no train pictures; looked for images/train, .*dataset\.images"):
        opened(root)
    data = opened(root, images="day/{split}", infrared="night/{split}")
    assert len(data) == 4
    assert opened(root, cameras="ir", infrared="night/{split}").spec.fields["ir"].shape == (1, 96, 96)


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


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_pair_is_left_out_and_counted_where_that_is_asked(tmp_path: Path, fault: str) -> None:
    spoil(make_pairs(tmp_path), fault)
    data = opened(tmp_path, on_bad="skip", mosaic=0.0)
    batch = data.fetch(list(range(len(data))), 0)
    assert batch["box_mask"].all()
    assert [Path(path).name for path in data.bad_files] == ["2.png"]


def test_a_missing_label_can_mean_a_picture_without_objects(tmp_path: Path) -> None:
    spoil(make_pairs(tmp_path), "label")
    assert [len(pair.rows) for pair in opened(tmp_path, missing_label="empty").pairs] == [1, 1, 0, 1]


def test_a_set_of_nothing_but_bad_pairs_is_refused(tmp_path: Path) -> None:
    make_pairs(tmp_path, 1)
    (tmp_path / "labels/train/0.txt").write_text("9 .5 .5 .1 .1")
    with pytest.raises(DataError, match=r"none of its 1 pictures can be used; the first: .*class 9"):
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
def test_boxes_stay_on_their_objects_and_cameras_together(tmp_path: Path, mosaic: float, mixup: float) -> None:
    """Every object is a bright block in both cameras, so its box must hold bright pixels, and the rest none."""
    data = opened(make_pairs(tmp_path, 5), mosaic=mosaic, mixup=mixup, flip_down=0.5, hue=0, saturation=0, brightness=0)
    for epoch in range(6):
        batch = data.fetch([0, 1, 2], epoch)
        for rgb, ir, boxes, mask in zip(batch["rgb"], batch["ir"], batch["boxes"], batch["box_mask"], strict=True):
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
    data = opened(make_pairs(tmp_path), mosaic_epochs=2, translate=0, scale=0, flip_across=0, brightness=0)
    counts = [int(data.fetch([0], epoch)["box_mask"].sum()) for epoch in range(4)]
    assert counts[2:] == [1, 1]
    assert max(counts[:2]) > 1


def test_brightness_changes_both_cameras_alike(tmp_path: Path) -> None:
    data = opened(make_pairs(tmp_path), mosaic=0, translate=0, scale=0, flip_across=0, hue=0, saturation=0)
    for epoch in range(4):
        batch = data.fetch([0], epoch)
        visible, infrared = batch["rgb"][0, :, 40, 40].float().mean(), batch["ir"][0, 0, 40, 40].float()
        assert abs(visible - infrared) <= 2


def test_most_boxes_keeps_the_largest(tmp_path: Path) -> None:
    make_pairs(tmp_path, 1)
    (tmp_path / "labels/train/0.txt").write_text("0 .2 .2 .1 .1\n0 .5 .5 .4 .4\n0 .8 .8 .2 .2")
    data = opened(tmp_path, mosaic=0, translate=0, scale=0, most_boxes=2, flip_across=0)
    sides = data.fetch([0], 0)["boxes"][0]
    torch.testing.assert_close(sides[:, 2] - sides[:, 0], torch.tensor([38.4, 19.2]))


def test_pictures_need_not_be_square(tmp_path: Path) -> None:
    data = opened(make_pairs(tmp_path), "test", height=64)
    batch = data.fetch([0], 0)
    assert batch["rgb"].shape == (1, 3, 64, 96)
    # 80 x 60 in 96 x 64: limited by the height.
    torch.testing.assert_close(batch["boxes"][0, 0, 3] - batch["boxes"][0, 0, 1], torch.tensor(24 * 64 / 60))


def test_cached_pictures_are_the_same(tmp_path: Path) -> None:
    root = make_pairs(tmp_path)
    plain, cached = opened(root), opened(root, cache=True)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(plain.fetch([0, 1], 1).values(), cached.fetch([0, 1], 1).values()))
    assert cached.cached


def test_settings_that_would_part_boxes_from_pictures_are_refused(tmp_path: Path) -> None:
    make_pairs(tmp_path)
    with pytest.raises(ConfigError, match="changed together with their boxes"):
        opened(tmp_path, augment=["RandomHorizontalFlip"])
    with pytest.raises(ConfigError, match="leave it out"):
        opened(tmp_path, channels=1)


def test_a_plan_needs_no_files() -> None:
    spec = assume(Settings(root="/nowhere", image_size=640))
    assert spec is not None
    assert spec.fields["ir"].shape == (1, 640, 640)
    assert spec.classes == ("person",)


DATA_FILES = {
    "beside the folders": ("path: .\ntrain: images/train\nval: images/val\nnames: {0: cat, 1: dog}", "sub"),
    "in a folder of its own": ("path: ../set\ntrain: images/train\nval: images/val\nnc: 2\nnames: [cat, dog]", "set"),
}


@pytest.mark.parametrize(("text", "where"), DATA_FILES.values(), ids=DATA_FILES)
def test_a_data_file_of_yolo_names_folders_and_classes(tmp_path: Path, text: str, where: str) -> None:
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
    (tmp_path / "data.yaml").write_text("train: ../train/images\nval: ../valid/images\nnames: [cat]")
    data = opened(tmp_path / "data.yaml", "test", cameras="rgb")
    assert data.pairs[0].paths == (tmp_path / "valid/images/0.png",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train: images/train\nnames: [cat]", "it has no val"),
        ("train: images/train\nval: images/val\nnc: 3\nnames: [cat]", "nc is 3, and there are 1 names"),
        ("train: images/train\nval: images/val\nnames: {0: cat, 2: dog}", "0 to 1 are needed"),
        ("train: [images/train]\nval: images/val\nnames: [cat]", "one folder is understood"),
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
