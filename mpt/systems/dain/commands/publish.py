"""Write a run's weights under the published names, as the programs of DAIN and RIFE load them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class Command:
    """Write a run's weights as the programs of DAIN (best.pth) or RIFE (flownet.pkl) load them.

    Examples:
      mpt dain publish RUN best.pth
    """

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)]
    """A run's name or folder, or a checkpoint's folder."""
    output: Annotated[Path, typer.Argument(metavar="OUT", show_default=False)]
    """The .pth or .pkl file to write."""
    runs: Path = Path("runs")
    """The folder in which RUN is looked for by name."""


def run(command: Command) -> None:
    """Write as the arguments say."""
    from mpt.systems.dain.nn.weights.published_weights import publish

    publish(command.run, command.output, command.runs)
