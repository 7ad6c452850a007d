"""Average precision of detections, COCO's way and the way of the article's software.

COCO (Lin et al., 2014; pycocotools): detections of a picture and class take the true boxes best score first, each the
free one it overlaps most, and count as right from an IoU of the threshold on; of the rest those that lie in a crowd's
region, by that share of their area, are left out. Precision is made to fall with recall and
sampled at 101 recalls, as a staircase; beyond the last recall reached it is 0. Equal to pycocotools.

`ultralytics-8.3`, with which the article's table was made, reads higher: it joins the curve's points by straight
lines, the last of them down to recall 1, and it ties each detection to the box that it overlaps most before it looks
at scores (which reads lower in crowds). `ultralytics-8.4` matches as COCO does and cuts the curve at the last recall.

Numpy on the CPU, float64: the curves are short, and this is no hot path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mpt.seams import Evidence

Array = np.ndarray[Any, Any]
Way = Literal["coco", "ultralytics-8.3", "ultralytics-8.4"]

THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
CONFIDENCES = np.linspace(0, 1, 1000)
TINY = float(np.spacing(1))


@dataclass(frozen=True)
class Pictures:
    """Detections and truth of a test set, picture by picture.

    `detections`: (n, 6) corners, score, class. `truth` and `crowds`: (m, 5) corners and class. Any unit, the same in
    all.
    """

    detections: Sequence[Array]
    truth: Sequence[Array]
    crowds: Sequence[Array] = ()
    """Regions of many objects, which COCO's way leaves out with the detections in them; none without."""


@dataclass
class Precision:
    """The figures. `ap` is (class, threshold), NaN for a class without truth; the rest is at IoU 0.5, per class."""

    ap: Array
    precision: Array
    recall: Array
    f1: Array
    classes: Array
    """Numbers of the classes with truth: the rows of `precision`, `recall` and `f1`."""
    confidence: float
    """The score at which the mean F1 over classes, smoothed, is highest; precision, recall and F1 are read there."""
    curves: dict[str, Array] = field(default_factory=dict)
    """`precision_at_recall` (class, 101) and `f1_at_confidence` (class, 1000)."""

    @property
    def map50(self) -> float:
        """Mean over classes at IoU 0.5; 0 without any truth."""
        return float(np.nanmean(self.ap[:, 0])) if len(self.classes) else 0.0

    @property
    def map50_95(self) -> float:
        """Mean over classes and thresholds; 0 without any truth."""
        return float(np.nanmean(self.ap)) if len(self.classes) else 0.0


def gather_pictures(evidence: Sequence[Evidence]) -> Pictures:
    """Return detections and truth picture by picture."""
    found, truth, crowds = [], [], []
    for one in evidence:
        arrays = {name: value.cpu().numpy() for name, value in one.items()}
        for rows, boxes, kinds, mask in zip(
            *(arrays[name] for name in ("found", "boxes", "classes", "box_mask")), strict=True
        ):
            found.append(rows[rows[:, 4] > 0].astype(np.float64))
            marked = np.concatenate((boxes, kinds[:, None]), 1).astype(np.float64)
            truth.append(marked[mask])
            crowds.append(marked[~mask & (boxes[:, 2] > boxes[:, 0])])
    return Pictures(found, truth, crowds)


def overlaps(first: Array, second: Array) -> Array:
    """Return the IoU (n, m) of corner boxes (n, 4) and (m, 4)."""
    shared = shared_areas(first, second)
    united = areas(first)[:, None] + areas(second)[None] - shared
    return np.asarray(shared / np.maximum(united, 1e-300))


def shares_within(first: Array, second: Array) -> Array:
    """Return the share (n, m) of each of the corner boxes (n, 4) that lies in each of (m, 4)."""
    return np.asarray(shared_areas(first, second) / np.maximum(areas(first), 1e-300)[:, None])


def shared_areas(first: Array, second: Array) -> Array:
    """Return the areas (n, m) that corner boxes (n, 4) and (m, 4) share."""
    low = np.maximum(first[:, None, :2], second[None, :, :2])
    high = np.minimum(first[:, None, 2:4], second[None, :, 2:4])
    return np.asarray(np.clip(high - low, 0, None).prod(2))


