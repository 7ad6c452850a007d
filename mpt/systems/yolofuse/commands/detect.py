"""Detect objects in pictures, pairs of pictures, folders or videos: json, YOLO labels, drawn pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mpt.commands.cli.arguments import Device, Runs
from mpt.config.checking.precision_names import FLOAT32
from mpt.data.video.video import is_video
from mpt.errors import ConfigError
from mpt.inference.exported import is_export, open_exported
from mpt.inference.half import choose_half, rebuild, rebuild_half
from mpt.inference.inputs import Given
from mpt.inference.outputs import made
from mpt.inference.trained import Trained, open_trained
from mpt.run.process.files import write_atomically
from mpt.systems.yolofuse.commands.shared.detection import (
    Detected,
    as_json,
    compare,
    detect,
    detector,
    find_inputs,
    samples,
    write_labels,
    write_picture,
)
from mpt.systems.yolofuse.tasks.detect import Detect


@dataclass(frozen=True)
class Command:
    """Detect objects in pictures, pairs, folders or videos.

    Boxes are in the pixels of the pictures as they are. Writes detections.json, labels/ (YOLO txt) and pictures/.

    Examples:
      mpt yolofuse detect RUN --input rgb=day --input ir=night --output found
    """

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)]
    """A run, a checkpoint, or a file of `mpt yolofuse export` or `mpt convert` (.onnx, .safetensors, .pt)."""
    overrides: Annotated[
        tuple[str, ...], typer.Argument(metavar="KEY=VALUE", show_default=False)
    ] = ()
    """Changes, such as task.agnostic=true."""
    input: Annotated[tuple[str, ...], typer.Option(metavar="[NAME=]PATH")] = ()
    """A picture, a folder or a video; once for each camera, rgb=PATH ir=PATH."""
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="DIR")] = None
    """The folder to write; by default detections/ in the run."""
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
    device: Device = None
    runs: Runs = "runs"


def from_infer(
    task: str | None, inputs: Sequence[tuple[str | None, Path]]
) -> dict[str, Any] | None:
    """Return this command's fields for `mpt infer RUN --input VIDEO`, or one for each camera."""
    if task != "detect" or not inputs or not all(is_video(path) for _, path in inputs):
        return None
    return {
        "input": tuple(str(path) if name is None else f"{name}={path}" for name, path in inputs)
    }


def opened(command: Command, overrides: tuple[str, ...]) -> Trained:
    """Return the run or the exported file, built again. Raises ConfigError for an export in another precision."""
    device = command.device or "auto"
    if not is_export(command.run):
        return open_trained(command.run, Path(command.runs), device, overrides)
    if command.half or command.dtype:
        raise ConfigError("--half, --dtype: an exported file is taken as it is; name a run")
    return open_exported(Path(command.run), device, overrides, ())


def run(command: Command) -> None:
    """Detect in every input and write the boxes. Raises ConfigError and DataError for inputs that are none."""
    wishes = {"task.confidence": command.confidence, "task.iou": command.iou}
    overrides = (
        *command.overrides,
        *(f"{key}={value}" for key, value in wishes.items() if value is not None),
    )
    trained = opened(command, overrides)
    task = detector(trained.run)
    inputs = find_inputs(command.input)
    output = Path(command.output) if command.output else Path(trained.directory.path) / "detections"
    with made(output):
        detect_into(output, trained, task, inputs, command)


def detect_into(
    output: Path, trained: Trained, task: Detect, inputs: Sequence[Given], command: Command
) -> None:
    """Detect in every input, write the boxes into a folder and print their number."""
    run = trained.run
    reference: list[Detected] = []
    if command.half:
        choice = choose_half(command.dtype, run.device)
        print(choice.statement)
        full = rebuild(trained, FLOAT32)
        reference = [
            one for one, _, _ in detect(full, samples(trained, inputs), command.batch_size)
        ]
        run = rebuild_half(trained, choice.dtype)
    seconds: list[float] = []
    found: list[Detected] = []
    for one, scene, spent in detect(run, samples(trained, inputs), command.batch_size):
        found.append(one)
        seconds.append(spent)
        write_labels(output, one)
        if not command.no_pictures:
            write_picture(output, one, scene, task.classes)
    write_atomically(
        output / "detections.json", json.dumps(as_json(found, task.classes), indent=1) + "\n"
    )
    total = sum(len(one.rows) for one in found)
    print(f"{total} detections in {len(found)} samples, written to {output}")
    if seconds:
        ordered = sorted(seconds)
        parts = [f"{name} {ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3:.1f} ms" for name, share in
                 (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))]  # fmt: skip
        print(
            f"per sample, batch {command.batch_size}, pictures read and letterboxed before: {', '.join(parts)}"
        )
    if command.half:
        for line in compare(reference, found):
            print(line)
