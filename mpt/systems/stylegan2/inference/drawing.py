"""A generator's pictures as files: one for each seed, a grid, and videos of walks and mixed styles.

A walk goes from style to style on straight lines, and back to the first. A table of mixed styles has the pictures of
the rows' seeds on its left and of the columns' above; in its video the columns walk.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from mpt.data.pictures.images import write_grid
from mpt.data.video.video_writer import VideoWriter
from mpt.errors import ConfigError
from mpt.run.process.files import failures_explained, write_atomically
from mpt.systems.stylegan2.inference.generators import (
    NOISE_MODES,
    Look,
    Painter,
    as_bytes,
    open_painter,
)

FRAMES_PER_SECOND = 30
MOST_SEEDS = 100_000
GRID_OF = 256
"""More pictures than these make no grid."""


@dataclass(frozen=True)
class Wishes:
    """The pictures to draw; seeds and layers as texts such as 0-8,11."""

    seeds: str
    truncation: float = 1.0
    cutoff: int | None = None
    noise: str = "const"
    label: int | None = None
    walk: bool = False
    mix: str | None = None
    mix_layers: str = "0-6"
    frames: int = 60
    batch_size: int = 8


def draw(where: tuple[str, Path, str, bool], folder: Path, wishes: Wishes) -> None:
    """Open a generator and write the pictures. Raises ConfigError for wishes that it cannot fulfil."""
    if wishes.noise not in NOISE_MODES:
        raise ConfigError(f"--noise: found {wishes.noise!r}; allowed are {', '.join(NOISE_MODES)}")
    seeds = numbers_of(wishes.seeds, "--seeds")
    rows, columns = mixed_seeds(wishes.mix)
    layers = numbers_of(wishes.mix_layers, "--mix-layers")
    painter = open_painter(*where)
    if rows and max(layers) >= painter.style_count:
        raise ConfigError(f"--mix-layers: this network has layers 0 to {painter.style_count - 1}")
    with failures_explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_pictures(painter, seeds, folder, wishes)
        if wishes.walk:
            if len(seeds) < 2:
                raise ConfigError("--walk: it needs two seeds at least")
            write_video(folder / "walk.mp4", walk_frames(painter, seeds, wishes))
        if rows:
            table = next(mix_frames(painter, rows, columns, layers, wishes))
            write_picture(table, folder / "mix.png")
            write_video(folder / "mix.mp4", mix_frames(painter, rows, columns, layers, wishes))


def numbers_of(text: str, option: str) -> list[int]:
    """Return the numbers of a text such as 0-8,11. Raises ConfigError."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (
            first.isascii()
            and first.isdigit()
            and (not dash or (last.isascii() and last.isdigit()))
        ):
            raise ConfigError(f"{option}: found {text!r}; write numbers and ranges, 0-8,11")
        ends = int(first), int(last or first)
        if max(ends) >= 2**32 or ends[1] - ends[0] >= MOST_SEEDS:
            raise ConfigError(
                f"{option}: {part.strip()} is more than {MOST_SEEDS} numbers, or beyond 2^32"
            )
        found += range(ends[0], ends[1] + 1)
    if not found:
        raise ConfigError(f"{option}: {text!r} holds no number")
    return found


def mixed_seeds(text: str | None) -> tuple[list[int], list[int]]:
    """Return the seeds of rows and columns."""
    if text is None:
        return [], []
    rows, colon, columns = text.partition(":")
    if not colon:
        raise ConfigError(
            f"--mix: found {text!r}; write the rows' seeds, a colon, and the columns', 85,100:55,821"
        )
    return numbers_of(rows, "--mix"), numbers_of(columns, "--mix")


def look_of(wishes: Wishes) -> Look:
    """Return how styles become pictures."""
    return Look(wishes.truncation, wishes.cutoff, wishes.noise)


