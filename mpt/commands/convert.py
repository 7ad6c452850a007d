"""`mpt convert RUN --half --to pt|safetensors|onnx`: the small file for inference.

`--to peft|diffusers|kohya`: the adapters of `memory.lora` alone.

The default is float16, whatever this machine computes in: the file is for others. Normalisations and the modules in
`precision.keep_fp32` stay float32, as in `mpt infer --half`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from mpt.commands.cli.arguments import Allow, Best, Newest, NewestRun, Output, Runs, StepOfCheckpoint
from mpt.config.precision_names import FLOAT32
from mpt.data.loading.loader import to_device
from mpt.errors import ConfigError
from mpt.inference import adapters
from mpt.inference.export import in_batches_of, write_onnx, write_weights
from mpt.inference.exported import description
from mpt.inference.half import networks, rebuild, rebuild_half, watch_calls
from mpt.inference.inputs import Inputs, infer_one, needs_inputs, read_inputs
from mpt.inference.measurement import stored_bytes
from mpt.inference.proof import Calls, Expected, expect, prove, prove_session
from mpt.inference.trained import Trained, open_trained
from mpt.precision.shared.choice import DTYPES
from mpt.report.statistics import Margin
from mpt.report.units import show_bytes
from mpt.run.checkpoints.choice import read_wish
from mpt.run.process.files import failures_explained
from mpt.seams import Exports, Run, Task
from mpt.seams.task_kinds import default_terms
from mpt.workflows.export_gate import Place
from mpt.workflows.export_graphs import Wishes, finish


@dataclass(frozen=True)
class Command:
    """Write a run's networks as one file."""

    run: NewestRun = None
    """A run or a checkpoint."""
    half: bool = False
    """Write half precision."""
    to: str | None = None
    """pt, safetensors, onnx; adapters alone: peft, diffusers, kohya. Without it as --output ends, else safetensors."""
    inside: bool = False
    """ONNX: with normalisation and softmax inside, from images in [0, 1] to probabilities."""
    dtype: str | None = None
    """float16 or bfloat16, with --half."""
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
    overwrite: bool = False
    """Overwrite existing files."""
    runs: Runs = "runs"
    allow: Allow = ()


PROOF_BATCH = 32
"""Samples at once when a file is measured."""
FORMATS = ("pt", "safetensors", "onnx")
"""Of whole networks; `mpt.inference.adapters` has those of adapters alone."""


def run(arguments: Command) -> None:
    """Write the networks that a run's inference calls as one file (ONNX: one per network).

    Raises ConfigError for formats and dtypes that are none, CheckpointError for runs without weights.
    """
    wanted = choose_format(arguments)
    if arguments.dtype not in (None, *DTYPES):
        raise ConfigError(
            f"--dtype: found {arguments.dtype!r}; allowed are {' and '.join(DTYPES)}, together with --half."
        )
    if arguments.dtype and not arguments.half:
        raise ConfigError("--dtype: it says which half; add --half")
    check_options(arguments, wanted)
    which = read_wish(best=arguments.best, newest=arguments.newest, step=arguments.step)
    trained = open_trained(arguments.run, Path(arguments.runs), "cpu", allow=arguments.allow, which=which)
    path = output_path(arguments, wanted, trained)
    unfolded = trained.run = rebuild(trained, FLOAT32, folds=False)
    with watch_calls(unfolded.task.modules) as called:
        if not needs_inputs(unfolded.task):
            infer_one(trained, next(iter(read_inputs(trained, [], 2))))
        if unfolded.task.inputs:  # an encoder is called for inputs alone
            infer_one(trained, drawn_inputs(unfolded))
    if wanted in adapters.FORMATS:
        made = adapters.export_adapters(trained, called, wanted, path)
        size, step = show_bytes(made.bytes), trained.loaded.step
        print(f"wrote {path}: {made.count} adapters, {size} ({made.networks}, step {step}); read back, it {made.proof}")
        return
    export = prepare(arguments, trained, called)
    with failures_explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    if wanted == "onnx":
        write_graphs(arguments, export, path)
    else:
        write_tensors(arguments, export, path)


