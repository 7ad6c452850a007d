"""`mpt convert RUN --half --to pt|safetensors|onnx`: the small file for inference.

`--to peft|diffusers|kohya`: the adapters of `memory.lora` alone.

The default is float16, whatever this machine computes in: the file is for others. Normalisations and the modules in
`precision.keep_fp32` stay float32, as in `mpt infer --half`.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.arguments import (
    Allow,
    Best,
    Newest,
    NewestRun,
    Output,
    Runs,
    StepOfCheckpoint,
)
from mpt.errors import ConfigError
from mpt.inference import adapters
from mpt.inference.trained import Trained, open_trained
from mpt.precision.shared.choice import DTYPES
from mpt.report.comparing.statistics import Margin
from mpt.report.units import show_bytes
from mpt.run.checkpoints.choice import read_wish
from mpt.run.process.files import failures_explained
from mpt.workflows.exporting.export import (
    Form,
    prepare,
    refuse_taken,
    watch_inference,
    write_graphs,
    write_tensors,
)
from mpt.workflows.exporting.export_graphs import Wishes


@dataclass(frozen=True)
class Command:
    """Export a run's networks: safetensors, ONNX or .pt.

    Examples:
      mpt convert RUN --to safetensors
      mpt convert RUN --to onnx --inside -o mine.onnx
      mpt convert RUN --to onnx --half
    """

    run: NewestRun = None
    """A run or a checkpoint."""
    half: bool = False
    """Write half precision."""
    to: str | None = None
    """pt, safetensors, onnx; adapters alone: peft, diffusers, kohya. Without it as --output ends, else safetensors."""
    inside: bool = False
    """ONNX: with normalisation and softmax inside, from images in [0, 1] to probabilities."""
    dtype: str | None = None
    """float16 or bfloat16, with --half; ONNX: float16."""
    int8: bool = False
    """ONNX: convolutions and matrix products in 8 bits, calibrated on the training data."""
    gate: str | None = None
    """ONNX: by how much the task's metric may be worse, 1% or 0.5; 1% unless given, 2% in 8 bits."""
    samples: Annotated[int, typer.Option(min=2)] = 256
    """ONNX: test samples that the metric is measured on, and training samples that calibrate --int8."""
    batch: Annotated[int | None, typer.Option(min=1)] = None
    """ONNX: a fixed batch; it is free otherwise."""
    best: Best = False
    newest: Newest = False
    step: StepOfCheckpoint = None
    output: Output = None
    """The file to write, by default in the run's folder."""
    overwrite: bool = False
    """Overwrite existing files."""
    runs: Runs = "runs"
    allow: Allow = ()


FORMATS = ("pt", "safetensors", "onnx")
"""Of whole networks; `mpt.inference.adapters` has those of adapters alone."""


def run(arguments: Command) -> None:
    """Write the networks that a run's inference calls as one file (ONNX: one per network).

    Raises ConfigError for formats and dtypes that are none, CheckpointError for runs without weights.
    """
    wanted = choose_format(arguments)
    check_options(arguments, wanted)
    which = read_wish(best=arguments.best, newest=arguments.newest, step=arguments.step)
    trained = open_trained(
        arguments.run, Path(arguments.runs), "cpu", allow=arguments.allow, which=which
    )
    path = output_path(arguments, wanted, trained)
    called = watch_inference(trained)
    if wanted in adapters.FORMATS:
        made = adapters.export_adapters(trained, called, wanted, path)
        size, step = show_bytes(made.bytes), trained.loaded.step
        print(
            f"wrote {path}: {made.count} adapters, {size} ({made.networks}, step {step}); read back, it {made.proof}"
        )
        return
    form = form_of(arguments)
    export = prepare(trained, called, form)
    with failures_explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    if wanted != "onnx":
        print(write_tensors(export, path, form))
        return
    for line in write_graphs(export, path, form):
        print(line)


