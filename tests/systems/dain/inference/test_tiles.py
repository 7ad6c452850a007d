"""How near tiles of published RIFE are to the whole frame, at seams and away from them, and at a `--scale`."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from mpt.systems.dain.inference.tiles import TileGrid, grid_of_tiles, spans_of, tiled, whole
from mpt.systems.dain.nn.rife_published.networks import PublishedRife

from ..nn.rife_published.rife_formula import network
from .clips import draw_texture

SHARE = 0.1
"""Of the last layers' weights: motion of some pixels, as trained networks find it, instead of tens."""


def moved(height: int, width: int, pixels: int = 6) -> tuple[Tensor, Tensor]:
    """Return two frames of a pan."""
    picture = (
        torch.from_numpy(draw_texture(1, height, width + pixels)).permute(2, 0, 1)[None].float()
    )
    return picture[..., :width].contiguous(), picture[..., pixels:].contiguous()


def calm(version: str, scale: float = 1.0) -> PublishedRife:
    """Return a network of formula weights whose flows are small."""
    net = network(version)
    for name, parameter in net.named_parameters():
        if "lastconv" in name:
            parameter.data.mul_(SHARE)
    net.use_scale(scale)
    return net


def in_overlaps(grid: TileGrid, height: int, width: int) -> Tensor:
    """Return which pixels more than one tile has."""
    count = torch.zeros(height, width)
    for row in grid.rows:
        for column in grid.columns:
            count[row.start : row.stop, column.start : column.stop] += 1
    return count > 1


@pytest.mark.parametrize("size", range(200, 460, 37))
@pytest.mark.parametrize(
    ("tile", "overlap", "multiple"), [(160, 64, 32), (192, 128, 64), (128, 64, 1), (512, 128, 256)]
)
def test_tiles_begin_at_multiples_overlap_enough_and_cover_all(size, tile, overlap, multiple):
    spans = spans_of(size, tile, overlap, multiple)
    assert spans[0].start == 0
    assert spans[-1].stop == size
    assert all(span.start % multiple == 0 and span.stop - span.start <= tile for span in spans)
    assert all(one.stop - other.start >= overlap for one, other in pairwise(spans))


@pytest.mark.parametrize(("scale", "away", "at_seams"), [(1.0, 0.2, 1.2), (0.5, 3.0, 5.0)])
def test_tiles_are_the_whole_frame_but_for_what_they_do_not_see(scale, away, at_seams):
    """Mean differences in grey levels, where the network moves pixels by 5 to 8 levels; of 192 pixels the coarsest
    block sees 6 in a row, at half the scale 3."""
    height, width, side = 160, 340, 192
    # half of the command's, so that the tiles are of a test's size
    net, overlap = calm("4.6", scale), 64
    first, last = moved(height, width)
    time = torch.full((1, 1), 0.5)
    grid = grid_of_tiles(height, width, (side, side), overlap, net.multiple)
    with torch.no_grad():
        exact = whole(net, first, last, time).clamp(0, 1)
        made = tiled(net, first, last, time, grid, overlap).clamp(0, 1)
    assert float((exact - (first + last)[:, None] / 2).abs().mean()) * 255 > 4  # it does something
    difference, seams = (made - exact).abs().mean((0, 1, 2)) * 255, in_overlaps(grid, height, width)
    assert float(difference[~seams].mean()) < away
    assert float(difference[seams].mean()) < at_seams