@dataclass(frozen=True)
class Export:
    """A run's networks as they are written, and the reference of a written file."""

    trained: Trained
    full: Run
    """In float32."""
    chosen: Run
    """In the precision that is written."""
    called: Calls
    """The networks that inference calls, with their inputs."""
    modules: Mapping[str, nn.Module]
    """Those of `chosen`."""
    expected: Mapping[str, Expected]
    about: Mapping[str, str]


def prepare(arguments: Command, trained: Trained, called: Calls) -> Export:
    """Rebuild the run in the precision that is written. Raises ConfigError for --inside if nothing is around."""
    task, precision = trained.run.task, half_of(arguments) if arguments.half else "float32"
    if arguments.inside and whole_of(task, nn.Identity()) is None:
        raise ConfigError(f"--inside: task {trained.config.task.name} puts nothing around its networks; leave it out.")
    expected = expect(with_whole(task, called) if arguments.inside else called, precision)
    full = trained.run = rebuild(trained, FLOAT32)
    chosen = rebuild_half(trained, half_of(arguments)) if arguments.half else full
    modules = {name: module for name, module in networks(chosen.task.modules) if name in called}
    about = description(trained, chosen.task, list(modules), precision)
    return Export(trained, full, chosen, called, modules, expected, about)


def half_of(arguments: Command) -> str:
    """Return the half precision that is asked for, or would be."""
    return arguments.dtype or "float16"


def write_graphs(arguments: Command, export: Export, path: Path) -> None:
    """Write an ONNX file for each network, checked, and print its contents."""
    names = list(export.modules)
    files = {name: path if len(names) == 1 else path.with_name(f"{path.stem}-{name}.onnx") for name in names}
    refuse_taken(files.values(), arguments)
    task, wishes = export.chosen.task, wishes_of(arguments, half_of(arguments))
    for name, module in export.modules.items():
        file, inputs = files[name], export.called[name][1]
        terms, own = export_terms(task), {**export.about, "mpt_networks": name}
        if arguments.inside:
            whole_network = whole_of(task, module)
            assert whole_network is not None
            module, terms, own = whole_network, (terms[0], ("probabilities",)), {**own, "mpt_inside": "true"}
        over = " over the file that was there" * file.exists()
        kind = torch.float32
        if wishes is not None:  # which makes fewer bits of a float32 graph
            module = module_of(export.full.task, name, arguments.inside) if arguments.half else module
        elif arguments.half:
            kind = DTYPES[half_of(arguments)]
        place = Place(export.trained, (name,), arguments.inside, arguments.samples, arguments.batch or PROOF_BATCH)
        check = checks(file, {name: export.expected[name]}, arguments, place, wishes, inputs)
        said = write_onnx(file, module, inputs, kind, terms, own, check, arguments.batch)
        print(f"wrote {file}{over}: {show_bytes(file.stat().st_size)}; {said}")


def write_tensors(arguments: Command, export: Export, path: Path) -> None:
    """Write one file of all networks' weights, checked, and print its size against float32's."""
    whole = stored_bytes({name: one for name, one in networks(export.full.task.modules) if name in export.called})
    over = " over the file that was there" * path.exists()
    said = write_weights(path, export.modules, export.about, proof(path, export.expected, arguments))
    print(
        f"wrote {path}{over}: {show_bytes(path.stat().st_size)}, against {show_bytes(whole)} in float32 "
        f"({', '.join(export.modules)}, step {export.trained.loaded.step}); it reads back as it was written and {said}"
    )


def proof(file: Path, expected: Mapping[str, Expected], arguments: Command) -> Callable[[Path], str]:
    """Return the check of a written file before it gets its name."""
    if arguments.inside:  # one network, which cannot be read back without its surroundings
        (whole,) = expected.values()
        return lambda partial: prove_session(partial, str(file), whole)
    return lambda partial: prove(partial, str(file), expected, arguments.allow)


def checks(
    file: Path,
    expected: Mapping[str, Expected],
    arguments: Command,
    place: Place,
    wishes: Wishes | None,
    inputs: tuple[Any, ...],
) -> Callable[[Path], str]:
    """Return the work on a float32 graph before it gets its name: fewer bits, the metric, the comparison."""
    compares = proof(file, expected, arguments)
    if wishes is None:
        return compares
    example = in_batches_of(arguments.batch or len(inputs[0]), inputs)
    return lambda partial: finish(partial, file, place, wishes, example, compares)


