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
from mpt.commands.infer_half import infer_half
from mpt.commands.infer_inputs import Sample, find_files, infer_one, match_files, read_inputs
from mpt.data.images import write_grid
from mpt.errors import ConfigError, InputOutputError
from mpt.inference.exported import is_export, open_exported
from mpt.inference.half import rebuild
from mpt.inference.trained import Trained, open_trained
from mpt.precision.choice import DTYPES
from mpt.seams import Inference

ROWS_SHOWN, LONGEST_SHOWN = 10, 40
"""Rows of the table that are printed too, and the length in letters up to which a value is."""


def run(arguments: InferArguments) -> None:
    """Infer with the named run, the newest by default, and write what it makes.

    Raises DataError for inputs, CheckpointError for runs and InputOutputError for outputs that are none.
    """
    if arguments.batch_size is not None and arguments.batch_size < 1:
        raise ConfigError(f"--batch-size: found {arguments.batch_size}; allowed is 1 or more.")
    trained, samples = open_with_inputs(arguments)
    output = Path(arguments.output) if arguments.output else Path(trained.directory.path) / "inference"
    batch_size = arguments.batch_size or trained.config.train.batch_size
    make_folder(output)
    if arguments.half:
        results = infer_half(trained, samples, batch_size, arguments.dtype, output)
    else:
        results = list(infer(in_dtype(trained, arguments.dtype), samples, batch_size))
    for line in write(results, [next(iter(sample.values())) for sample in samples], output):
        print(line)


def open_with_inputs(arguments: InferArguments) -> tuple[Trained, list[Sample]]:
    """Return the run that the arguments name, built again, and the inputs that they name."""
    given = find_files(arguments.input)
    wishes = {"task.truncation": arguments.truncation, "seed": arguments.seed}
    overrides = tuple(f"{key}={value}" for key, value in wishes.items() if value is not None)
    if is_export(arguments.run):
        assert arguments.run is not None
        if arguments.half or arguments.dtype:
            raise ConfigError("--half, --dtype: an exported file is taken as it is, in float32; name a run.")
        opened = open_exported(Path(arguments.run), arguments.device or "auto", overrides, arguments.allow)
        return opened, match_files(opened.run.task, opened.config.model.name, given)
    trained = open_trained(
        arguments.run, Path(arguments.runs), arguments.device or "auto", overrides, allow=arguments.allow
    )
    return trained, match_files(trained.run.task, trained.config.model.name, given)


def in_dtype(trained: Trained, dtype: str | None) -> Trained:
    """Return a trained run that infers in a dtype, with float32 weights. None leaves it as it was trained."""
    if dtype is None:
        return trained
    if dtype not in ("float32", *DTYPES):
        raise ConfigError(f"--dtype: found {dtype!r}; allowed are float32, {', '.join(DTYPES)}.")
    other = rebuild(trained, "fp32") if dtype == "float32" else rebuild(trained, "amp", dtype)
    return dataclasses.replace(trained, run=other)


def infer(trained: Trained, samples: Sequence[Sample], batch_size: int) -> Iterator[Inference]:
    """Yield the task's inference for each batch of inputs."""
    for inputs in read_inputs(trained, samples, batch_size):
        yield infer_one(trained, inputs)


def make_folder(output: Path) -> None:
    """Make the output folder before anything is computed. Raises InputOutputError."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputOutputError(f"--output: cannot make {output}: {error.strerror}") from error


def write(results: Sequence[Inference], files: Sequence[Path], output: Path) -> list[str]:
    """Write grids and tables below `output` and return lines that say what was written.

    `files` name the samples: the first input of each.
    """
    said: list[str] = []
    tiles = [result.tiles for result in results if result.tiles is not None]
    if tiles:
        path = output / "samples.png"
        write_grid(torch.cat([tile.cpu() for tile in tiles]), path, results[0].columns)
        said.append(f"wrote {sum(len(tile) for tile in tiles)} pictures to {path}")
    for stem, picture, columns in name_figures(results, files):
        write_grid(picture, output / f"{stem}.png", columns)
        said.append(f"wrote {output / f'{stem}.png'}")
    rows: list[dict[str, Any]] = [row for result in results for row in result.rows]
    if rows:
        names = [str(file) for file in files] or [f"test sample {index}" for index in range(len(rows))]
        rows = [{"input": name, **row} for name, row in zip(names, rows, strict=True)]
        path = write_table(rows, output / "labels.csv")
        said += [show_row(row) for row in rows[:ROWS_SHOWN]]
        said.append(f"wrote {len(rows)} row{'s' if len(rows) > 1 else ''} to {path}")
    return said


def show_row(row: dict[str, Any]) -> str:
    """Return a row of the table as a line, without values that only the table has room for (a VAE's code)."""
    named = [f"{name} {value}" for name, value in row.items() if name != "input" and len(str(value)) <= LONGEST_SHOWN]
    return f"{row['input']}: {'  '.join(named)}"


def name_figures(results: Sequence[Inference], files: Sequence[Path]) -> Iterator[tuple[str, Tensor, int | None]]:
    """Yield pictures with their file stems and columns.

    `swap-0001`, of a batch's second input, takes the input's name or number.
    """
    start = 0
    for result in results:
        for stem, picture in result.figures.items():
            columns = result.figure_columns.get(stem)
            numbered = re.fullmatch(r"(.+)-([0-9]{4})", stem)
            if numbered:
                index = start + int(numbered.group(2))
                stem = f"{numbered.group(1)}-{files[index].stem if files else f'{index:04d}'}"
            yield stem, picture, columns
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
