"""Measure a detector on its test set: mAP by class, confusions, curves of precision, recall and F1."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mpt.engine.evaluation import apart_from_training, gather_evidence, test_batches
from mpt.inference.trained import open_trained
from mpt.run.files import failures_explained, write_atomically
from mpt.systems.yolofuse.commands.detection import detector
from mpt.systems.yolofuse.commands.evaluation import HEAD, as_json, class_rows, page
from mpt.systems.yolofuse.metrics.average_precision import confusion, measure
from mpt.systems.yolofuse.tasks.detect import gather_pictures


@dataclass(frozen=True)
class Command:
    """Measure a detector on its test set.

    Prints mAP by class and writes evaluation.json and evaluation.html, with the confusion matrix and the curves.
    """

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)]
    """A run or a checkpoint."""
    overrides: Annotated[tuple[str, ...], typer.Argument(metavar="KEY=VALUE", show_default=False)] = ()
    """Changes, such as dataset.root=/data/other or task.agnostic=true."""
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="DIR")] = None
    """Where to write; by default the run's folder."""
    batch_size: Annotated[int | None, typer.Option(min=1)] = None
    """Samples at once."""
    device: str | None = None
    runs: str = "runs"


def run(command: Command) -> None:
    """Measure, print and write. Raises ConfigError for a run of another task, DataError without its data set."""
    trained = open_trained(command.run, Path(command.runs), command.device or "auto", command.overrides)
    run, task = trained.run, detector(trained.run)
    size = command.batch_size or trained.config.train.batch_size
    with apart_from_training(run):
        evidence = [one for _, one in gather_evidence(run, test_batches(run, trained.test_data, size), size)]
    pictures = gather_pictures(evidence)
    classes, limit = task.classes, task.settings.most_detections
    coco = measure(pictures, len(classes), "coco", limit)
    article = measure(pictures, len(classes), "ultralytics-8.3", limit)
    table = confusion(pictures, len(classes), task.settings.confidence, task.settings.iou)
    rows = class_rows(pictures, classes, coco, article)
    print("\n".join([HEAD, "|---|" + "---:|" * 6, *rows]))
    print(f"precision and recall at a score of {coco.confidence:.3f}, where F1 is best")
    output = Path(command.output) if command.output else Path(trained.directory.path)
    with failures_explained(output):
        output.mkdir(parents=True, exist_ok=True)
    content = as_json(classes, coco, article, table)
    write_atomically(output / "evaluation.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    write_atomically(output / "evaluation.html", page(trained.directory.path, classes, coco, table, rows))
    print(f"wrote {output / 'evaluation.html'} and evaluation.json")
