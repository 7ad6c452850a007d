"""Frames of any size through a network of limited memory: padding, tiles with overlap, and what a seam costs.

Tiles overlap by twice the network's margin; in the overlap they are blended by weights that fall linearly to the
tile's edge, so that no step is seen. Motion that leaves a tile is not found in it. `TileDifference` measures at no cost
how far neighbouring tiles are apart there; `seam_error` what tiles change about a frame, for which the whole must fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mpt.systems.dain.nn.networks.flow_net import pad_amount
from mpt.systems.dain.nn.operators.interpolation import Interpolator


@dataclass(frozen=True)
class Span:
    """One tile along one axis: where it begins, and how far it reaches."""

    start: int
    stop: int


@dataclass(frozen=True)
class TileGrid:
    """Tiles of one size that cover a frame."""

    rows: tuple[Span, ...]
    columns: tuple[Span, ...]

    @property
    def count(self) -> int:
        return len(self.rows) * len(self.columns)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of each tile."""
        return self.rows[0].stop - self.rows[0].start, self.columns[0].stop - self.columns[0].start


@dataclass
class TileDifference:
    """How far tiles are from those before them where they overlap, over all that were made."""

    absolute_sum: float = 0.0
    count: int = 0

    def add(self, made: Tensor, total: Tensor, weights_hw: Tensor) -> None:
        """Count a tile (..., h, w) against the weighted sum `total` of what earlier tiles had there, both as shown."""
        known = weights_hw > 0
        before = total[..., known] / weights_hw[known]
        difference = made[..., known].clamp(0, 1) - before.clamp(0, 1)
        self.absolute_sum += float(difference.abs().sum(dtype=torch.float64))
        self.count += difference.numel()

    @property
    def grey_levels(self) -> float:
        """The mean absolute difference, in grey levels; 0 if nothing overlapped."""
        return 255 * self.absolute_sum / max(1, self.count)


def spans_of(size: int, tile: int, overlap: int, multiple: int = 1) -> tuple[Span, ...]:
    """Return as few tiles as cover `size` with at least `overlap` pixels in common, evenly spread.

    All begin at multiples, so that a network that shrinks frames reads the same blocks of pixels in a tile as in the
    whole; the last one is shorter where it would reach beyond the frame.
    """
    if tile >= size:
        return (Span(0, size),)
    count = 1 + -(-(size - tile) // max(1, tile - overlap))
    even = -(-(size - tile) // (count - 1))
    step = max(multiple, min(-(-even // multiple), (tile - overlap) // multiple) * multiple)
    starts = range(0, size - tile + step, step)
    return tuple(Span(start, min(start + tile, size)) for start in starts)


def grid_of_tiles(
    height: int, width: int, tile: tuple[int, int], overlap: int, multiple: int = 1
) -> TileGrid:
    """Return the tiles of a frame for a network that takes multiples."""
    return TileGrid(
        spans_of(height, tile[0], overlap, multiple), spans_of(width, tile[1], overlap, multiple)
    )


def pad_both_sides(image_bchw: Tensor, multiple: int) -> tuple[Tensor, int, int]:
    """Return the frame with its edges repeated to a multiple, half on each side, and the rows and columns added before.

    The smaller half is at the top and left, as DAIN pads.
    """
    height, width = image_bchw.shape[-2:]
    rows, columns = pad_amount(height, multiple), pad_amount(width, multiple)
    top, left = rows // 2, columns // 2
    amount = (left, columns - left, top, rows - top)
    return F.pad(image_bchw, amount, mode="replicate"), top, left


def tiles_of(height: int, width: int, overlap: int, multiple: int) -> Iterator[tuple[int, int]]:
    """Yield heights and widths of ever smaller tiles, the longer side cut first, down to overlap and one multiple."""
    smallest = overlap + multiple
    rows = columns = 1
    while True:
        tile = (
            tile_size(height, rows, overlap, multiple),
            tile_size(width, columns, overlap, multiple),
        )
        yield tile
        if tile[0] <= smallest and tile[1] <= smallest:
            return
        if (tile[0] >= tile[1] and tile[0] > smallest) or tile[1] <= smallest:
            rows += 1
        else:
            columns += 1


def tile_size(size: int, count: int, overlap: int, multiple: int) -> int:
    """Return the side of each of `count` tiles with this overlap, a multiple of the network's."""
    side = -(-(size + (count - 1) * overlap) // count)
    return -(-side // multiple) * multiple


def whole(net: Interpolator, first: Tensor, last: Tensor, time_bn: Tensor) -> Tensor:
    """Return the frames (b, n, 3, h, w) without tiles, as float32."""
    height, width = first.shape[-2:]
    if net.pads_with_zeros:
        padded, top, left = [net.padded(first), net.padded(last)], 0, 0
    else:
        (one, top, left), (other, *_) = (
            pad_both_sides(frame, net.multiple) for frame in (first, last)
        )
        padded = [one, other]
    image, _ = net(*padded, time_bn)
    cut: Tensor = image[..., top : top + height, left : left + width].float()
    return cut


def ramp(span: Span, size: int, overlap: int, like: Tensor) -> Tensor:
    """Return a tile's weights along one axis: 1 inside, falling over the overlap if it has a neighbour."""
    places = torch.arange(span.start, span.stop, device=like.device, dtype=torch.float32)
    weight = torch.ones_like(places)
    if span.start > 0:
        weight = torch.minimum(weight, (places - span.start + 0.5) / overlap)
    if span.stop < size:
        weight = torch.minimum(weight, (span.stop - places - 0.5) / overlap)
    return weight


def tiled(
    net: Interpolator,
    first: Tensor,
    last: Tensor,
    time_bn: Tensor,
    grid: TileGrid,
    overlap: int,
    seams: TileDifference | None = None,
) -> Tensor:
    """Return the frames (b, n, 3, h, w), made tile by tile on the device of `time_bn` and blended where `first` is.

    With both frames on the host a tile is all that the device has to hold. `seams` counts how far tiles are apart.
    """
    device = time_bn.device
    if grid.count == 1:
        return whole(net, first.to(device), last.to(device), time_bn)
    batch, channels, height, width = first.shape
    total = first.new_zeros(batch, time_bn.shape[1], channels, height, width, dtype=torch.float32)
    weights = first.new_zeros(height, width, dtype=torch.float32)
    for row in grid.rows:
        for column in grid.columns:
            window = (..., slice(row.start, row.stop), slice(column.start, column.stop))
            weight = ramp(row, height, overlap, first)[:, None] * ramp(
                column, width, overlap, first
            )
            made = whole(net, first[window].to(device), last[window].to(device), time_bn).to(
                first.device
            )
            if seams is not None:
                seams.add(made, total[window], weights[window])
            total[window] += weight * made
            weights[window] += weight
    return total / weights


def seam_error(
    net: Interpolator, first: Tensor, last: Tensor, grid: TileGrid, overlap: int
) -> float:
    """Return the mean absolute difference of the frames shown, tiled and whole, in grey levels; the whole must fit."""
    device = next(net.parameters()).device
    time = first.new_full((len(first), 1), 0.5, device=device)
    at_once = whole(net, first.to(device), last.to(device), time).to(first.device)
    in_tiles = tiled(net, first, last, time, grid, overlap)
    return float((in_tiles.clamp(0, 1) - at_once.clamp(0, 1)).abs().mean()) * 255
