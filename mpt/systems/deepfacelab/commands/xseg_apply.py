"""Draw masks of aligned faces with a trained XSeg and keep them in the faces, as DeepFaceLab does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from mpt.commands.cli.arguments import Runs


@dataclass(frozen=True)
class Command:
    """Write the masks that a trained XSeg draws into the metadata of aligned faces.

    They replace masks that were applied before; polygons stay.

    Examples:
      mpt deepfacelab xseg-apply faces --xseg RUN
    """

    faces: Annotated[Path, typer.Argument(metavar="DIR", show_default=False)]
    """The folder of aligned faces."""
    xseg: Annotated[Path, typer.Option(metavar="RUN|FILE|DIR", show_default=False)]
    """A run, or XSeg_256.npy, or the folder it is in: DeepFaceLab's model, or its own generic one."""
    face_type: Literal["h", "mf", "f", "wf", "head"] | None = None
    """The type of face that the XSeg was trained on; by default the run's or XSeg_data.dat's, else each face's."""
    device: str | None = None
    """cpu, cuda, ...; by default the best there is."""
    runs: Runs = "runs"


def run(command: Command) -> None:
    """Write the masks. Raises DataError, CheckpointError and InputOutputError."""
    from mpt.systems.deepfacelab.commands.shared.apply_xseg import apply_xseg

    apply_xseg(command.faces, command.xseg, command.face_type, command.device, command.runs)
