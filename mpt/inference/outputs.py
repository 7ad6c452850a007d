"""Where `mpt infer` writes and what: grids, tables, single pictures, ways between samples, pictures with their labels.

Nothing is written over silently: the folder in the run takes the next free number, a folder or file that the user named
must be new unless `--overwrite` is given.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from mpt.config.text.messages import few
from mpt.data.pictures.images import grid_of, write_grid
from mpt.errors import ConfigError, InputOutputError
from mpt.foreign.text import csv_cell
from mpt.run.process.files import REMEDIES
from mpt.seams import Batch, Inference

ROWS_SHOWN, LONGEST_SHOWN = 10, 40
"""Rows of the table, and paths of pictures, that are printed too, and the length in letters up to which a value is."""
MOST_PICTURES, PICTURE_SIDE, CAPTION = 64, 128, 26
FRAME_MILLISECONDS = 80


@dataclass(frozen=True)
class Output:
    """The folder, and the one file in it that the user named."""

    folder: Path
    table: Path
    grid: Path
    named: str = ""
    """The name of the one file, without suffix: what is written alongside it begins so, and takes no other's place."""

    def beside(self, name: str) -> Path:
        """Return the path of what accompanies the results."""
        return self.folder / (f"{self.named}-{name}" if self.named else name)


OTHER_FILES = (
    ".json",
    ".jsonl",
    ".txt",
    ".jpg",
    ".jpeg",
    ".webp",
    ".tif",
    ".tiff",
    ".bmp",
    ".gif",
    ".pt",
    ".npy",
    ".mp4",
)
"""What a name must not end with, for it would become a folder of that name."""


def choose_output(wanted: str | None, overwrite: bool, run_folder: Path) -> Output:
    """Return where to write. Raises ConfigError for anything that is there already."""
    if wanted is None:
        folder = run_folder / "inference"
        number = 1
        while not overwrite and folder.exists() and any(folder.iterdir()):
            number += 1
            folder = run_folder / f"inference-{number}"
        return Output(folder, folder / "labels.csv", folder / "samples.png")
    path = Path(wanted)
    if path.suffix.lower() in OTHER_FILES and not path.is_dir():
        raise ConfigError(
            f"--output: {path} is no table (.csv), no picture (.png) and no folder; name one of them."
        )
    is_file = path.suffix.lower() in (".csv", ".png") and not path.is_dir()
    if path.is_file() and not is_file:
        raise ConfigError(
            f"--output: {path} is a file; name a folder, a table (.csv) or a picture (.png)."
        )
    taken = path.exists() if is_file else path.is_dir() and any(path.iterdir())
    if taken and not overwrite:
        raise ConfigError(
            f"--output: {path} {'is there' if is_file else 'holds files'} already; name another, or add --overwrite."
        )
    folder = path.parent if is_file else path
    is_table = is_file and path.suffix.lower() == ".csv"
    return Output(
        folder,
        path if is_table else folder / "labels.csv",
        path if is_file and not is_table else folder / "samples.png",
        path.stem if is_file else "",
    )


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """Make the folder, and remove it and those above it that are new and empty if the work inside fails."""
    new = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = REMEDIES.get(error.errno or 0, error.strerror)
        raise InputOutputError(f"--output: cannot make {folder}: {reason}") from error
    try:
        yield
    except BaseException:
        with suppress(OSError):  # a folder that holds something stays, and those above it
            for one in new:
                one.rmdir()
        raise


def write(
    results: Sequence[Inference],
    files: Sequence[Path],
    output: Output,
    names: Sequence[str],
    classes: Sequence[str] = (),
    top: int = 1,
) -> list[str]:
    """Write grids and tables and return lines that say the files written.

    `files` are the samples' first inputs, `names` what the table calls them; with scores, `top` says how many labels
    each gets (0: the probabilities of all).
    """
    said: list[str] = []
    tiles = [result.tiles for result in results if result.tiles is not None]
    if tiles:
        write_grid(torch.cat([tile.cpu() for tile in tiles]), output.grid, results[0].columns)
        said.append(f"wrote {sum(len(tile) for tile in tiles)} pictures to {output.grid}")
    figures: list[Path] = []
    for stem, picture, columns in name_figures(results, files):
        figures.append(output.folder / f"{stem}.png")
        write_grid(picture, figures[-1], columns)
    said += say_figures(figures, output.folder)
    rows: list[dict[str, Any]] = [
        row for result in results for row in rows_of(result, classes, top)
    ]
    if rows:
        rows = [{"input": name, **row} for name, row in zip(names, rows, strict=True)]
        write_table(rows, output.table)
        said += [show_row(row) for row in rows[:ROWS_SHOWN]]
        said.append(f"wrote {len(rows)} row{'s' if len(rows) > 1 else ''} to {output.table}")
        known = [row for row in rows if "truth" in row]
        if known:
            right = sum(row["label"] == row["truth"] for row in known)
            said.append(
                f"{right} of {len(known)} labels are the true ones ({right / len(known):.1%})"
            )
    return said


def say_figures(written: Sequence[Path], folder: Path) -> list[str]:
    """Return a line for each picture, or one for all if there are many."""
    if len(written) <= ROWS_SHOWN:
        return [f"wrote {path}" for path in written]
    names = few([path.name for path in written], 3)
    return [f"wrote {len(written)} pictures to {folder}: {names}"]


