"""Average precision against pycocotools and the published programs."""

import contextlib
import io

import numpy as np
import pytest

from mpt.systems.yolofuse.metrics.shared.average_precision import Pictures, confusion, measure
from tests.systems.yolofuse.published import read_arrays

WAYS = {"v83": "ultralytics-8.3", "v84": "ultralytics-8.4"}


def corners(rows: np.ndarray) -> np.ndarray:
    return np.concatenate((rows[:, 2:4], rows[:, 2:4] + rows[:, 4:6]), 1)


def pictures_of(truth: np.ndarray, found: np.ndarray, count: int) -> Pictures:
    return Pictures(
        [
            np.column_stack((corners(own), own[:, 6], own[:, 1]))
            for n in range(count)
            for own in [found[found[:, 0] == n]]
        ],
        [
            np.column_stack((corners(own), own[:, 1]))
            for n in range(count)
            for own in [truth[truth[:, 0] == n]]
        ],
    )


@pytest.mark.parametrize("number", range(6))
def test_figures_equal_those_of_pycocotools_and_of_the_published_programs(number: int) -> None:
    arrays, case = read_arrays("map.npz"), f"case{number}_"
    count, classes = int(arrays[f"{case}images"]), int(arrays[f"{case}classes"])
    pictures = pictures_of(arrays[f"{case}truth"], arrays[f"{case}detections"], count)
    coco = measure(pictures, classes)
    np.testing.assert_allclose(coco.ap, arrays[f"{case}coco_ap"], atol=1e-12)
    np.testing.assert_allclose(
        [coco.map50, coco.map50_95], arrays[f"{case}coco_summary"], atol=1e-12
    )
    for version, way in WAYS.items():
        figures, prefix = measure(pictures, classes, way), f"{version}_{case}"
        np.testing.assert_allclose(figures.ap[figures.classes], arrays[f"{prefix}ap"], atol=1e-12)
        for name in ("precision", "recall", "f1"):
            np.testing.assert_allclose(getattr(figures, name), arrays[prefix + name], atol=1e-12)
        summary = [figures.precision.mean(), figures.recall.mean(), figures.map50, figures.map50_95]
        np.testing.assert_allclose(summary, arrays[f"{prefix}summary"], atol=1e-12)


def random_case(seed: int) -> tuple[np.ndarray, np.ndarray, int, int]:
    numbers = np.random.default_rng(seed)
    images, classes = int(numbers.integers(1, 12)), int(numbers.integers(1, 5))
    truth, found = [], []
    for image in range(images):
        for _ in range(numbers.integers(0, 9)):
            box = [*numbers.uniform(0, 80, 2), *numbers.uniform(4, 40, 2)]
            kind = int(numbers.integers(classes))
            truth.append([image, kind, *box])
            for _ in range(numbers.integers(0, 3)):
                moved = np.array(box) + numbers.normal(0, 3, 4)
                moved[2:] = np.maximum(moved[2:], 1)
                # Scores in few steps, so that there are ties.
                found.append([image, kind, *moved, round(float(numbers.uniform(0, 1)), 1)])
        for _ in range(numbers.integers(0, 6)):
            box = [*numbers.uniform(0, 80, 2), *numbers.uniform(4, 40, 2)]
            found.append(
                [
                    image,
                    int(numbers.integers(classes)),
                    *box,
                    round(float(numbers.uniform(0, 1)), 1),
                ]
            )
    return np.array(truth).reshape(-1, 6), np.array(found).reshape(-1, 7), images, classes


def coco_precisions(
    truth: np.ndarray,
    found: np.ndarray,
    images: int,
    classes: int,
    is_crowd: np.ndarray | None = None,
) -> np.ndarray:
    """AP (class, threshold) by pycocotools."""
    is_crowd = np.zeros(len(truth), int) if is_crowd is None else is_crowd
    pytest.importorskip("pycocotools")
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "images": [{"id": n + 1} for n in range(images)],
            "categories": [{"id": n + 1, "name": str(n)} for n in range(classes)],
            "annotations": [
                {"id": n + 1, "image_id": int(row[0]) + 1, "category_id": int(row[1]) + 1, "bbox": row[2:].tolist(),
                 "area": float(row[4] * row[5]), "iscrowd": int(is_crowd[n])}
                for n, row in enumerate(truth)
            ],
        }  # fmt: skip
        coco.createIndex()
        results = coco.loadRes(
            [
                {
                    "image_id": int(r[0]) + 1,
                    "category_id": int(r[1]) + 1,
                    "bbox": r[2:6].tolist(),
                    "score": float(r[6]),
                }
                for r in found
            ]
        )
        judge = COCOeval(coco, results, "bbox")
        judge.params.maxDets, judge.params.areaRng = [300], [[0, 1e10]]
        judge.params.areaRngLbl = ["all"]
        judge.evaluate()
        judge.accumulate()
    ap = judge.eval["precision"][:, :, :, 0, 0].mean(1).T
    return np.where(ap < 0, np.nan, ap)


