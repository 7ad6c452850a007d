"""Make a video or a sequence of pictures smoother: x2, x4, x8 or to a frame rate, with a trained interpolation run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class Command:
    """Make a video, a folder of frames or two pictures smoother with a trained run.

    Sound is kept. Frames of different scenes are not blended. After Ctrl-C the same command goes on.
    """

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)]
    """A run's name or folder, or a checkpoint's folder."""
    inputs: Annotated[list[Path], typer.Argument(metavar="INPUT...", show_default=False)]
    """A video, a folder of numbered frames, or two or more pictures."""
    output: Annotated[Path, typer.Option(metavar="PATH", show_default=False)]
    """The video (.mp4, .mkv, ...) or folder to write."""
    factor: int = 2
    """How many times as many frames."""
    rate: float | None = None
    """The frame rate to reach, instead of a factor."""
    input_rate: float | None = None
    """Frames per second of the input; by default a video's own, 25 for pictures."""
    half: bool = False
    """Make frames in half precision, and say how far the first is from float32."""
    dtype: str | None = None
    """float16 or bfloat16, with --half; by default what the device is fast at."""
    vram: str | None = None
    """Memory that may be used, such as 6GiB: frames are cut into tiles that fit."""
    tile: int | None = None
    """Side of the tiles in pixels, instead of choosing it for --vram."""
    check_seams: bool = False
    """Measure on the first pair what tiles change; needs memory for a whole frame."""
    batch: int = 1
    """Pairs of frames that go through the network together."""
    scene_cut: float = 0.2
    """Below this similarity two frames are of different scenes; 0 blends all."""
    allow_gaps: bool = False
    """Take a folder whose numbering has gaps as it is."""
    device: str = "auto"
    """cpu, cuda or cuda:N."""
    runs: Path = Path("runs")
    """The folder in which RUN is looked for by name."""


def run(command: Command) -> None:
    """Interpolate as the arguments say."""
    from mpt.systems.dain.inference.run_command import run_command

    run_command(command)
