"""Prune a trained detector's hidden channels and train it on: mAP before, after and after that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True)
class Command:
    """Prune a detector's hidden channels and train it on.

    Writes a run of its own, with mAP before pruning, after it and after training on.
    """

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)]
    """A run or a checkpoint."""
    overrides: Annotated[tuple[str, ...], typer.Argument(metavar="KEY=VALUE", show_default=False)] = ()
    """Changes for the training after pruning, such as optimizer.lr=1e-3."""
    share: Annotated[float, typer.Option(min=0.05, max=0.95)] = 0.5
    """The share of hidden channels that is kept."""
    steps: Annotated[int, typer.Option(min=1)] = 100
    """Steps to train on."""
    name: str | None = None
    """The new run's folder below --runs; by default RUN-pruned."""
    runs: str = "runs"
    device: str | None = None


def run(command: Command) -> None:
    """Prune as the arguments say."""
    from mpt.systems.yolofuse.commands.prune_run import prune_run

    prune_run(command)
