"""`mpt infer`: sample grids from a generator, a table of labels from a classifier, pictures from the others."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mpt.commands.arguments import InferArguments
from mpt.data.images import IMAGE_SUFFIXES, read_images, write_grid
from mpt.data.loader import to_device
from mpt.engine.trained import Trained, open_trained
from mpt.errors import DataError, InputOutputError
from mpt.seams import Batch, Inference

SAMPLES = 64


def run(arguments: InferArguments) -> None:
    """Infer with the named run, the newest by default, and write what it makes."""
    trained = open_trained(arguments.run, Path(arguments.runs), arguments.device or "auto", allow=arguments.allow)
    output = Path(arguments.output) if arguments.output else Path(trained.directory.path) / "inference"
    files = input_files(arguments.input) if arguments.input else []
    results = list(infer(trained, files, arguments.batch_size or trained.config.train.batch_size))
    for line in write(results, files, output):
        print(line)


def infer(trained: Trained, files: Sequence[Path], batch_size: int) -> Iterator[Inference]:
    """Yield the task's inference for each batch of files, or once for samples where there are no files."""
    run = trained.run
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trained.config.seed)
        if not files and "label" in run.data.fields and not hasattr(run.task, "generate"):
            data = trained.test_data
            for start in range(0, min(len(data), SAMPLES), batch_size):
                indices = list(range(start, min(start + batch_size, len(data), SAMPLES)))
                yield run.task.infer(to_device(data.fetch(indices, 0), run.device), len(indices), trained.config.seed)
            return
        if not files:
            yield run.task.infer(None, SAMPLES, trained.config.seed)
            return
        channels, height, _ = run.data.fields["image"].shape
        for start in range(0, len(files), batch_size):
            chosen = files[start : start + batch_size]
            batch: Batch = {"image": read_images(chosen, height, channels)}
            yield run.task.infer(to_device(batch, run.device), len(chosen), trained.config.seed)


def input_files(wanted: str) -> list[Path]:
    """Return the image file, or the image files below the folder, sorted. Raises DataError when there is none."""
    path = Path(wanted)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"--input: there is no file or folder {path}")
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
    if not files:
        raise DataError(f"--input: no images in {path}; looked for {', '.join(sorted(IMAGE_SUFFIXES))}")
    return files


def write(results: Sequence[Inference], files: Sequence[Path], output: Path) -> list[str]:
    """Write grids and tables below `output` and return lines that say what was written."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputOutputError(f"--output: cannot make {output}: {error.strerror}") from error
    said: list[str] = []
    tiles = [result.tiles for result in results if result.tiles is not None]
    if tiles:
        path = output / "samples.png"
        write_grid(torch.cat([tile.cpu() for tile in tiles]), path, results[0].columns)
        said.append(f"wrote {sum(len(tile) for tile in tiles)} pictures to {path}")
    for result in results:
        for stem, picture in result.figures.items():
            write_grid(picture, output / f"{stem}.png")
            said.append(f"wrote {output / f'{stem}.png'}")
    rows: list[dict[str, Any]] = [row for result in results for row in result.rows]
    if rows:
        path = output / "labels.csv"
        names = [str(file) for file in files] or [f"test sample {index}" for index in range(len(rows))]
        rows = [{"input": name, **row} for name, row in zip(names, rows, strict=True)]
        try:
            with path.open("w", newline="", encoding="utf-8") as stream:
                writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        except OSError as error:
            raise InputOutputError(f"--output: cannot write {path}: {error.strerror}") from error
        said += [f"{row['input']}: " + "  ".join(str(v) for k, v in row.items() if k != "input") for row in rows[:10]]
        said.append(f"wrote {len(rows)} rows to {path}")
    return said
