"""`mpt infer`: sample grids from a generator, a table of labels from a classifier, pictures from the others.

Without `--half` and `--dtype` a run infers as it was trained. `--dtype float32` infers in float32, `--dtype float16` or
`bfloat16` under autocast with float32 weights. `--half` stores the weights in half and says what that gained and cost
(`mpt.commands.infer_half`).
"""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpt.commands.arguments import InferArguments
from mpt.data.decoding import EXTENSIONS, decode_image
from mpt.data.images import write_grid
from mpt.data.loader import to_device
from mpt.engine.half import rebuild
from mpt.engine.trained import Trained, open_trained
from mpt.errors import ConfigError, DataError, InputOutputError
from mpt.precision.choice import DTYPES
from mpt.seams import Batch, Inference

SAMPLES = 64
MAX_PIXELS = 100_000_000

Inputs = tuple[Batch | None, int]
"""A batch on the run's device, or None for samples; and the number of samples."""


def run(arguments: InferArguments) -> None:
    """Infer with the named run, the newest by default, and write what it makes.

    Raises DataError for inputs, CheckpointError for runs and InputOutputError for outputs that are none.
    """
    if arguments.batch_size is not None and arguments.batch_size < 1:
        raise ConfigError(f"--batch-size: found {arguments.batch_size}; allowed is 1 or more.")
    files = input_files(arguments.input) if arguments.input else []
    trained = open_trained(arguments.run, Path(arguments.runs), arguments.device or "auto", allow=arguments.allow)
    if files and not getattr(trained.run.task, "takes_inputs", True):
        raise ConfigError(f"--input: {trained.config.model.name} makes images from noise and takes none; leave it out")
    output = Path(arguments.output) if arguments.output else Path(trained.directory.path) / "inference"
    batch_size = arguments.batch_size or trained.config.train.batch_size
    make_folder(output)
    if arguments.half:
        from mpt.commands.infer_half import infer_half

        results = infer_half(trained, files, batch_size, arguments.dtype, output)
    else:
        results = list(infer(in_dtype(trained, arguments.dtype), files, batch_size))
    for line in write(results, files, output):
        print(line)


def in_dtype(trained: Trained, dtype: str | None) -> Trained:
    """Return a trained run that infers in a dtype, with float32 weights. None leaves it as it was trained."""
    if dtype is None:
        return trained
    if dtype not in ("float32", *DTYPES):
        raise ConfigError(f"--dtype: found {dtype!r}; allowed are float32, {', '.join(DTYPES)}.")
    other = rebuild(trained, "fp32") if dtype == "float32" else rebuild(trained, "amp", dtype)
    return dataclasses.replace(trained, run=other)


def infer(trained: Trained, files: Sequence[Path], batch_size: int) -> Iterator[Inference]:
    """Yield the task's inference for each batch of inputs."""
    for inputs in read_inputs(trained, files, batch_size):
        yield infer_one(trained, inputs)


def infer_one(trained: Trained, inputs: Inputs) -> Inference:
    """Return the task's inference for one batch of inputs, with the same random numbers each time."""
    batch, count = inputs
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trained.config.seed)
        result: Inference = trained.run.task.infer(batch, count, trained.config.seed)
        return result


def read_inputs(trained: Trained, files: Sequence[Path], batch_size: int) -> Iterator[Inputs]:
    """Yield batches of the files; without files, of test samples for a task that needs inputs, else a wish for
    samples."""
    run = trained.run
    if not files and needs_inputs(trained):
        data = trained.test_data
        for start in range(0, min(len(data), SAMPLES), batch_size):
            indices = list(range(start, min(start + batch_size, len(data), SAMPLES)))
            yield to_device(data.fetch(indices, 0), run.device), len(indices)
        return
    if not files:
        yield None, SAMPLES
        return
    channels, height, _ = run.data.fields[getattr(run.task, "input_field", "image")].shape
    for start in range(0, len(files), batch_size):
        chosen = files[start : start + batch_size]
        images = [decode_image(file, channels, height, MAX_PIXELS) for file in chosen]
        batch: Batch = {"image": torch.stack(images)}
        yield to_device(batch, run.device), len(chosen)


def needs_inputs(trained: Trained) -> bool:
    """Does the task infer from inputs (labelled, or of a field that it names) rather than make samples?"""
    return hasattr(trained.run.task, "input_field") or (
        "label" in trained.run.data.fields and not hasattr(trained.run.task, "generate")
    )


def input_files(wanted: str) -> list[Path]:
    """Return the image file, or the image files below the folder, sorted. Raises DataError when there is none."""
    path = Path(wanted)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"--input: there is no file or folder {path}")
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in EXTENSIONS)
    if not files:
        raise DataError(f"--input: no images in {path}; looked for {', '.join(EXTENSIONS)}")
    return files


def make_folder(output: Path) -> None:
    """Make the output folder before anything is computed. Raises InputOutputError."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputOutputError(f"--output: cannot make {output}: {error.strerror}") from error


def write(results: Sequence[Inference], files: Sequence[Path], output: Path) -> list[str]:
    """Write grids and tables below `output` and return lines that say what was written."""
    said: list[str] = []
    tiles = [result.tiles for result in results if result.tiles is not None]
    if tiles:
        path = output / "samples.png"
        write_grid(torch.cat([tile.cpu() for tile in tiles]), path, results[0].columns)
        said.append(f"wrote {sum(len(tile) for tile in tiles)} pictures to {path}")
    for stem, picture in name_figures(results, files):
        write_grid(picture, output / f"{stem}.png")
        said.append(f"wrote {output / f'{stem}.png'}")
    rows: list[dict[str, Any]] = [row for result in results for row in result.rows]
    if rows:
        names = [str(file) for file in files] or [f"test sample {index}" for index in range(len(rows))]
        rows = [{"input": name, **row} for name, row in zip(names, rows, strict=True)]
        path = write_table(rows, output / "labels.csv")
        said += [f"{row['input']}: " + "  ".join(str(v) for k, v in row.items() if k != "input") for row in rows[:10]]
        said.append(f"wrote {len(rows)} rows to {path}")
    return said


def name_figures(results: Sequence[Inference], files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield pictures with their file stems. `swap-0001`, of a batch's second input, takes the input's name or
    number."""
    start = 0
    for result in results:
        for stem, picture in result.figures.items():
            numbered = re.fullmatch(r"(.+)-([0-9]{4})", stem)
            if numbered:
                index = start + int(numbered.group(2))
                stem = f"{numbered.group(1)}-{files[index].stem if files else f'{index:04d}'}"
            yield stem, picture
        start += 0 if result.outputs is None else len(result.outputs)


def write_table(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Write rows as CSV."""
    try:
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise InputOutputError(f"--output: cannot write {path}: {error.strerror}") from error
    return path
