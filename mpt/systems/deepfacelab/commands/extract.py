"""Cut the faces out of frames, aligned and with metadata, as DeepFaceLab's extractor does and with its networks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer


@dataclass(frozen=True)
class Command:
    """Find the faces in frames or a video and write them aligned, with DeepFaceLab's metadata.

    The same command continues a folder that was begun. Frames without faces are listed in no_faces.txt.

    Examples:
      mpt deepfacelab extract clip.mp4 faces --facelib facelib
    """

    frames: Annotated[Path, typer.Argument(metavar="DIR|VIDEO", show_default=False)]
    """The frames, or the video."""
    output: Annotated[Path, typer.Argument(metavar="OUT", show_default=False)]
    """The folder of the faces."""
    facelib: Annotated[Path, typer.Option(metavar="DIR", show_default=False)]
    """Your DeepFaceLab, or its folder facelib, with S3FD.npy and 2DFAN.npy."""
    face_type: Literal["h", "mf", "f", "wf", "head"] = "wf"
    """How much of the head is shown."""
    size: Annotated[int, typer.Option(min=32, max=4096)] = 512
    """Sides of the faces in pixels."""
    quality: Annotated[int, typer.Option(min=1, max=100)] = 90
    """Quality of the JPGs."""
    max_faces: Annotated[int, typer.Option(min=0)] = 0
    """The largest that many faces of a frame; 0 for all."""
    device: str | None = None
    """cpu, cuda, ...; by default the best there is."""


def run(command: Command) -> None:
    """Write the faces. Raises DataError, CheckpointError and InputOutputError."""
    from mpt.systems.deepfacelab.commands.shared.extract_faces import extract_faces

    extract_faces(
        command.frames,
        command.output,
        command.facelib,
        face_type=command.face_type,
        size=command.size,
        quality=command.quality,
        most=command.max_faces,
        device=command.device,
    )
