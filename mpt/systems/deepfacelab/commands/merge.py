"""Swap the faces in frames or a video: a trained model redraws each aligned face, which goes back to its place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from mpt.commands.arguments import Runs


@dataclass(frozen=True)
class Command:
    """Swap the faces in frames or in a video.

    The same command goes on with an output that was begun.
    """

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)]
    """A trained run or a checkpoint."""
    frames: Annotated[Path, typer.Option(metavar="DIR|VIDEO", show_default=False)]
    """The frames, or the video, with the destination's faces."""
    aligned: Annotated[Path, typer.Option(metavar="DIR|PAK", show_default=False)]
    """The faces that were extracted from these frames, with their metadata."""
    output: Annotated[Path, typer.Option(metavar="DIR|VIDEO", show_default=False)]
    """Folder of the merged frames, or a video, whose sound is that of --frames."""
    mask: Literal["full", "dst", "learned-prd", "learned-dst", "learned", "learned-sum", "xseg", "learned-xseg"] = (
        "learned"
    )
    """What is replaced: learned is where both drawn masks agree, dst the landmarks' hull, xseg what was painted."""
    erode: int = 0
    """Make the mask smaller by so many quarter pixels of the drawing; negative makes it larger."""
    blur: Annotated[int, typer.Option(min=0)] = 0
    """Fade its edge over so many quarter pixels of the drawing."""
    colours: Literal["none", "rct", "lct", "mkl", "idt", "sot"] = "rct"
    """How the drawing takes the frame's colours."""
    scale: Annotated[float, typer.Option(min=0.5, max=1.5)] = 1.0
    """Size of the face that is put back against the one that was drawn."""
    raw: bool = False
    """Put back the whole drawn square, without mask and colours."""
    face_type: Literal["h", "mf", "f", "wf", "head"] | None = None
    """The model's type of face; by default the run's."""
    half: bool = False
    """Draw in half precision."""
    batch_size: Annotated[int | None, typer.Option(min=1)] = None
    """Faces drawn at once; by default 8, or what fits --vram."""
    vram: Annotated[str | None, typer.Option(metavar="SIZE")] = None
    """Draw as many faces at once as are planned to fit into this memory, such as 6GiB."""
    fps: Annotated[float | None, typer.Option(min=1)] = None
    """Frames per second of a video made from a folder; 25 by default."""
    overwrite: bool = False
    """Make frames anew that were merged with other settings."""
    device: str | None = None
    """cpu, cuda, ...; by default the best there is."""
    runs: Runs = "runs"


def run(command: Command) -> None:
    """Merge as the arguments say."""
    from mpt.systems.deepfacelab.commands.merge_run import merge

    merge(command)
