"""Detect objects in pictures, pairs of pictures, folders or videos: json, YOLO labels, drawn pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True)
class Command:
    """Detect objects in pictures, pairs, folders or videos.

    Boxes are in the pixels of the pictures as they are. Writes detections.json, labels/ (YOLO txt) and pictures/.
    """

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)]
    """A run or a checkpoint."""
    input: Annotated[tuple[str, ...], typer.Option(metavar="[NAME=]PATH")] = ()
    """A picture, a folder or a video; once for each camera, rgb=PATH ir=PATH."""
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="DIR")] = None
    """Where to write; by default detections/ in the run."""
    half: bool = False
    """Weights in half, and say how far the boxes are from float32's."""
    dtype: str | None = None
    """float16 or bfloat16."""
    confidence: Annotated[float | None, typer.Option(min=0, max=1)] = None
    """Least score."""
    iou: Annotated[float | None, typer.Option(min=0, max=1)] = None
    """IoU from which the worse of two boxes is dropped."""
    batch_size: Annotated[int, typer.Option(min=1)] = 8
    """Samples at once."""
    no_pictures: bool = False
    """Draw nothing."""
    device: str | None = None
    runs: str = "runs"


def run(command: Command) -> None:
    """Detect as the arguments say."""
    from mpt.systems.yolofuse.commands.detection import detect_files

    detect_files(command)
