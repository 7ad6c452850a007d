"""`mpt prune`: remove a trained network's hidden channels that matter least, train it on, and print what it cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.arguments import Device, Runs


@dataclass(frozen=True)
class Command:
    """Prune a run's hidden channels and continue its training.

    Writes a run of its own (memory.prune), and a table of the figures, memory and time before pruning, after it and
    after training on. Of a GAN the generator is pruned.

    Examples:
      mpt prune RUN --share 0.5 --steps 2000
    """

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)]
    """A run or a checkpoint."""
    overrides: Annotated[
        tuple[str, ...], typer.Argument(metavar="KEY=VALUE", show_default=False)
    ] = ()
    """Changes for the training after pruning, such as optimizer.lr=1e-3."""
    share: Annotated[float, typer.Option(min=0.05, max=0.95)] = 0.5
    """The share of hidden channels that is kept."""
    network: Annotated[tuple[str, ...], typer.Option(metavar="NAME")] = ()
    """A network to prune, once for each; by default those that are trained, of a GAN the generator."""
    steps: Annotated[int, typer.Option(min=1)] = 100
    """Steps to train on."""
    name: str | None = None
    """The new run's folder below --runs; by default RUN-pruned."""
    runs: Runs = "runs"
    device: Device = None


def run(command: Command) -> None:
    from mpt.workflows.exporting.pruning import Wishes, prune

    wishes = Wishes(
        share=command.share,
        networks=command.network,
        steps=command.steps,
        name=command.name,
        overrides=command.overrides,
        runs=Path(command.runs),
        style="auto",
    )
    print(prune(command.run, command.device or "auto", wishes))
