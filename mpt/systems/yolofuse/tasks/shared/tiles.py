"""A picture that is larger than the network's input, looked at in tiles that overlap (`dataset.canvas`).

An object at the border of a tile is seen in part there and whole in the next tile, if it is smaller than the overlap.
Its part is left out: suppression would keep both, since they overlap little. Objects larger than the overlap may be
found in parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

TILES_AT_ONCE = 8
PLACES_OF_TILE, PLACES = 1_000, 10_000
"""The best places that are kept of a tile and of a picture."""
TOUCH = 4.0
"""How near to a border, in pixels, a box is taken for one that the border cuts."""
BORDER = 114 / 255
"""The grey of letterboxing around a picture."""

Look = Callable[[list[Tensor]], tuple[Tensor, Tensor]]
"""From pictures (b, c, h, w) of the input's size to boxes (b, p, 4) in pixels and scores (b, p, classes)."""


class Tile(NamedTuple):
    """The start of a tile, and its overlap with the one before and after it; 0 at the canvas's ends."""

    left: int
    top: int
    overlaps: tuple[int, int, int, int]
    """At its left, top, right and bottom border."""


def starts(length: int, tile: int, overlap: float) -> list[int]:
    """Return starts of tiles that cover a length evenly and overlap by this share at least."""
    if length <= tile:
        return [0]
    count = math.ceil((length - tile) / max(1.0, tile * (1 - overlap))) + 1
    return [round(number * (length - tile) / (count - 1)) for number in range(count)]


def tiles_of(size: tuple[int, int], tile: tuple[int, int], overlap: float) -> Iterator[Tile]:
    """Yield the tiles of a canvas; both sizes are height and width."""
    rows, columns = (starts(length, side, overlap) for length, side in zip(size, tile, strict=True))

    def common(places: Sequence[int], number: int, side: int) -> tuple[int, int]:
        before = places[number - 1] + side - places[number] if number else 0
        after = places[number] + side - places[number + 1] if number + 1 < len(places) else 0
        return before, after

    for row, top in enumerate(rows):
        above, below = common(rows, row, tile[0])
        for column, left in enumerate(columns):
            before, after = common(columns, column, tile[1])
            yield Tile(left, top, (before, above, after, below))


def cut_off(boxes_p4: Tensor, tile: Tile, height: int, width: int) -> Tensor:
    """Return which boxes (p, 4) of a tile, in its pixels, its border cuts while another tile has the whole."""
    left, top, right, bottom = boxes_p4.unbind(1)
    near_and_deep = (
        *((left, right), (top, bottom)),
        *((width - right, width - left), (height - bottom, height - top)),
    )
    cut = torch.zeros_like(left, dtype=torch.bool)
    for overlap, (near, deep) in zip(tile.overlaps, near_and_deep, strict=True):
        if overlap:
            cut |= (near < TOUCH) & (deep < overlap - 2 * TOUCH)
    return cut


def look_in_tiles(
    look: Look, pictures: list[Tensor], size: tuple[int, int], overlap: float
) -> tuple[Tensor, Tensor]:
    """Return the best boxes (b, n, 4) in pixels of the canvases and their scores (b, n, classes); 0 is padding."""
    found = [
        look_at_one(look, [one[n : n + 1] for one in pictures], size, overlap)
        for n in range(len(pictures[0]))
    ]
    return torch.stack([boxes for boxes, _ in found]), torch.stack([scores for _, scores in found])


def look_at_one(
    look: Look, pictures: list[Tensor], size: tuple[int, int], overlap: float
) -> tuple[Tensor, Tensor]:
    """Return the best boxes (n, 4) of one canvas and their scores."""
    height, width = size

    def window(picture: Tensor, tile: Tile) -> Tensor:
        return picture[..., tile.top : tile.top + height, tile.left : tile.left + width]

    top, left, rows, columns = shown_part(pictures, size)
    tiles = [
        tile._replace(left=tile.left + left, top=tile.top + top)
        for tile in tiles_of((rows, columns), size, overlap)
    ]
    all_boxes, all_scores = [], []
    for start in range(0, len(tiles), TILES_AT_ONCE):
        chosen = tiles[start : start + TILES_AT_ONCE]
        boxes, scores = look(
            [torch.cat([window(picture, tile) for tile in chosen]) for picture in pictures]
        )
        for tile, own, own_scores in zip(chosen, boxes, scores, strict=True):
            own_scores = own_scores.float() * ~cut_off(own, tile, height, width)[:, None]
            best = own_scores.amax(1).topk(min(PLACES_OF_TILE, len(own))).indices
            all_boxes.append(
                own[best].float() + own.new_tensor([tile.left, tile.top] * 2, dtype=torch.float32)
            )
            all_scores.append(own_scores[best])
    boxes, scores = torch.cat(all_boxes), torch.cat(all_scores)
    best = scores.amax(1).topk(min(PLACES, len(boxes))).indices
    padding = (0, 0, 0, PLACES - len(best))
    return functional.pad(boxes[best], padding), functional.pad(scores[best], padding)


def shown_part(pictures: Sequence[Tensor], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return top, left, height and width of the picture on a canvas, at least those of a tile.

    The border around it is not looked at: next to a dark picture it resembles objects.
    """
    found = []
    for place, dimensions in ((2, (0, 1, 3)), (3, (0, 1, 2))):
        differs = torch.stack(
            [((one - BORDER).abs() > 1e-3).amax(dimensions) for one in pictures]
        ).any(0)
        places = differs.nonzero()[:, 0]
        first, last = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
        tile, canvas = size[place - 2], pictures[0].shape[place]
        length = min(max(last - first, tile), canvas)
        middle = first - max(0, length - (last - first)) // 2
        found.append((min(max(middle, 0), canvas - length), length))
    (top, rows), (left, columns) = found
    return top, left, rows, columns
