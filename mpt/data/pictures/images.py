"""Image files out: grids of tiles as PNG."""

from __future__ import annotations

import io
import math
from pathlib import Path

from PIL import Image
from torch import Tensor

from mpt.errors import InputOutputError
from mpt.run.process.files import write_atomically

SMALLEST_TILE = 64


def grid_of(tiles_bchw: Tensor, columns: int | None = None, padding: int = 2) -> Image.Image:
    """Return tiles in [0, 1] with 1, 3 or 4 (alpha) channels side by side.

    Tiny ones are enlarged without smoothing so that a person can see them.
    """
    tiles = tiles_bchw.detach().float().cpu().clamp(0, 1)
    count, channels, height, width = tiles.shape
    if channels == 1:
        channels, tiles = 3, tiles.expand(-1, 3, -1, -1)
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    zoom = max(1, SMALLEST_TILE // max(height, width)) if count <= 100 else 1
    tiles = tiles.repeat_interleave(zoom, 2).repeat_interleave(zoom, 3)
    cell_h, cell_w = height * zoom + padding, width * zoom + padding
    canvas = tiles.new_ones(channels, rows * cell_h + padding, columns * cell_w + padding)
    for index, tile in enumerate(tiles):
        top, left = (index // columns) * cell_h + padding, (index % columns) * cell_w + padding
        canvas[:, top : top + height * zoom, left : left + width * zoom] = tile
    return Image.fromarray((canvas * 255).round().byte().permute(1, 2, 0).numpy())


def write_grid(
    tiles_bchw: Tensor, path: Path, columns: int | None = None, follow_folder: bool = True
) -> None:
    """Write tiles as one PNG, whole or not at all. Raises InputOutputError when the file cannot be written.

    A link under the file's name is replaced; with `follow_folder=False` a folder that is a link is an error.
    """
    content = io.BytesIO()
    grid_of(tiles_bchw, columns).save(content, "PNG")
    try:
        path.parent.mkdir(parents=follow_folder, exist_ok=True)
    except OSError as error:
        raise InputOutputError(
            f"{path}: cannot write the picture: {error.strerror or error}"
        ) from error
    write_atomically(path, content.getvalue(), durable=False, follow_folder=follow_folder)
