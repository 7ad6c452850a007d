"""Write a detector for other programs: ONNX with decoding and, if asked, suppression inside, or weights by name."""

from __future__ import annotations

import importlib.util
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import safetensors.torch
import torch
import typer
from torch import nn

from mpt.commands.cli.arguments import Runs
from mpt.config.checking.precision_names import FLOAT32
from mpt.engine.state.moving_averages import evaluated_module
from mpt.errors import ConfigError
from mpt.inference.graphs.files import add_texts
from mpt.inference.half import rebuild
from mpt.inference.trained import open_trained
from mpt.run.process.files import failures_explained, partial_file, write_atomically
from mpt.systems.yolofuse.commands.shared.detection import yolo_detector
from mpt.systems.yolofuse.commands.shared.fewer_bits import (
    compare_measured,
    measured,
    quantise,
    require_data,
    write_half,
)
from mpt.systems.yolofuse.commands.shared.onnx_file import (
    Decoded,
    Stacked,
    add_suppression,
    check_plain,
    check_suppression,
    example,
    interface_of,
    texts_of,
    trtexec_line,
    write_plain,
)

WEIGHTS = (".pt", ".safetensors")


@dataclass(frozen=True)
class Command:
    """Write a detector as ONNX, checked by ONNX Runtime, or as weights.

    Inputs are the cameras' pictures in [0, 1]; outputs are boxes in pixels and scores, or with --nms the detections.
    OUT ending in .pt or .safetensors holds the weights by the names of Ultralytics' models.

    Examples:
      mpt yolofuse export RUN detector.onnx --nms
      mpt yolofuse export RUN detector-int8.onnx --int8 300
    """

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)]
    """A run or a checkpoint."""
    output: Annotated[Path, typer.Argument(metavar="OUT", show_default=False)]
    """The .onnx, .pt or .safetensors file."""
    nms: bool = False
    """Suppress overlapping boxes inside; one output (n, 7): sample, corners, score, class."""
    int8: Annotated[int | None, typer.Option(min=1, metavar="N")] = None
    """Store weights and compute convolutions in 8 bits, calibrated on N training pictures."""
    half: bool = False
    """Store weights and compute in float16; inputs and outputs stay float32."""
    gate: Annotated[float, typer.Option(min=0, max=1, metavar="LOSS")] = 0.01
    """The most that --int8 and --half may lose of mAP50 and mAP50-95."""
    ultralytics: bool = False
    """One input, the cameras' channels behind each other, and one output, as Ultralytics' programs read them."""
    confidence: Annotated[float | None, typer.Option(min=0, max=1)] = None
    """Least score, with --nms."""
    iou: Annotated[float | None, typer.Option(min=0, max=1)] = None
    """IoU from which the worse of two boxes is dropped, with --nms."""
    runs: Runs = "runs"


def run(command: Command) -> None:
    """Write and check the file.

    Raises ConfigError for missing packages, CheckpointError if outputs differ, GateError if fewer bits lose too
    much.
    """
    if command.output.suffix in WEIGHTS:
        write_weights(command)
        return
    if command.output.suffix != ".onnx":
        raise ConfigError(f"OUT: {command.output} ends in none of .onnx, {', '.join(WEIGHTS)}")
    chosen = check_options(command)
    wishes = {"task.confidence": command.confidence, "task.iou": command.iou}
    overrides = tuple(f"{key}={value}" for key, value in wishes.items() if value is not None)
    trained = open_trained(command.run, Path(command.runs), "cpu", overrides)
    run = rebuild(trained, FLOAT32)
    task = yolo_detector(run)
    if command.nms and task.answers_once:
        raise ConfigError(
            "--nms: this network marks each object once and needs no suppression; leave it out, or write detections "
            "alone with --ultralytics"
        )
    for option in chosen:
        require_data(trained, option)
    pictures, network = example(run, task), Decoded(evaluated_module(task, "net"))
    names = interface_of(task, command.ultralytics)
    exported: nn.Module = network
    if command.ultralytics:
        best = task.settings.most_detections if task.answers_once else None
        exported = Stacked(network, [len(picture[0]) for picture in pictures], best)
        pictures = [torch.cat(pictures, 1)]
    outputs, dtype = (
        names.outputs,
        "int8" if command.int8 else "float16" if command.half else "float32",
    )
    with failures_explained(command.output), partial_file(command.output) as partial:
        is_free = write_plain(partial, exported, names, pictures)
        print(check_plain(partial, exported, names, pictures, is_free))
        if command.nms:
            add_suppression(partial, task)
            outputs = ("detections",)
            print(check_suppression(partial, task, pictures))
        if chosen:
            before = measured(partial, names, trained, run, task)
            if command.int8:
                quantise(partial, names, trained, run, task, command.int8)
            else:
                write_half(partial, exported, names, pictures)
            after = measured(partial, names, trained, run, task)
            compare_measured(before, after, dtype, len(trained.test_data), command.gate)
        add_texts(partial, texts_of(trained, task, dtype, outputs, is_free))
    sides = (
        "batch and sides are free"
        if is_free
        else "the batch is free, the sides are not: the network depends on them"
    )
    print(f"wrote {command.output}, {command.output.stat().st_size / 2**20:.2f} MiB; {sides}")
    print(f"for TensorRT: {trtexec_line(command.output, names, pictures, is_free)}")


def check_options(command: Command) -> list[str]:
    """Return the options that ask for fewer bits. Raises ConfigError for missing packages and options that clash."""
    needed = ("onnx", "onnxscript", "onnxruntime")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"this needs the package {missing[0]}: pip install {' '.join(needed)}")
    chosen = [
        option for option, is_set in (("--int8", command.int8), ("--half", command.half)) if is_set
    ]
    if len(chosen) > 1 or (command.nms and (chosen or command.ultralytics)):
        raise ConfigError(
            "--nms, --int8 and --half: choose one; and --nms has an output of its own, not --ultralytics'"
        )
    return chosen


def write_weights(command: Command) -> None:
    """Write the weights that inference uses, the average of a training, by the names of Ultralytics' models."""
    if command.nms or command.int8 or command.half or command.ultralytics:
        raise ConfigError(
            f"{command.output}: weights by name have no --nms, --int8, --half and --ultralytics; name an .onnx"
        )
    trained = open_trained(command.run, Path(command.runs), "cpu")
    task = yolo_detector(rebuild(trained, FLOAT32))  # adapters go into the weights
    state = {name: value.detach().float().clone() if value.is_floating_point() else value.clone()
             for name, value in evaluated_module(task, "net").state_dict().items()}  # fmt: skip
    stream = io.BytesIO()
    torch.save(state, stream)
    data = stream.getvalue() if command.output.suffix == ".pt" else safetensors.torch.save(state)
    with failures_explained(command.output):
        command.output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(command.output, data)
    reading = "torch.load" if command.output.suffix == ".pt" else "safetensors.torch.load_file"
    print(
        f"wrote {command.output}: {len(state)} tensors by the names of Ultralytics' models, to be loaded with"
    )
    print(f"  model.load_state_dict({reading}({command.output.name!r}))")