def areas(boxes: Array) -> Array:
    """Return the areas (n,) of corner boxes (n, 4)."""
    return np.asarray((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]))


def match_greedily(iou: Array, thresholds: Array = THRESHOLDS) -> Array:
    """Return (n, thresholds): does detection n, in order of score, find a free box? The best free one is taken."""
    right = np.zeros((len(iou), len(thresholds)), bool)
    for t, threshold in enumerate(np.minimum(thresholds, 1 - 1e-10)):
        free = np.ones(iou.shape[1], bool)
        for n in range(len(iou)):
            # Of equally good boxes the last, as pycocotools does.
            candidates = np.where(free, iou[n], -1.0)[::-1]
            if not len(candidates):
                break
            best = len(candidates) - 1 - int(candidates.argmax())
            if free[best] and iou[n, best] >= threshold:
                right[n, t], free[best] = True, False
    return right


def match_by_overlap(iou: Array, thresholds: Array = THRESHOLDS) -> Array:
    """Return (n, thresholds): each detection belongs to the box it overlaps most; the best scored of a box is right."""
    right = np.zeros((len(iou), len(thresholds)), bool)
    if not iou.size:
        return right
    favourite, best = iou.argmax(1), iou.max(1)
    for t, threshold in enumerate(thresholds):
        enough = np.flatnonzero(best >= threshold)
        right[enough[np.unique(favourite[enough], return_index=True)[1]], t] = True
    return right


def measure(pictures: Pictures, classes: int, way: Way = "coco", limit: int = 300) -> Precision:
    """Return the figures of a test set; of each picture and class the `limit` best detections count."""
    match = match_by_overlap if way == "ultralytics-8.3" else match_greedily
    ap = np.full((classes, len(THRESHOLDS)), np.nan)
    known: list[int] = []
    rows: list[tuple[Array, Array, Array]] = []
    staircases = np.zeros((classes, len(RECALLS)))
    for kind in range(classes):
        scores, right, wrong, count = _matches(pictures, kind, match, limit, way)
        if count == 0:
            continue
        known.append(kind)
        hits, misses = right.cumsum(0), wrong.cumsum(0)
        recall, precision = hits / count, hits / np.maximum(hits + misses, TINY)
        for t in range(len(THRESHOLDS)):
            ap[kind, t], sampled = _area(recall[:, t], precision[:, t], way)
            if t == 0:
                staircases[kind] = sampled
        rows.append(
            (
                scores,
                recall[:, 0] if len(right) else np.zeros(0),
                precision[:, 0] if len(right) else np.zeros(0),
            )
        )
    return _at_best_confidence(ap, np.array(known, int), rows, staircases)


def _matches(
    pictures: Pictures, kind: int, match: Any, limit: int, way: Way
) -> tuple[Array, Array, Array, int]:
    """Return scores, rights and wrongs (n, thresholds), best first over all pictures, and the number of true boxes.

    Neither right nor wrong is what lies in a crowd by COCO's way.
    """
    scores: list[Array] = [np.zeros(0)]
    right: list[Array] = [np.zeros((0, len(THRESHOLDS)), bool)]
    wrong: list[Array] = [np.zeros((0, len(THRESHOLDS)), bool)]
    count = 0
    regions = pictures.crowds if way == "coco" else ()
    for number, (found, truth) in enumerate(zip(pictures.detections, pictures.truth, strict=True)):
        found = found[found[:, 5] == kind]
        found = found[np.argsort(-found[:, 4], kind="mergesort")[:limit]]
        truth = truth[truth[:, 4] == kind]
        count += len(truth)
        if len(found):
            scores.append(found[:, 4])
            right.append(match(overlaps(found[:, :4], truth[:, :4])))
            wrong.append(~right[-1])
            if regions:
                crowds = regions[number][regions[number][:, 4] == kind]
                within = shares_within(found, crowds).max(1, initial=0)
                wrong[-1] &= within[:, None] < np.minimum(THRESHOLDS, 1 - 1e-10)
    joined = np.concatenate(scores)
    order = np.argsort(-joined, kind="mergesort")
    return joined[order], np.concatenate(right)[order], np.concatenate(wrong)[order], count


