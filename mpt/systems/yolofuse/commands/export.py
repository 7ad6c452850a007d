"""Write a detector as ONNX, with decoding and, if asked, suppression inside."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.arguments import Runs
from mpt.config.precision_names import FLOAT32
from mpt.errors import ConfigError
from mpt.inference.half import rebuild
from mpt.inference.trained import open_trained
from mpt.run.files import failures_explained
from mpt.systems.yolofuse.commands.detection import yolo_detector
from mpt.systems.yolofuse.commands.onnx_file import (
    Decoded,
    add_suppression,
    check_plain,
    check_suppression,
    example,
    quantise,
    write_plain,
)


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
    runs: Runs = "runs"


def run(command: Command) -> None:
    """Write and check the file. Raises ConfigError for missing packages, CheckpointError where outputs differ."""
    needed = ("onnx", "onnxscript", "onnxruntime")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"this needs the package {missing[0]}: pip install {' '.join(needed)}")
    if command.nms and command.int8:
        raise ConfigError("--nms and --int8: choose one; suppress what the 8-bit file gives in your program")
    overrides = tuple(
        f"task.{key}={value}" for key, value in (("confidence", command.confidence), ("iou", command.iou)) if value
    )
    trained = open_trained(command.run, Path(command.runs), "cpu", overrides)
    run = rebuild(trained, FLOAT32)
    task = yolo_detector(run, "mpt yolofuse export")
    pictures = example(run, task)
    partial = command.output.with_name(f".partial-{command.output.name}")
    try:
        with failures_explained(command.output):
            write_plain(partial, Decoded(task.inference_net), task.cameras, pictures)
            print(check_plain(partial, Decoded(task.inference_net), task.cameras, pictures))
            if command.nms:
                add_suppression(partial, task)
                print(check_suppression(partial, task, pictures))
            if command.int8:
                quantise(partial, trained, run, task, command.int8)
            os.replace(partial, command.output)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    print(f"wrote {command.output}, {command.output.stat().st_size / 2**20:.2f} MiB")