def write_pictures(painter: Painter, seeds: list[int], folder: Path, wishes: Wishes) -> None:
    """Write a PNG for each seed, and all as a grid."""
    shown = []
    for start in range(0, len(seeds), wishes.batch_size):
        part = seeds[start : start + wishes.batch_size]
        made = painter.images(
            painter.styles(part, wishes.label), look_of(wishes), wishes.batch_size
        )
        for seed, picture in zip(part, as_bytes(made), strict=True):
            write_picture(picture, folder / f"seed{seed:04d}.png")
        if len(seeds) <= GRID_OF:
            shown.append(made)
    print(f"wrote {len(seeds)} pictures to {folder}")
    if 1 < len(seeds) <= GRID_OF:
        write_grid((torch.cat(shown) + 1) / 2, folder / "grid.png")
        print(f"wrote {folder / 'grid.png'}")


def write_picture(pixels_chw: Tensor, path: Path) -> None:
    """Write one picture of 8 bits as PNG."""
    array = pixels_chw.permute(1, 2, 0).numpy()
    content = io.BytesIO()
    Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array).save(content, "PNG")
    write_atomically(path, content.getvalue(), durable=False)


def walk_styles(style_nld: Tensor, frames: int) -> Iterator[Tensor]:
    """Yield styles (1, layers, d) on the way from each row to the next, and from the last to the first."""
    for number in range(len(style_nld)):
        ends = style_nld[number], style_nld[(number + 1) % len(style_nld)]
        for step in range(frames):
            yield ends[0].lerp(ends[1], step / frames)[None]


def walk_frames(painter: Painter, seeds: list[int], wishes: Wishes) -> Iterator[Tensor]:
    """Yield the pictures of a walk."""
    for style in walk_styles(painter.styles(seeds, wishes.label), wishes.frames):
        yield as_bytes(painter.images(style, look_of(wishes)))[0]


def mix_frames(
    painter: Painter, rows: list[int], columns: list[int], layers: list[int], wishes: Wishes
) -> Iterator[Tensor]:
    """Yield tables of mixed styles, while each column's style walks through those of all columns."""
    look = look_of(wishes)
    of_rows, of_columns = painter.styles(rows, wishes.label), painter.styles(columns, wishes.label)
    lefts = as_bytes(painter.images(of_rows, look, wishes.batch_size))
    steps = wishes.frames * len(columns) if len(columns) > 1 else 1
    for step in range(steps):
        number, share = divmod(step / wishes.frames, 1.0)
        begin, end = (of_columns.roll(-int(number) - ahead, 0) for ahead in (0, 1))
        moved = begin.lerp(end, share)
        tops = as_bytes(painter.images(moved, look, wishes.batch_size))
        mixed = of_rows[:, None].repeat(1, len(columns), 1, 1)
        mixed[:, :, layers] = moved[None, :, layers]
        cells = as_bytes(painter.images(mixed.flatten(0, 1), look, wishes.batch_size))
        yield table_of(tops, lefts, cells)


def table_of(tops: Tensor, lefts: Tensor, cells: Tensor) -> Tensor:
    """Return (c, h, w): pictures above and on the left of the cells that belong to both, row by row."""
    corner = torch.zeros_like(tops[0])
    width = len(tops)
    lines = [torch.cat([corner, *tops], 2)]
    lines += [
        torch.cat([left, *cells[row * width : (row + 1) * width]], 2)
        for row, left in enumerate(lefts)
    ]
    return torch.cat(lines, 1)


def write_video(path: Path, frames: Iterator[Tensor]) -> None:
    """Write frames as H.264, grey ones in three equal colours."""
    count = 0
    with VideoWriter(path, FRAMES_PER_SECOND) as writer:
        for count, frame in enumerate(frames, 1):  # noqa: B007
            writer.write(frame.expand(3, -1, -1) if len(frame) == 1 else frame)
    print(f"wrote {path}: {count} frames, {count / FRAMES_PER_SECOND:.1f} s")
