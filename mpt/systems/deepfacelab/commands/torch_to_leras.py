"""Write a run's newest whole checkpoint as a DeepFaceLab model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.arguments import Runs


@dataclass(frozen=True)
class Command:
    """Write a run as a DeepFaceLab model.

    Examples:
      mpt deepfacelab torch-to-leras RUN workspace/model
    """

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)]
    """A run or a checkpoint."""
    output: Annotated[Path, typer.Argument(metavar="OUT", show_default=False)]
    """The model's folder."""
    name: str | None = None
    """The model's name in DeepFaceLab; by default the one under which it came, or new."""
    replace: bool = False
    """Replace a model of that name even if it is of another shape or further trained. It becomes its newest backup."""
    runs: Runs = "runs"


def run(command: Command) -> None:
    """Convert as the arguments say."""
    from mpt.systems.deepfacelab.commands.shared.return_leras import torch_to_leras

    torch_to_leras(command.run, command.output, command.name, command.runs, replace=command.replace)
