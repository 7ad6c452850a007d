"""A run's networks as files for inference (safetensors, `.pt`, ONNX), each proved before it gets its name.

The networks are those that inference calls: the run infers once and they are watched. A written file is read back, or
run, and compared with the run; an ONNX file is also judged by the task's metric
(`mpt.workflows.exporting.export_graphs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpt.config.checking.precision_names import FLOAT32
from mpt.data.loading.loader import to_device
from mpt.engine.state.evaluation import apart_from_training, gather_evidence
from mpt.errors import ConfigError
from mpt.inference.export import in_batches_of, write_onnx, write_weights
from mpt.inference.exported import description
from mpt.inference.half import networks, rebuild, rebuild_half, watch_calls
from mpt.inference.inputs import infer_one, needs_inputs, read_inputs
from mpt.inference.measurement import stored_bytes
from mpt.inference.proof import Calls, Expected, expect, prove, prove_session
from mpt.inference.trained import Trained
from mpt.precision.shared.choice import DTYPES
from mpt.report.units import show_bytes
from mpt.seams import Batch, Exports, Run, Task
from mpt.seams.task_kinds import default_terms, infers
from mpt.workflows.exporting.export_gate import Place
from mpt.workflows.exporting.export_graphs import Wishes, finish

DRAWN = 2
"""Samples of the call by which networks are watched."""
PROOF_BATCH = 32
"""Samples at once when a file is measured."""


@dataclass(frozen=True)
class Form:
    """How the files are to be."""

    half: str | None = None
    """float16 or bfloat16; None is float32."""
    inside: bool = False
    """ONNX: with pre- and postprocessing inside."""
    wishes: Wishes | None = None
    """ONNX: how a file proves itself; None if it is not run here."""
    batch: int | None = None
    """ONNX: a fixed batch; it is free otherwise."""
    samples: int = 256
    """ONNX: test samples of the metric."""
    overwrite: bool = False
    allow: tuple[str, ...] = ()


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


def watch_inference(trained: Trained) -> Calls:
    """Let a run infer and return the networks that were called, with their inputs; the run is in float32 after it.

    A task that does not infer evaluates in its place.
    """
    unfolded = trained.run = rebuild(trained, FLOAT32, folds=False)
    with watch_calls(unfolded.task.modules) as called:
        if not infers(unfolded.task):
            with apart_from_training(unfolded):
                list(gather_evidence(unfolded, [drawn_batch(unfolded)], DRAWN))
        elif not needs_inputs(unfolded.task):
            infer_one(trained, next(iter(read_inputs(trained, [], DRAWN))))
        if infers(unfolded.task) and unfolded.task.inputs:  # an encoder is called for inputs alone
            infer_one(trained, (drawn_batch(unfolded), DRAWN))
    return called


def drawn_batch(run: Run) -> Batch:
    """Return random samples of the data's layout: which networks are called does not depend on their content."""
    generator = torch.Generator().manual_seed(0)
    batch = run.data.zeros(DRAWN, "cpu")
    for value in batch.values():
        if value.is_floating_point():
            value.uniform_(generator=generator)
    return to_device(batch, run.device, run.data)


def prepare(trained: Trained, called: Calls, form: Form) -> Export:
    """Rebuild the run in the precision that is written. Raises ConfigError for `inside` if nothing is around."""
    task, precision = trained.run.task, form.half or "float32"
    if form.inside and whole_of(task, nn.Identity()) is None:
        raise ConfigError(
            f"--inside: task {trained.config.task.name} puts nothing around its networks; leave it out."
        )
    shown = with_whole(task, called) if form.inside else called
    expected = expect(shown, precision, trained.run.tricks, computes=form.wishes is not None)
    full = trained.run = rebuild(trained, FLOAT32)
    chosen = rebuild_half(trained, form.half) if form.half else full
    modules = {name: module for name, module in networks(chosen.task.modules) if name in called}
    about = description(trained, chosen.task, list(modules), precision)
    return Export(trained, full, chosen, called, modules, expected, about)