@pytest.mark.parametrize("seed", range(25))
def test_average_precision_equals_that_of_pycocotools_on_random_detections(seed: int) -> None:
    truth, found, images, classes = random_case(seed)
    if not len(found) or not len(truth):
        pytest.skip("pycocotools takes no empty list")
    # pycocotools sorts a class's detections image by image: keep that order, as ties stay in it.
    ours = measure(pictures_of(truth, found, images), classes)
    np.testing.assert_allclose(ours.ap, coco_precisions(truth, found, images, classes), atol=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_detections_in_a_crowd_are_left_out_as_by_pycocotools(seed: int) -> None:
    truth, found, images, classes = random_case(seed)
    if not len(found) or not len(truth):
        pytest.skip("pycocotools takes no empty list")
    is_crowd = np.random.default_rng(seed).random(len(truth)) < 0.4
    pictures = pictures_of(truth[~is_crowd], found, images)
    regions = pictures_of(truth[is_crowd], found, images).truth
    ours = measure(Pictures(pictures.detections, pictures.truth, regions), classes)
    theirs = coco_precisions(truth, found, images, classes, is_crowd)
    np.testing.assert_allclose(ours.ap, theirs, atol=1e-12)
    # the published programs know no crowds
    article = measure(
        Pictures(pictures.detections, pictures.truth, regions), classes, "ultralytics-8.3"
    )
    np.testing.assert_array_equal(article.ap, measure(pictures, classes, "ultralytics-8.3").ap)


def test_nothing_found_and_nothing_there_are_figures_too() -> None:
    nothing = Pictures([np.zeros((0, 6))], [np.array([[0.0, 0, 4, 4, 0]])])
    assert measure(nothing, 2).map50 == 0
    empty = Pictures([np.array([[0.0, 0, 4, 4, 0.9, 1]])], [np.zeros((0, 5))])
    assert measure(empty, 2).map50 == 0
    assert len(measure(empty, 2).classes) == 0


def test_confusions_are_counted_with_the_background() -> None:
    found = np.array(
        [
            [0.0, 0, 10, 10, 0.9, 1],
            [0, 0, 10, 9, 0.8, 0],
            [50, 50, 60, 60, 0.7, 0],
            [0, 0, 9, 9, 0.1, 0],
        ]
    )
    truth = np.array([[0.0, 0, 10, 10, 0], [80, 80, 90, 90, 1]])
    table = confusion(Pictures([found], [truth]), 2)
    assert table.tolist() == [[0, 0, 2], [1, 0, 0], [0, 1, 0]]


HALF = np.array([[0.0, 0, 2, 1, 0.9, 0]]), np.array([[0.0, 0, 1, 1, 0]])
"""A detection and a true box with an IoU of exactly one half."""


def test_a_detection_is_right_from_an_overlap_of_just_the_threshold_on() -> None:
    found, truth = HALF
    right = [1.0] + [0.0] * 9  # at 0.5, and not at 0.55
    assert measure(Pictures([found], [truth]), 1).ap.tolist() == [right]
    rows = np.array([[0.0, 0, 0, 0, 2, 1, 0.9]]), np.array([[0.0, 0, 0, 0, 1, 1]])
    np.testing.assert_allclose(coco_precisions(rows[1], rows[0], 1, 1), [right], atol=1e-12)


def test_confusions_take_what_is_above_both_limits_as_the_published_programs_do() -> None:
    found, truth = HALF
    right, apart = [[1, 0], [0, 0]], [[0, 1], [1, 0]]
    assert confusion(Pictures([found], [truth]), 1, iou=0.49).tolist() == right
    assert confusion(Pictures([found], [truth]), 1, iou=0.5).tolist() == apart
    assert confusion(Pictures([found], [truth]), 1, confidence=0.89).tolist() == right
    assert confusion(Pictures([found], [truth]), 1, confidence=0.9).tolist() == [[0, 0], [1, 0]]
