"""Measure a detector on its test set: mAP by class, confusions, curves of precision, recall and F1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer


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
    """Measure as the arguments say."""
    from mpt.systems.yolofuse.commands.evaluation import evaluate_run

    evaluate_run(command)
