"""Make a run of a DeepFaceLab model, which `mpt infer` and `mpt train --resume` take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class Command:
    """Make a run of a DeepFaceLab model.

    Networks, optimizers, options and the iteration are taken over.

    Examples:
      mpt deepfacelab leras-to-torch workspace/model runs/from-dfl
    """

    model_dir: Annotated[Path, typer.Argument(metavar="MODEL_DIR", show_default=False)]
    """The folder of DeepFaceLab's model files."""
    output: Annotated[Path, typer.Argument(metavar="OUT", show_default=False)]
    """The run's folder, which must not be there."""
    archi: str | None = None
    """Options that weights lack, such as df-ud; by default they are read from the model's data.dat or summary."""
    name: str | None = None
    """Which of several models in the folder, such as foo, foo_SAEHD or XSeg."""
    config: Annotated[Path | None, typer.Option(metavar="FILE")] = None
    """The configuration the run is to have; its model must be the weights'."""


def run(command: Command) -> None:
    """Convert as the arguments say."""
    from mpt.systems.deepfacelab.commands.shared.convert_leras import leras_to_torch

    leras_to_torch(command.model_dir, command.output, command.archi, command.config, command.name)
