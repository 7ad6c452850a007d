"""What `mpt yolofuse evaluate` does: one pass over the test set, its figures by class, and a page with curves."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpt.systems.yolofuse.metrics.average_precision import (
    CONFIDENCES,
    RECALLS,
    Array,
    Pictures,
    Precision,
)

STYLE = (
    "<style>body{font-family:sans-serif;margin:2em}td{padding:.2em .8em;text-align:right}img{max-width:100%}</style>"
)
HEAD = "| Class | True boxes | Precision | Recall | AP50 | AP50-95 | AP50, article's way |"


def class_rows(pictures: Pictures, classes: Sequence[str], coco: Precision, article: Precision) -> list[str]:
    """Return the table's rows: all classes together, then each that has true boxes."""
    counts = [sum(int((truth[:, 4] == kind).sum()) for truth in pictures.truth) for kind in range(len(classes))]

    def line(name: str, count: int, *figures: float) -> str:
        return f"| {name} | {count} | {' | '.join(f'{figure:.4f}' for figure in figures)} |"

    if not len(coco.classes):
        return [line("all", 0, 0, 0, 0, 0, 0)]
    means = (float(coco.precision.mean()), float(coco.recall.mean()))
    rows = [line("all", sum(counts), *means, coco.map50, coco.map50_95, article.map50)]
    for place, kind in enumerate(coco.classes.tolist()):
        own = (coco.precision[place], coco.recall[place], coco.ap[kind, 0], coco.ap[kind].mean(), article.ap[kind, 0])
        rows.append(line(classes[kind], counts[kind], *(float(figure) for figure in own)))
    return rows


def as_json(classes: Sequence[str], coco: Precision, article: Precision, table: Array) -> dict[str, Any]:
    """Return the figures and curves as plain data."""
    names = [classes[kind] for kind in coco.classes.tolist()]
    return {
        "map50": coco.map50,
        "map50_95": coco.map50_95,
        "map50_article": article.map50,
        "map50_95_article": article.map50_95,
        "confidence": coco.confidence,
        "classes": names,
        "ap": coco.ap[coco.classes].tolist(),
        "precision": coco.precision.tolist(),
        "recall": coco.recall.tolist(),
        "f1": coco.f1.tolist(),
        "recalls": RECALLS.tolist(),
        **{name: curve.tolist() for name, curve in coco.curves.items()},
        "confusion": {"names": [*classes, "background"], "found_by_true": table.tolist()},
    }


def page(name: object, classes: Sequence[str], coco: Precision, table: Array, rows: Sequence[str]) -> str:
    """Return a page that needs no other file."""
    cells = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell.strip())}</td>' for cell in row.strip('|').split('|'))}</tr>"
        for row in (HEAD, *rows)
    )
    pictures = "".join(
        f'<img alt="{alt}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
        for alt, data in (
            ("precision over recall and F1 over score", draw_curves(classes, coco)),
            ("confusion matrix", draw_confusion([*classes, "background"], table)),
        )
    )
    title = html.escape(str(name))
    head = f"<!doctype html><meta charset=utf-8><title>Evaluation of {title}</title>{STYLE}<h1>{title}</h1>"
    return f"{head}<table>{cells}</table>{pictures}\n"


def draw_curves(classes: Sequence[str], coco: Precision) -> bytes:
    """Return a PNG of precision over recall at IoU .5 and of F1 over the score, per class and in the mean."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, x, name in ((left, RECALLS, "precision_at_recall"), (right, CONFIDENCES, "f1_at_confidence")):
        curves = coco.curves[name]
        for kind, curve in zip(coco.classes.tolist(), curves, strict=True):
            axes.plot(x, curve, linewidth=1, label=classes[kind] if len(curves) <= 10 else None)
        if len(curves) > 1:
            axes.plot(x, curves.mean(0), "k", linewidth=2, label="mean")
        axes.set(xlim=(0, 1), ylim=(0, 1.02))
    left.set(xlabel="recall", ylabel="precision", title=f"IoU .5: mAP {coco.map50:.3f}")
    right.set(xlabel="score", ylabel="F1", title=f"best at a score of {coco.confidence:.3f}")
    if len(coco.classes):
        right.legend(fontsize="small")
    return _png(figure)


def draw_confusion(names: Sequence[str], table: Array) -> bytes:
    """Return a PNG of the counts, shaded by their share of the true class."""
    from matplotlib.figure import Figure

    side = 3 + 0.5 * len(names)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    axes.imshow(table / np.maximum(table.sum(0, keepdims=True), 1), cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="true", ylabel="found as")
    if len(names) <= 21:
        for (row, column), count in np.ndenumerate(table):
            axes.text(column, row, str(count), ha="center", va="center")
    return _png(figure)


def _png(figure: Any) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=100)
    return stream.getvalue()
