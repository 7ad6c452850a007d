"""Measure a detector on its test set: mAP by class, confusions, curves of precision, recall and F1."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.arguments import Device, Runs
from mpt.engine.state.evaluation import evaluate
from mpt.inference.trained import open_trained
from mpt.report.run_page.page import write_evaluation
from mpt.run.process.files import failures_explained, write_atomically
from mpt.systems.yolofuse.commands.shared.detection import detector


@dataclass(frozen=True)
class Command:
    """Measure a detector on its test set.

    Prints mAP by class and writes evaluation.json and evaluation.html, with the confusion matrix and the curves.

    Examples:
      mpt yolofuse evaluate RUN
    """

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)]
    """A run or a checkpoint."""
    overrides: Annotated[
        tuple[str, ...], typer.Argument(metavar="KEY=VALUE", show_default=False)
    ] = ()
    """Changes, such as dataset.root=/data/other or task.agnostic=true."""
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="DIR")] = None
    """The folder to write; by default the run's folder."""
    batch_size: Annotated[int | None, typer.Option(min=1)] = None
    """Samples at once."""
    device: Device = None
    runs: Runs = "runs"


def run(command: Command) -> None:
    """Measure, print and write. Raises ConfigError for a run of another task, DataError without its data set."""
    trained = open_trained(
        command.run, Path(command.runs), command.device or "auto", command.overrides
    )
    run, task = trained.run, detector(trained.run)
    size = command.batch_size or trained.config.train.batch_size
    evaluate(run, trained.test_data, size)
    assert task.details is not None
    details, section = dict(task.details), task.details["section"]
    head, rows = section["table"]["head"], section["table"]["rows"]
    print(f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1), sep="\n")
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    print(f"precision and recall at a score of {details['confidence']:.3f}, where F1 is best")
    output = Path(command.output) if command.output else Path(trained.directory.path)
    with failures_explained(output):
        output.mkdir(parents=True, exist_ok=True)
    content = {"step": trained.loaded.step, **details}
    write_atomically(
        output / "evaluation.json", json.dumps(content, indent=1, allow_nan=False) + "\n"
    )
    write_evaluation(
        output / "evaluation.html", str(trained.directory.path), section, trained.loaded.step
    )
    print(f"wrote {output / 'evaluation.html'} and evaluation.json")
