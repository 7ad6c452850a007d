"""`mpt infer`: sample grids from a generator, a table of labels from a classifier, pictures from the others.

Without `--half` and `--dtype` a run infers as it was trained. `--dtype float32` infers in float32, `--dtype float16` or
`bfloat16` under autocast with float32 weights. `--half` stores the weights in half and reports gain and cost
(`mpt.workflows.inferring.half_compared`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from mpt.commands.cli.arguments import (
    Allow,
    Best,
    Device,
    Newest,
    NewestRun,
    Runs,
    StepOfCheckpoint,
)
from mpt.commands.cli.console import columns, open_console
from mpt.commands.cli.infer_handover import hand_over, is_foreign
from mpt.engine.state.evaluation import inferring
from mpt.errors import ConfigError
from mpt.inference.exported import is_export
from mpt.inference.inputs import (
    SAMPLES,
    Sample,
    names_of,
    needs_inputs,
    read_inputs,
    readable,
    sampler_of,
)
from mpt.inference.opening import in_dtype, open_with_inputs
from mpt.inference.outputs import (
    MOST_PICTURES,
    Output,
    choose_output,
    made,
    write,
    write_bad,
    write_labelled,
    write_single,
    write_walk,
)
from mpt.inference.results import samples_in
from mpt.inference.slices import Work, choose_devices, infer_all
from mpt.inference.trained import Trained
from mpt.report.units import counted
from mpt.run.checkpoints.choice import read_wish
from mpt.seams import Inference, Legend
from mpt.workflows.inferring.half_compared import Statement, infer_half, rows_of, sentences
from mpt.workflows.inferring.inference_batch import choose_batch


@dataclass(frozen=True)
class Command:
    """Run a trained network: samples, labels, boxes or pictures.

    Examples:
      mpt infer
      mpt infer RUN --input pictures --top 3
      mpt infer RUN --half
      mpt infer mine.onnx --input pictures -o labels.csv
    """

    run: NewestRun = None
    """A run, a checkpoint, or an export of mpt convert (.onnx, .safetensors, .pt)."""
    half: bool = False
    """Run in half precision and say how far it is from fp32."""
    dtype: str | None = None
    """float32, float16 or bfloat16; without --half the weights stay float32."""
    input: Annotated[tuple[str, ...], typer.Option(metavar="[NAME=]PATH")] = ()
    """An image or a folder of images; once for each input of the task."""
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FOLDER|FILE.csv|FILE.png")
    ] = None
    """A folder for all that is made, or one file: the table, or the samples. By default inference/ in the run."""
    overwrite: bool = False
    """Overwrite existing files."""
    top: Annotated[int, typer.Option(min=0)] = 1
    """How many labels per image, with probabilities; 0 gives the probabilities of all classes."""
    pictures: bool = False
    """Write the inputs with their labels below them too, labels.png."""
    skip_bad: bool = False
    """Leave out inputs that cannot be read, and list them; the default if the run has dataset.on_bad_image=skip."""
    count: Annotated[int | None, typer.Option(min=1)] = None
    """How many samples: of a generator or of the test set, 64 by default; or the first that many of --input."""
    single: bool = False
    """Write each sample of a generator as a file of its own, sample-0000.png and so on."""
    walk: Annotated[str | None, typer.Option(metavar="SEED:SEED[:...]")] = None
    """Write the way from one seed's sample to the next's too: walk.gif, walk.png."""
    frames: Annotated[int, typer.Option(min=2)] = 16
    """Pictures from seed to seed of a walk."""
    batch_size: Annotated[int | None, typer.Option(min=1)] = None
    """Samples at once."""
    vram: Annotated[str | None, typer.Option(metavar="SIZE")] = None
    """Memory that may be used, such as 4GiB: the batch, or the tiles of frames, are chosen to fit."""
    truncation: Annotated[float | None, typer.Option(min=0, max=1)] = None
    """How far truncated samples go from the mean; 1 is all the way."""
    seed: Annotated[int | None, typer.Option(min=0)] = None
    """The seed of the samples."""
    best: Best = False
    newest: Newest = False
    step: StepOfCheckpoint = None
    nproc: Annotated[int, typer.Option(min=1, metavar="N")] = 1
    """Share out the batches over N processes, a card for each; the output is the same."""
    device: Device = None
    runs: Runs = "runs"
    allow: Allow = ()


@dataclass(frozen=True)
class Prepared:
    """Outputs of a run's inference, and their files."""

    trained: Trained
    samples: list[Sample]
    bad: dict[str, str]
    """Inputs that are left out, with the reasons."""
    output: Output
    devices: list[str]
    opening: dict[str, Any]
    """How other processes open the same run."""
    seeds: list[int]
    """Of a walk."""
    count: int
    batch_size: int

    @property
    def from_noise(self) -> bool:
        """Whether samples are made and nothing is read."""
        return not self.samples and not needs_inputs(self.trained.run.task)


def run(arguments: Command) -> None:
    """Infer with the named run, the newest finished one by default, and write its result.

    Raises DataError for inputs, CheckpointError for runs and InputOutputError for outputs that are none.
    """
    check_options(arguments)
    if hand_over(arguments):
        return
    prepared = prepare(arguments)
    with made(prepared.output.folder):
        infer_and_write(prepared, arguments)