def rows_of(result: Inference, classes: Sequence[str], top: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of one batch, with further labels or all probabilities where they are wanted."""
    for number, row in enumerate(result.rows):
        if result.scores is None or top == 1:
            yield row
            continue
        scores = result.scores[number].float().cpu()
        if top == 0:
            yield {
                **row,
                **{
                    f"p({name})": round(float(p), 6)
                    for name, p in zip(classes, scores, strict=True)
                },
            }
            continue
        ranked = scores.sort(descending=True)
        further: dict[str, Any] = {}
        for rank in range(1, min(top, len(scores))):
            further[f"label_{rank + 1}"] = classes[int(ranked.indices[rank])]
            further[f"probability_{rank + 1}"] = round(float(ranked.values[rank]), 4)
        yield {**row, **further}


def show_row(row: dict[str, Any]) -> str:
    """Return a row of the table as a line, without values that only the table has room for (a VAE's code)."""
    named = [
        f"{name} {value}"
        for name, value in row.items()
        if name != "input" and len(str(value)) <= LONGEST_SHOWN and not name.startswith("p(")
    ]
    return f"{row['input']}: {'  '.join(named)}"


def name_figures(
    results: Sequence[Inference], files: Sequence[Path]
) -> Iterator[tuple[str, Tensor, int | None]]:
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
        with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as stream:
            writer = csv.writer(stream)
            writer.writerow([csv_cell(name) for name in rows[0]])
            writer.writerows([csv_cell(row.get(name, "")) for name in rows[0]] for row in rows)
    except OSError as error:
        raise InputOutputError(f"--output: cannot write {path}: {error.strerror}") from error
    return path


def write_single(results: Sequence[Inference], output: Output) -> str:
    """Write each sample as a file of its own, as large as it was made."""
    tiles = [tile for result in results if result.tiles is not None for tile in result.tiles]
    for number, tile in enumerate(tiles):
        save(as_picture(tile), output.beside(f"sample-{number:04d}.png"))
    return f"wrote {len(tiles)} files {output.beside('sample-0000.png')} to sample-{len(tiles) - 1:04d}.png"


def write_walk(frames_bchw: Tensor, folder: Path, columns: int) -> str:
    """Write a way between samples as a moving picture and as a grid of its frames, a row for each two seeds."""
    # A seed in the middle ends one way and begins the next.
    shown = [frame for number, frame in enumerate(frames_bchw) if number % columns or number == 0]
    pictures = [as_picture(frame, PICTURE_SIDE) for frame in shown]
    try:
        pictures[0].save(
            folder / "walk.gif",
            save_all=True,
            append_images=pictures[1:],
            duration=FRAME_MILLISECONDS,
            loop=0,
        )
    except OSError as error:
        raise InputOutputError(
            f"--output: cannot write {folder / 'walk.gif'}: {error.strerror}"
        ) from error
    write_grid(frames_bchw, folder / "walk.png", columns)
    return f"wrote {folder / 'walk.gif'} ({len(pictures)} frames) and walk.png"


def write_labelled(batch: Batch, results: Sequence[Inference], path: Path) -> str:
    """Write the first inputs as one picture, each with its label below, wrong ones in red."""
    images = next(iter(batch.values())).float()
    rows = [row for result in results for row in result.rows][: len(images)]
    columns = min(8, len(rows))
    cell = PICTURE_SIDE + CAPTION
    canvas = Image.new(
        "RGB",
        (columns * (PICTURE_SIDE + 4) + 4, -(-len(rows) // columns) * (cell + 4) + 4),
        "white",
    )
    draw = ImageDraw.Draw(canvas)
    for number, (row, image) in enumerate(zip(rows, images, strict=False)):
        left, top = 4 + number % columns * (PICTURE_SIDE + 4), 4 + number // columns * (cell + 4)
        canvas.paste(
            as_picture(image, PICTURE_SIDE).convert("RGB").resize((PICTURE_SIDE, PICTURE_SIDE)),
            (left, top),
        )
        text = caption_of(row)
        colour = "#b00020" if "\n" in text else "black"
        draw.multiline_text((left, top + PICTURE_SIDE), text, fill=colour, spacing=1)
    save(canvas, path)
    return f"wrote {path}"


def caption_of(row: Mapping[str, Any]) -> str:
    """Return the words below a picture: label and probability, and in a second line the truth if it is another."""
    label, truth = str(row.get("label", "")), row.get("truth")
    text = ": ".join(str(part) for part in (label[:14], row.get("probability")) if part is not None)
    return text if truth in (None, label) else f"{text}\n(true: {str(truth)[:12]})"


def write_bad(bad: Mapping[str, str], path: Path) -> str:
    """Write which inputs were left out and why."""
    path = write_table([{"input": name, "reason": reason} for name, reason in bad.items()], path)
    name, reason = next(iter(bad.items()))
    return f"left out {len(bad)} bad input{'s' if len(bad) > 1 else ''}, listed in {path}; the first: {name}: {reason}"


def as_picture(tile_chw: Tensor, side: int | None = None) -> Image.Image:
    """Return one image in [0, 1] as a picture, enlarged without smoothing to about `side` pixels."""
    picture = grid_of(tile_chw[None], 1, padding=0)
    height, width = tile_chw.shape[-2:]
    if side is None:
        return picture.resize((width, height), Image.Resampling.NEAREST)
    zoom = max(1, side // max(height, width))
    return picture.resize((width * zoom, height * zoom), Image.Resampling.NEAREST)


def save(picture: Image.Image, path: Path) -> None:
    """Write a PNG. Raises InputOutputError."""
    try:
        picture.save(path)
    except OSError as error:
        raise InputOutputError(f"--output: cannot write {path}: {error.strerror}") from error