def _area(recall: Array, precision: Array, way: Way) -> tuple[float, Array]:
    """Return the area under the curve and the curve at 101 recalls."""
    if way == "coco":
        falling = np.maximum.accumulate(precision[::-1])[::-1]
        places = np.searchsorted(recall, RECALLS, side="left")
        sampled = np.concatenate((falling, np.zeros(len(RECALLS) + 1)))[
            np.minimum(places, len(falling))
        ]
        return float(sampled.mean()), sampled
    end = recall[-1] if len(recall) else 1.0
    cut = ([end], [0.0]) if way == "ultralytics-8.4" else ([], [])
    x = np.concatenate(([0.0], recall, cut[0], [1.0]))
    y = np.concatenate(([1.0], precision, cut[1], [0.0]))
    falling = np.maximum.accumulate(y[::-1])[::-1]
    sampled = np.interp(RECALLS, x, falling)
    return float(np.sum((sampled[1:] + sampled[:-1]) / 2 * np.diff(RECALLS))), sampled


def _at_best_confidence(
    ap: Array, known: Array, rows: list[tuple[Array, Array, Array]], staircases: Array
) -> Precision:
    """Read precision and recall at the best mean F1 over classes, smoothed over a tenth of the range."""
    recalls, precisions = (
        np.zeros((len(rows), len(CONFIDENCES))),
        np.zeros((len(rows), len(CONFIDENCES))),
    )
    for n, (scores, recall, precision) in enumerate(rows):
        if len(scores):
            recalls[n] = np.interp(-CONFIDENCES, -scores, recall, left=0)
            precisions[n] = np.interp(-CONFIDENCES, -scores, precision, left=1)
    f1 = 2 * precisions * recalls / (precisions + recalls + 1e-16)
    best = int(_smooth(f1.mean(0)).argmax()) if len(rows) else 0
    return Precision(
        ap,
        precisions[:, best],
        recalls[:, best],
        f1[:, best],
        known,
        float(CONFIDENCES[best]),
        {"precision_at_recall": staircases[known], "f1_at_confidence": f1},
    )


def _smooth(values: Array, share: float = 0.1) -> Array:
    """Return the moving average over a share of the values, the ends repeated."""
    window = round(len(values) * share * 2) // 2 + 1
    ends = np.ones(window // 2)
    return np.convolve(
        np.concatenate((ends * values[0], values, ends * values[-1])),
        np.ones(window) / window,
        "valid",
    )


def confusion(
    pictures: Pictures, classes: int, confidence: float = 0.25, iou: float = 0.45
) -> Array:
    """Return counts (found as, truly): (classes + 1, classes + 1), the last row and column being the background.

    Detections above `confidence` take the true boxes that they overlap by more than `iou`, largest overlap first,
    whatever the class. Both limits are strict, as in Ultralytics' programs.
    """
    table = np.zeros((classes + 1, classes + 1), int)
    for found, truth in zip(pictures.detections, pictures.truth, strict=True):
        found = found[found[:, 4] > confidence]
        shared = (
            overlaps(found[:, :4], truth[:, :4])
            if len(found) and len(truth)
            else np.zeros((len(found), len(truth)))
        )
        free_found, free_true = np.ones(len(found), bool), np.ones(len(truth), bool)
        for place in np.argsort(-shared, axis=None, kind="stable"):
            n, m = divmod(int(place), max(1, len(truth)))
            if shared[n, m] <= iou:
                break
            if free_found[n] and free_true[m]:
                table[int(found[n, 5]), int(truth[m, 4])] += 1
                free_found[n] = free_true[m] = False
        for missed in np.flatnonzero(free_found):
            table[int(found[missed, 5]), classes] += 1
        for missed in np.flatnonzero(free_true):
            table[classes, int(truth[missed, 4])] += 1
    return table
