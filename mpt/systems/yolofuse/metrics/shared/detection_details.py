"""Details of an evaluation in addition to its figures, as plain data: for `evaluation.json` and the section of a run's
page.

Numbers and curves are under their names, of every class with true boxes; `section` is the part that a page shows (see
`mpt.report.run_page.evaluation_section`): a table by class, precision over recall, F1 over the score, and the confusion
matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpt.systems.yolofuse.metrics.shared.average_precision import (
    CONFIDENCES,
    RECALLS,
    Array,
    Pictures,
    Precision,
    confusion,
)

HEAD = ("Class", "True boxes", "Precision", "Recall", "AP50", "AP50-95", "AP50, article's way")
MOST_LINES = 8
"""Classes whose curves are drawn; of more, the mean alone."""
MOST_MATRIX = 40
"""Classes of which the page shows a confusion matrix; the file has it of any number."""
EVERY_CONFIDENCE = 10


def describe(
    pictures: Pictures,
    classes: Sequence[str],
    coco: Precision,
    article: Precision,
    confidence: float,
    iou: float,
) -> dict[str, Any]:
    """Return the details of an evaluation; confusions are of detections from `confidence` on, matched from `iou` on."""
    table = confusion(pictures, len(classes), confidence, iou)
    names = [*classes, "background"]
    counts = [
        sum(int((truth[:, 4] == kind).sum()) for truth in pictures.truth)
        for kind in range(len(classes))
    ]
    section = {
        "title": "Detections",
        "note": f"{len(pictures.truth)} test pictures. Precision and recall at a score of {coco.confidence:.3f}, where "
        f"F1 is best. Confusions from a score of {confidence:g} and an IoU of {iou:g} on.",
        "table": {"head": HEAD, "rows": class_rows(counts, classes, coco, article)},
        "charts": charts(classes, coco),
        "matrix": {
            "title": "Confusion: rows are the truth, columns what was found there; background is nothing",
            "names": names if len(names) <= MOST_MATRIX else [],
            "counts": table.T.tolist() if len(names) <= MOST_MATRIX else [],
            # A detection of background has no total of its own: it is shown as a share of all true boxes.
            "totals": [*table.sum(0)[:-1].tolist(), int(table[:, :-1].sum())],
        },
    }
    return {
        "map50": coco.map50,
        "map50_95": coco.map50_95,
        "map50_article": article.map50,
        "map50_95_article": article.map50_95,
        "confidence": coco.confidence,
        "classes": [classes[kind] for kind in coco.classes.tolist()],
        "ap": coco.ap[coco.classes].tolist(),
        "precision": coco.precision.tolist(),
        "recall": coco.recall.tolist(),
        "f1": coco.f1.tolist(),
        "recalls": RECALLS.tolist(),
        "precision_at_recall": rounded(coco.curves["precision_at_recall"]),
        "confidences": rounded(CONFIDENCES[::EVERY_CONFIDENCE]),
        "f1_at_confidence": rounded(coco.curves["f1_at_confidence"][:, ::EVERY_CONFIDENCE]),
        "objects": dict(zip(classes, counts, strict=True)),
        "confusion": {"names": names, "found_by_true": table.tolist()},
        "section": section,
    }


def class_rows(
    counts: Sequence[int], classes: Sequence[str], coco: Precision, article: Precision
) -> list[tuple[str, ...]]:
    """Return the table's rows under `HEAD`: all classes together, then each that has true boxes."""

    def line(name: str, count: int, *figures: float) -> tuple[str, ...]:
        return (name, str(count), *(f"{figure:.4f}" for figure in figures))

    if not len(coco.classes):
        return [line("all", 0, 0, 0, 0, 0, 0)]
    means = (float(coco.precision.mean()), float(coco.recall.mean()))
    rows = [line("all", sum(counts), *means, coco.map50, coco.map50_95, article.map50)]
    for place, kind in enumerate(coco.classes.tolist()):
        own = (
            coco.precision[place],
            coco.recall[place],
            coco.ap[kind, 0],
            coco.ap[kind].mean(),
            article.ap[kind, 0],
        )
        rows.append(line(classes[kind], counts[kind], *(float(figure) for figure in own)))
    return rows


def charts(classes: Sequence[str], coco: Precision) -> list[dict[str, Any]]:
    """Return precision over recall at IoU 0.5 and F1 over the score, per class if they are few, and in the mean."""
    return [
        {
            "title": f"Precision over recall at IoU 0.5: mAP {coco.map50:.3f}",
            "x": "recall",
            "y": "precision",
            "lines": lines(classes, coco, RECALLS, coco.curves["precision_at_recall"]),
        },
        {
            "title": f"F1 over the score, best at {coco.confidence:.3f}",
            "x": "score",
            "y": "F1",
            "lines": lines(
                classes,
                coco,
                CONFIDENCES[::EVERY_CONFIDENCE],
                coco.curves["f1_at_confidence"][:, ::EVERY_CONFIDENCE],
            ),
        },
    ]


def lines(classes: Sequence[str], coco: Precision, x: Array, curves: Array) -> list[dict[str, Any]]:
    """Return the lines of a chart; `curves` is (classes with truth, points)."""
    shown = []
    if len(curves) <= MOST_LINES:
        shown = [
            (classes[kind], curve)
            for kind, curve in zip(coco.classes.tolist(), curves, strict=True)
        ]
    if len(curves) > 1:
        shown.append(("mean", curves.mean(0)))
    return [{"name": name, "x": rounded(x), "y": rounded(curve)} for name, curve in shown]


def rounded(values: Array) -> Any:
    """Return numbers with five decimals, which is more than a page shows and a third of the file's size."""
    return values.round(5).tolist()
