"""Write an interpolating network as ONNX for frames of one size, measured against float32 before it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class Command:
    """Write a network as ONNX: two frames and a time in, the frame between out.

    Frames are (1, 3, h, w) in [0, 1] of --size, time is (1,). The file is run and compared with float32 here; below
    --gate it is not kept. DAIN and published RIFE (its warp is GridSample) export.

    Examples:
      mpt dain export RUN network.onnx --size 1280x720
    """

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)]
    """A run's name or folder, a checkpoint's folder, or a published file of weights."""
    output: Annotated[Path, typer.Argument(metavar="OUT", show_default=False)]
    """The .onnx file to write."""
    size: str = "1280x720"
    """Width and height of the frames; both are padded to the network's multiple inside."""
    scale: float = 1.0
    """With a published RIFE: work at this multiple of the size."""
    half: bool = False
    """Store weights and compute in float16; positions, flows and the warp stay float32."""
    int8: Annotated[Path | None, typer.Option(metavar="FRAMES")] = None
    """Compute convolutions in 8 bits, calibrated on a video, a folder of frames or a picture's folder."""
    gate: float = 40.0
    """The least PSNR in dB of the file's frame against float32's."""
    overwrite: bool = False
    """Write over a file that is there."""
    runs: Path = Path("runs")
    """The folder in which RUN is looked for by name."""


def run(command: Command) -> None:
    """Export as the arguments say."""
    from mpt.systems.dain.inference.onnx_file import Wishes, export_file

    wishes = Wishes(
        command.size, command.scale, command.half, command.int8, command.gate, command.overwrite
    )
    export_file(command.run, command.output, wishes, command.runs)
