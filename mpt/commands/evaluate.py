"""`mpt evaluate`: every metric of a run or an export on a whole test set, its own or another, as a page and as JSON."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.arguments import (
    Allow,
    Best,
    Device,
    Json,
    Newest,
    NewestRun,
    Runs,
    StepOfCheckpoint,
)
from mpt.commands.cli.console import columns, open_console
from mpt.data.loading.absent import AbsentDataset
from mpt.engine.building.build import build_datasets
from mpt.engine.state.details import write_details
from mpt.engine.state.evaluation import counted_samples
from mpt.errors import ConfigError, DataError, InputOutputError
from mpt.inference.evaluating import measure_in_half, measure_trained
from mpt.inference.exported import is_export, read_about
from mpt.inference.opening import open_with_inputs
from mpt.inference.other_data import open_folder
from mpt.inference.outputs import made
from mpt.inference.slices import choose_devices
from mpt.inference.trained import Trained
from mpt.report.run_page.evaluated_page import Evaluated, figure_rows, write_page
from mpt.run.checkpoints.choice import read_wish
from mpt.run.process.files import free_path
from mpt.run.records.recorder import last_test_set
from mpt.seams import Dataset


@dataclass(frozen=True)
class Command:
    """Measure a run or an export on a whole test set.

    All metrics that there are for its task, on the run's own test set or on --data, with a page.

    Examples:
      mpt evaluate RUN
      mpt evaluate RUN --data pictures --half
    """

    run: NewestRun = None
    """A run, a checkpoint, or an export of mpt convert (.onnx, .safetensors, .pt)."""
    data: Annotated[str | None, typer.Option(metavar="FOLDER")] = None
    """Other data: a folder with a folder of images for each class, or laid out as the run's own data."""
    half: bool = False
    """Measure the weights in half too, and say how far its figures are from float32's."""
    dtype: str | None = None
    """With --half: float16 or bfloat16."""
    batch_size: Annotated[int | None, typer.Option(min=1)] = None
    """Samples at once."""
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="FOLDER")] = None
    """The folder to write into; by default evaluations/ in the run, or alongside an export."""
    best: Best = False
    newest: Newest = False
    step: StepOfCheckpoint = None
    device: Device = None
    json: Json = False
    runs: Runs = "runs"
    allow: Allow = ()


def run(arguments: Command) -> None:
    """Evaluate, print the figures and write `evaluation.json` and `evaluation.html`.

    Raises DataError for data that does not suit the run, CheckpointError for a run that cannot be read.
    """
    exported = is_export(arguments.run)
    if arguments.dtype is not None and not arguments.half:
        raise ConfigError("--dtype: it says which half; add --half")
    trained, _ = open_with_inputs(
        arguments.run,
        device=choose_devices(arguments.device, 1)[0],
        runs=Path(arguments.runs),
        allow=arguments.allow,
        which=read_wish(best=arguments.best, newest=arguments.newest, step=arguments.step),
    )
    data = choose_data(trained, arguments)
    folder = choose_folder(arguments, trained, exported)
    with made(folder):
        found = evaluated(arguments, trained, data, exported)
        if arguments.json:
            print(json.dumps(found.to_record(), indent=1, allow_nan=False))
        else:
            show(found)
        write_files(found, folder, data)  # last: what was measured is printed on a full disk too
    if not arguments.json:
        open_console().print(f"page {folder / 'evaluation.html'}")


def evaluated(arguments: Command, trained: Trained, data: Dataset, exported: bool) -> Evaluated:
    """Measure as the arguments say."""
    size = arguments.batch_size or trained.config.train.batch_size
    begun = time.perf_counter()
    if arguments.half:
        measured = measure_in_half(trained, data, size, arguments.dtype)
    else:
        measured = [measure_trained(trained, data, size)]
    return Evaluated(
        name=str(arguments.run or trained.directory.path),
        step=trained.loaded.step,
        data=arguments.data or f"the test set of {trained.config.dataset.name}",
        samples=len(counted_samples(data)),
        passed_over=dict(data.bad_files),
        device=trained.run.device.type,
        seconds=time.perf_counter() - begun,
        metric=trained.run.task.metric,
        measured=measured,
        saved=None if arguments.data else saved_figure(trained, arguments, exported),
        saved_test_set=""
        if arguments.data or exported
        else last_test_set(trained.directory, trained.loaded.step) or "",
    )


def choose_data(trained: Trained, arguments: Command) -> Dataset:
    """Return the data to measure on: the folder that was named, else the run's own test set."""
    if arguments.data is not None:
        return open_folder(
            trained.config, trained.train_data.spec, Path(arguments.data).expanduser()
        )
    if not isinstance(trained.test_data, AbsentDataset):
        return trained.test_data
    try:
        return build_datasets(trained.config)[1]
    except DataError as error:
        raise DataError(
            f"the run's own test set is not here ({error}); name another folder with --data"
        ) from error


def choose_folder(arguments: Command, trained: Trained, exported: bool) -> Path:
    """Return the folder that is written into, a new one unless it was named. Raises InputOutputError."""
    if arguments.output is not None:
        folder = Path(arguments.output)
        if (folder / "evaluation.json").exists():
            raise InputOutputError(
                f"--output: {folder} has an evaluation.json already; name another folder"
            )
    else:
        root = trained.loaded.path.parent if exported else Path(trained.directory.path)
        stem = trained.loaded.path.stem if exported else f"step-{trained.loaded.step:08d}"
        folder = free_path(root / "evaluations" / stem)
    return folder


def saved_figure(trained: Trained, arguments: Command, exported: bool) -> float | None:
    """Return the metric that training measured at this step, from the checkpoint or the exported file."""
    if not exported:
        value = trained.loaded.manifest.get("metric")
        return float(value) if isinstance(value, int | float) else None
    text = read_about(Path(str(arguments.run))).get("mpt_metric", "")
    try:
        return float(text.rpartition(" ")[2])
    except ValueError:
        return None


def write_files(found: Evaluated, folder: Path, data: Dataset) -> None:
    """Write the record, with further findings of the task, and the page."""
    details = {**found.measured[-1].details, **found.to_record()}
    write_details(folder / "evaluation.json", details, found.step, data)
    write_page(folder, found)


def show(found: Evaluated) -> None:
    """Print the table and the training's figures."""
    console = open_console()
    console.print(
        f"{found.name}, step {found.step}, on {found.data} ({found.samples} samples, {found.device})"
    )
    table = columns("", *(f">{heading}" for heading in found.headings), is_boxed=True)
    for name, *cells in figure_rows(found):
        table.add_row(name, *cells, style="bold" if name == found.metric else None)
    console.print(table)
    for sentence in found.sentences():
        console.print(sentence)
