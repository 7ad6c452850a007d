"""Label files, good and bad."""

import json
from pathlib import Path

import numpy as np
import pytest

from mpt.errors import DataError
from mpt.systems.yolofuse.data.shared.detection_labels import (
    BadLabel,
    read_coco,
    read_voc,
    read_yolo,
)


def written(folder: Path, text: str, name: str = "a.txt") -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def test_yolo_lines_are_boxes_about_their_centres_and_polygons_become_boxes(tmp_path: Path) -> None:
    rows = read_yolo(written(tmp_path, "0 0.5 0.5 0.2 0.4\n\n1 0.1 0.2 0.3 0.2 0.3 0.6\n"), 2)
    np.testing.assert_allclose(rows, [[0, 0.4, 0.3, 0.6, 0.7], [1, 0.1, 0.2, 0.3, 0.6]])


def test_a_box_over_the_edge_is_cut(tmp_path: Path) -> None:
    np.testing.assert_allclose(
        read_yolo(written(tmp_path, "0 0.05 0.5 0.2 0.4"), 1), [[0, 0, 0.3, 0.15, 0.7]]
    )


def test_a_line_that_stands_twice_is_one_box(tmp_path: Path) -> None:
    rows = read_yolo(
        written(tmp_path, "1 0.5 0.5 0.2 0.4\n0 0.5 0.5 0.2 0.4\n1 0.50 0.5 0.2 0.4\n"), 2
    )
    assert rows[:, 0].tolist() == [1, 0]


def test_an_empty_file_has_no_boxes(tmp_path: Path) -> None:
    assert read_yolo(written(tmp_path, "\n"), 1).shape == (0, 5)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0 0.5 0.5 1.2 0.4", r"line 1 has values outside of \[0, 1\]"),
        ("0 320 240 60 80", r"outside of \[0, 1\]"),
        ("3 0.5 0.5 0.2 0.4", "box 1 is of class 3, and there are classes 0 to 1"),
        ("-1 0.5 0.5 0.2 0.4", "box 1 is of class -1"),
        ("0.5 0.5 0.5 0.2 0.4", "of class 0.5"),
        ("0 0.5 0.5 0 0.4", "box 1 has no area"),
        ("0 nan 0.5 0.1 0.4", r"outside of \[0, 1\]"),
        ("0 0.5 0.5 0.1", "line 1 has 4 values; 5 make a box"),
        ("0 0.5 0.5 0.2 0.4\nperson 1", "line 2 holds something that is no number: 'person 1'"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(BadLabel, match=reason):
        read_yolo(written(tmp_path, text), 2)


VOC = """<annotation><size><width>200</width><height>100</height><depth>3</depth></size>
<object><name>{name}</name><bndbox><xmin>20</xmin><ymin>10</ymin><xmax>{right}</xmax><ymax>90</ymax></bndbox></object>
</annotation>"""


def test_voc_boxes_are_relative_to_the_stated_size(tmp_path: Path) -> None:
    rows, size = read_voc(
        written(tmp_path, VOC.format(name="person", right=60), "a.xml"), ("car", "person")
    )
    np.testing.assert_allclose(rows, [[1, 0.1, 0.1, 0.3, 0.9]])
    assert size == (200, 100)


@pytest.mark.parametrize(
    ("name", "right", "reason"),
    [
        ("tree", 60, "names the class 'tree'"),
        ("car", 260, "lies outside of the picture"),
        ("car", "x", "no VOC"),
    ],
)
def test_what_is_wrong_with_a_voc_file_is_said(
    tmp_path: Path, name: str, right: object, reason: str
) -> None:
    with pytest.raises(BadLabel, match=reason):
        read_voc(written(tmp_path, VOC.format(name=name, right=right), "a.xml"), ("car", "person"))


def test_text_that_is_no_xml_is_no_annotation(tmp_path: Path) -> None:
    with pytest.raises(BadLabel, match="no VOC annotation"):
        read_voc(written(tmp_path, "0 1 2", "a.xml"), ("car",))


def coco(**changes: object) -> dict:
    content = {
        "images": [{"id": 7, "file_name": "a.jpg", "width": 200, "height": 100}],
        "categories": [{"id": 18, "name": "dog"}, {"id": 3, "name": "car"}],
        "annotations": [
            {"image_id": 7, "category_id": 18, "bbox": [20, 10, 40, 50], "iscrowd": 0},
            {"image_id": 7, "category_id": 3, "bbox": [0, 0, 200, 100], "iscrowd": 1},
        ],
    }
    return {**content, **changes}


def test_coco_categories_are_numbered_in_the_order_of_their_ids_and_crowds_are_apart(
    tmp_path: Path,
) -> None:
    labels = read_coco(written(tmp_path, json.dumps(coco()), "a.json"))
    assert labels.classes == ("car", "dog")
    np.testing.assert_allclose(labels.rows["a.jpg"], [[1, 0.1, 0.1, 0.3, 0.6], [-1, 0, 0, 1, 1]])
    beyond = coco()
    beyond["annotations"] = [
        {"image_id": 7, "category_id": 3, "bbox": [180, 10, 60, 50], "iscrowd": 1},
        {"image_id": 7, "category_id": 3, "bbox": [20, 10, 0, 50], "iscrowd": 1},
    ]
    labels = read_coco(written(tmp_path, json.dumps(beyond), "b.json"))
    np.testing.assert_allclose(labels.rows["a.jpg"], [[-1, 0.9, 0.1, 1, 0.6]])
    assert not labels.bad


@pytest.mark.parametrize(
    "text", ["[]", "{", json.dumps(coco(categories=None)), json.dumps(coco(categories=[]))]
)
def test_what_is_no_coco_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match="no COCO instances file"):
        read_coco(written(tmp_path, text, "a.json"))