def form_of(arguments: Command) -> Form:
    """Return how the files are to be. A graph proves itself if ONNX Runtime is here."""
    half = (arguments.dtype or "float16") if arguments.half else None
    wishes = None
    if importlib.util.find_spec("onnxruntime") is not None:
        gate = Margin.parse(arguments.gate or ("2%" if arguments.int8 else "1%"))
        wishes = Wishes("int8" if arguments.int8 else half or "float32", gate, arguments.samples)
    return Form(
        half,
        arguments.inside,
        wishes,
        arguments.batch,
        arguments.samples,
        arguments.overwrite,
        tuple(arguments.allow),
    )


def check_options(arguments: Command, wanted: str) -> None:
    """Raise ConfigError for options that do not go together, and for a dtype that is none."""
    if arguments.dtype not in (None, *DTYPES):
        raise ConfigError(
            f"--dtype: found {arguments.dtype!r}; allowed are {' and '.join(DTYPES)}, together with --half."
        )
    if arguments.dtype and not arguments.half:
        raise ConfigError("--dtype: it says which half; add --half")
    if wanted == "onnx" and arguments.dtype == "bfloat16":
        raise ConfigError(
            "--dtype bfloat16: ONNX Runtime does not compute in it on a CPU, where a file is proved; leave it out, "
            "which writes float16, or use --to safetensors or pt"
        )
    if wanted != "onnx":
        given = {
            "--inside": arguments.inside,
            "--int8": arguments.int8,
            "--gate": arguments.gate,
            "--batch": arguments.batch,
        }
        for option, value in given.items():
            if value:
                raise ConfigError(f"{option}: only --to onnx holds what is computed, and is run.")
    if wanted in adapters.FORMATS and arguments.half:
        raise ConfigError(
            "--half: adapters are written in the dtype in which they were trained; leave it out."
        )
    if arguments.int8 and arguments.half:
        raise ConfigError("--half and --int8: choose one.")
    if arguments.int8 and importlib.util.find_spec("onnxruntime") is None:
        raise ConfigError("--int8 is written by the package onnxruntime: pip install onnxruntime")
    if arguments.gate is not None:
        Margin.parse(arguments.gate, "--gate")


def choose_format(arguments: Command) -> str:
    """Return `--to`, else the format of --output's suffix, else safetensors. Raises ConfigError for another word."""
    if arguments.to is None:
        suffix = Path(arguments.output or "").suffix.removeprefix(".")
        return suffix if suffix in FORMATS else "safetensors"
    known = (*FORMATS, *adapters.FORMATS)
    if arguments.to not in known:
        meant = (
            "; for PyTorch it is pt"
            if "torch" in arguments.to or arguments.to in ("pth", "ckpt")
            else ""
        )
        raise ConfigError(f"--to: found {arguments.to!r}; allowed are {', '.join(known)}{meant}.")
    return arguments.to


def output_path(arguments: Command, wanted: str, trained: Trained) -> Path:
    """Return the file to write: the given file, or one named after the run in its folder."""
    suffix = (
        "" if wanted == "peft" else ".safetensors" if wanted in adapters.FORMATS else f".{wanted}"
    )
    if arguments.output is None:
        half = "-half" if arguments.half else "-int8" if arguments.int8 else ""
        name = f"{trained.directory.name}{half}{suffix}"
        if wanted in adapters.FORMATS:
            name = adapters.default_name(trained.directory.name, wanted)
        path = trained.directory.path / name
        refuse_taken([path], arguments.overwrite)
        return path
    path = Path(arguments.output)
    if path.is_dir() and suffix:
        raise ConfigError(f"--output: {path} is a folder; name a file ending in {suffix}.")
    if suffix and path.suffix != suffix:
        raise ConfigError(f"--output: {path} does not end in {suffix}, which --to {wanted} writes.")
    refuse_taken([path], arguments.overwrite)
    return path