def write_graphs(export: Export, path: Path, form: Form) -> Iterator[str]:
    """Write an ONNX file for each network, checked, and yield a line about each."""
    names = list(export.modules)
    files = {
        name: path if len(names) == 1 else path.with_name(f"{path.stem}-{name}.onnx")
        for name in names
    }
    refuse_taken(files.values(), form.overwrite)
    task = export.chosen.task
    for name, module in export.modules.items():
        file, inputs = files[name], export.called[name][1]
        beside = task.graph_texts(module) if isinstance(task, Exports) else {}
        terms, own = export_terms(task), {**export.about, **beside, "mpt_networks": name}
        if form.inside:
            module, terms, own = (
                inside_of(task, module),
                (terms[0], ("probabilities",)),
                {**own, "mpt_inside": "true"},
            )
        over = " over the file that was there" * file.exists()
        kind = torch.float32
        if form.wishes is None and form.half:
            kind = DTYPES[form.half]
        elif form.half:  # fewer bits are made of a float32 graph
            full = dict(networks(export.full.task.modules))[name]
            module = inside_of(export.full.task, full) if form.inside else full
        place = Place(export.trained, (name,), form.inside, form.samples, form.batch or PROOF_BATCH)
        check = checks(file, {name: export.expected[name]}, place, inputs, form)
        said = write_onnx(file, module, inputs, kind, terms, own, check, form.batch)
        if form.wishes and form.wishes.kind != "float32":
            said = f"in float32, before its conversion to {form.wishes.kind}, {said}"
        yield f"wrote {file}{over}: {show_bytes(file.stat().st_size)}; {said}"


def write_tensors(export: Export, path: Path, form: Form) -> str:
    """Write one file of all networks' weights, checked; return a line with its size against float32's."""
    whole = stored_bytes(
        {name: one for name, one in networks(export.full.task.modules) if name in export.called}
    )
    over = " over the file that was there" * path.exists()
    said = write_weights(path, export.modules, export.about, proof(path, export.expected, form))
    return (
        f"wrote {path}{over}: {show_bytes(path.stat().st_size)}, against {show_bytes(whole)} in float32 "
        f"({', '.join(export.modules)}, step {export.trained.loaded.step}); it reads back as it was written and {said}"
    )


def proof(file: Path, expected: Mapping[str, Expected], form: Form) -> Callable[[Path], str]:
    """Return the check of a written file before it gets its name."""
    if form.inside:  # one network, which cannot be read back without its surroundings
        (whole,) = expected.values()
        return lambda partial: prove_session(partial, str(file), whole)
    return lambda partial: prove(partial, str(file), expected, form.allow)


def checks(
    file: Path, expected: Mapping[str, Expected], place: Place, inputs: tuple[Any, ...], form: Form
) -> Callable[[Path], str]:
    """Return the work on a float32 graph before it gets its name: fewer bits, the metric, the comparison."""
    compares, wishes = proof(file, expected, form), form.wishes
    if wishes is None:
        return compares
    example = in_batches_of(form.batch or len(inputs[0]), inputs)
    return lambda partial: finish(partial, file, place, wishes, example, compares)


def refuse_taken(files: Iterable[Path], overwrite: bool) -> None:
    """Raise ConfigError for a file that is there, unless it may be overwritten."""
    for file in files:
        if file.exists() and not overwrite:
            raise ConfigError(
                f"{file} is there already; name another with --output, or add --overwrite"
            )


def whole_of(task: Task, network: nn.Module) -> nn.Module | None:
    """Return an exported network with pre- and postprocessing inside; None if the task has nothing to put around it."""
    return task.whole(network) if isinstance(task, Exports) else None


def inside_of(task: Task, network: nn.Module) -> nn.Module:
    """Return the same of a task that has something to put around it, as `prepare` has made sure."""
    whole = whole_of(task, network)
    assert whole is not None
    return whole


def with_whole(task: Task, called: Calls) -> Calls:
    """Return the calls of networks as calls with pre- and postprocessing."""
    wholes = {name: whole_of(task, network) for name, (network, _, _) in called.items()}
    return {
        name: (whole, called[name][1], None) for name, whole in wholes.items() if whole is not None
    }


def export_terms(task: Task) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the tensors into and out of an exported network."""
    return task.export_terms() if isinstance(task, Exports) else default_terms(task)
