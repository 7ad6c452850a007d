"""Write a detector as ONNX, with decoding and, if asked, suppression inside."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class Command:
    """Write a detector as ONNX, checked by ONNX Runtime.

    Inputs are the cameras' pictures in [0, 1]; outputs are boxes in pixels and scores, or with --nms the detections.
    """

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)]
    """A run or a checkpoint."""
    output: Annotated[Path, typer.Argument(metavar="OUT", show_default=False)]
    """The .onnx file."""
    nms: bool = False
    """Suppress overlapping boxes inside; one output (n, 7): sample, corners, score, class."""
    int8: Annotated[int | None, typer.Option(min=1, metavar="N")] = None
    """Store weights and compute convolutions in 8 bits, calibrated on N training pictures."""
    confidence: Annotated[float | None, typer.Option(min=0, max=1)] = None
    """Least score, with --nms."""
    iou: Annotated[float | None, typer.Option(min=0, max=1)] = None
    """IoU from which the worse of two boxes is dropped, with --nms."""
    runs: str = "runs"


def run(command: Command) -> None:
    """Export as the arguments say."""
    from mpt.systems.yolofuse.commands.onnx_file import export

    export(command)