def infer_and_write(prepared: Prepared, arguments: Command) -> None:
    """Infer, write the results and print their paths."""
    begun = time.perf_counter()
    if arguments.half:
        results, statement = infer_half(
            prepared.trained,
            prepared.samples,
            prepared.batch_size,
            prepared.count,
            arguments.dtype,
            prepared.output.folder,
        )
        print_statement(statement)
    else:
        prepared = replace(prepared, trained=in_dtype(prepared.trained, arguments.dtype))
        results = infer_all(prepared.trained, work_of(prepared, arguments), prepared.devices)
    seconds = time.perf_counter() - begun
    count = sum(samples_in(result) for result in results)
    write_all(prepared, arguments, results, count)
    if not arguments.half:
        rate = count / max(seconds, 1e-9)
        pace = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
        print(f"{counted(count, 'sample')} in {seconds:.2f} s ({pace} per second)")


def check_options(arguments: Command) -> None:
    """Raise ConfigError for options that do not go together, before anything is opened."""
    if arguments.batch_size is not None and arguments.batch_size < 1:
        raise ConfigError(f"--batch-size: found {arguments.batch_size}; allowed is 1 or more.")
    if arguments.batch_size is not None and arguments.vram is not None:
        raise ConfigError("--vram chooses the batch; leave out --batch-size")
    if arguments.half and arguments.nproc > 1:
        raise ConfigError("--half: it compares two precisions on one card; leave out --nproc")
    if arguments.frames != Command.frames and arguments.walk is None:
        raise ConfigError("--frames: the pictures of a walk; name its seeds too, --walk 3:17")
    if arguments.vram is not None and not is_foreign(arguments.run) and is_export(arguments.run):
        raise ConfigError("--vram: a batch is chosen for a run's networks; name a run.")


def prepare(arguments: Command) -> Prepared:
    """Open the run and its inputs, and choose the batch and the output folder."""
    seeds = walk_seeds(arguments.walk)
    devices = choose_devices(arguments.device, arguments.nproc)
    opening: dict[str, Any] = {
        "wanted": arguments.run,
        "as_trained": not (arguments.half or arguments.dtype),
        "truncation": arguments.truncation,
        "seed": arguments.seed,
        "runs": Path(arguments.runs),
        "allow": arguments.allow,
        "which": read_wish(best=arguments.best, newest=arguments.newest, step=arguments.step),
    }
    trained, samples = open_with_inputs(**opening, inputs=arguments.input, device=devices[0])
    if not is_export(arguments.run):  # not one that is written meanwhile
        opening["wanted"], opening["which"] = str(trained.loaded.path), None
    samples = samples[: arguments.count]
    if (arguments.single or seeds) and (samples or needs_inputs(trained.run.task)):
        raise ConfigError("this task makes no samples from noise: leave out --single and --walk")
    of_labels = arguments.top != Command.top or arguments.pictures or arguments.skip_bad
    if of_labels and not (samples or needs_inputs(trained.run.task)):
        raise ConfigError(
            "this task makes samples from noise: leave out --top, --pictures and --skip-bad"
        )
    output = choose_output(arguments.output, arguments.overwrite, Path(trained.directory.path))
    samples, bad = readable(trained, samples, arguments.skip_bad)
    count = arguments.count or SAMPLES
    batch_size = arguments.batch_size or trained.config.train.batch_size
    if arguments.vram is not None:
        wanted = len(samples) or count
        batch_size = choose_batch(trained, arguments.vram, arguments.half, arguments.dtype, wanted)
    return Prepared(trained, samples, bad, output, devices, opening, seeds, count, batch_size)


def work_of(prepared: Prepared, arguments: Command) -> Work:
    """Return the work that the processes share."""
    numbered = prepared.from_noise and bool(arguments.count or arguments.single or arguments.vram)
    return Work(
        prepared.samples,
        prepared.batch_size,
        prepared.count,
        numbered,
        arguments.truncation,
        arguments.dtype,
        prepared.opening,
    )


def write_all(
    prepared: Prepared, arguments: Command, results: Sequence[Inference], made: int
) -> None:
    """Write everything that was asked for, and print the paths."""
    trained, samples, output = prepared.trained, prepared.samples, prepared.output
    task = trained.run.task
    names = names_of(trained, samples, made)
    files = [next(iter(sample.values())) for sample in samples]
    for line in write(results, files, output, names, trained.run.data.classes, arguments.top):
        print(line)
    if samples and isinstance(task, Legend) and task.inputs_note is not None:
        print(task.inputs_note.replace("RUN", str(trained.directory.path)))
    if arguments.single and prepared.from_noise:
        print(write_single(results, output))
    if prepared.seeds:
        with torch.no_grad(), inferring(trained.run):
            walked = sampler_of(task).walk(prepared.seeds, arguments.frames)
            print(write_walk(walked, output.folder, arguments.frames))
    if arguments.pictures and any(result.rows for result in results):
        shown = next(iter(read_inputs(trained, samples, min(made, MOST_PICTURES), prepared.count)))[
            0
        ]
        assert shown is not None
        print(write_labelled(shown, results, output.beside("labels.png")))
    if prepared.bad:
        print(write_bad(prepared.bad, output.beside("skipped.csv")))


def walk_seeds(text: str | None) -> list[int]:
    """Return the seeds of a walk, two or more. Raises ConfigError."""
    if text is None:
        return []
    parts = text.split(":")
    if len(parts) < 2 or not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(
            f"--walk: found {text!r}; write seeds with colons between, 3:17 or 3:17:5."
        )
    return [int(part) for part in parts]


def print_statement(statement: Statement) -> None:
    """Print gains and costs of half precision."""
    console = open_console()
    table = columns(
        "", f">{statement.full.name}", f">{statement.half.name}", ">ratio", is_boxed=True
    )
    for row in rows_of(statement):
        table.add_row(*row)
    console.print(table)
    for sentence in sentences(statement):
        console.print(sentence)