def check_options(arguments: Command, wanted: str) -> None:
    """Raise ConfigError for options that do not go together."""
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
        raise ConfigError("--half: adapters are written in the dtype in which they were trained; leave it out.")
    if arguments.int8 and arguments.half:
        raise ConfigError("--half and --int8: choose one.")
    if arguments.int8 and importlib.util.find_spec("onnxruntime") is None:
        raise ConfigError("--int8 is written by the package onnxruntime: pip install onnxruntime")
    if arguments.gate is not None:
        Margin.parse(arguments.gate)


def wishes_of(arguments: Command, dtype: str) -> Wishes | None:
    """Return how a graph is to be proved; None if ONNX Runtime is not here, or cannot compute its dtype."""
    if importlib.util.find_spec("onnxruntime") is None or (arguments.half and dtype != "float16"):
        return None
    kind = "int8" if arguments.int8 else "float16" if arguments.half else "float32"
    gate = arguments.gate or ("2%" if arguments.int8 else "1%")
    return Wishes(kind, Margin.parse(gate), arguments.samples)


def module_of(task: Task, name: str, inside: bool) -> nn.Module:
    """Return a network of a task by its name, or with pre- and postprocessing."""
    network = dict(networks(task.modules))[name]
    whole = whole_of(task, network) if inside else network
    assert whole is not None
    return whole


def drawn_inputs(run: Run) -> Inputs:
    """Return two random samples of the data's layout: which networks are called does not depend on their content."""
    generator = torch.Generator().manual_seed(0)
    batch = run.data.zeros(2, "cpu")
    for value in batch.values():
        if value.is_floating_point():
            value.uniform_(generator=generator)
    return to_device(batch, run.device, run.data), 2


def choose_format(arguments: Command) -> str:
    """Return `--to`, else the format of --output's suffix, else safetensors. Raises ConfigError for another word."""
    if arguments.to is None:
        suffix = Path(arguments.output or "").suffix.removeprefix(".")
        return suffix if suffix in FORMATS else "safetensors"
    known = (*FORMATS, *adapters.FORMATS)
    if arguments.to not in known:
        meant = "; for PyTorch it is pt" if "torch" in arguments.to or arguments.to in ("pth", "ckpt") else ""
        raise ConfigError(f"--to: found {arguments.to!r}; allowed are {', '.join(known)}{meant}.")
    return arguments.to


def output_path(arguments: Command, wanted: str, trained: Trained) -> Path:
    """Return the file to write: the given file, or one named after the run in its folder."""
    suffix = "" if wanted == "peft" else ".safetensors" if wanted in adapters.FORMATS else f".{wanted}"
    if arguments.output is None:
        half = "-half" if arguments.half else "-int8" if arguments.int8 else ""
        name = f"{trained.directory.name}{half}{suffix}"
        if wanted in adapters.FORMATS:
            name = adapters.default_name(trained.directory.name, wanted)
        path = trained.directory.path / name
        refuse_taken([path], arguments)
        return path
    path = Path(arguments.output)
    if path.is_dir() and suffix:
        raise ConfigError(f"--output: {path} is a folder; name a file ending in {suffix}.")
    if suffix and path.suffix != suffix:
        raise ConfigError(f"--output: {path} does not end in {suffix}, which --to {wanted} writes.")
    refuse_taken([path], arguments)
    return path


def refuse_taken(files: Iterable[Path], arguments: Command) -> None:
    """Raise ConfigError for a file that is there, unless it may be overwritten."""
    for file in files:
        if file.exists() and not arguments.overwrite:
            raise ConfigError(f"{file} is there already; name another with --output, or add --overwrite")


def whole_of(task: Task, network: nn.Module) -> nn.Module | None:
    """Return an exported network with pre- and postprocessing inside; None if the task has nothing to put around it."""
    return task.whole(network) if isinstance(task, Exports) else None


def with_whole(task: Task, called: Calls) -> Calls:
    """Return the calls of networks as calls with pre- and postprocessing."""
    wholes = {name: whole_of(task, network) for name, (network, _, _) in called.items()}
    return {name: (whole, called[name][1], None) for name, whole in wholes.items() if whole is not None}


def export_terms(task: Task) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the tensors into and out of an exported network."""
    return task.export_terms() if isinstance(task, Exports) else default_terms(task)
