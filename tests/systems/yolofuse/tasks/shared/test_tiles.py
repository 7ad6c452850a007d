"""Large pictures in tiles: each object once and whole, wherever tiles meet."""

import itertools

import torch
from torch import Tensor

from mpt.systems.yolofuse.metrics.shared.suppression import Suppression, suppress_batch
from mpt.systems.yolofuse.tasks.shared.tiles import BORDER, look_in_tiles, starts, tiles_of

TILE = (64, 64)
LIKELY, UNLIKELY = 0.9, 0.001


def rectangles(pictures: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Detect what is bright: a detector that sees exactly what lies in its tile, each value being one object."""
    boxes, scores = torch.zeros(len(pictures[0]), 40, 4), torch.full((len(pictures[0]), 40, 1), UNLIKELY)
    for number, picture in enumerate(pictures[0]):
        for place, value in enumerate(picture[picture > 0.5].unique().tolist()):
            rows, columns = (picture[0] == value).nonzero().unbind(1)
            sides = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
            boxes[number, place] = torch.tensor([float(side) for side in sides])
            scores[number, place] = LIKELY
    return boxes, scores


def found_in(picture: Tensor, overlap: float) -> Tensor:
    boxes, scores = look_in_tiles(rectangles, [picture], TILE, overlap)
    kept = suppress_batch(boxes, scores, Suppression())[0]
    return kept[kept[:, 4] > 0.5, :4]


def test_tiles_cover_a_canvas_evenly_and_overlap_by_the_share_at_least() -> None:
    assert starts(64, 64, 0.25) == [0]
    assert starts(100, 64, 0.25) == [0, 36]
    for length in (65, 128, 300, 1001):
        places = starts(length, 64, 0.25)
        assert places[0] == 0
        assert places[-1] == length - 64
        assert all(0 < after - before <= 48 for before, after in itertools.pairwise(places))
    tile = list(tiles_of((100, 200), TILE, 0.25))[1]
    assert tile.overlaps[1] == 0
    assert tile.overlaps[3] == 28


def test_each_object_is_found_once_and_whole_wherever_tiles_meet() -> None:
    generator = torch.Generator().manual_seed(0)
    picture = torch.full((1, 1, 160, 240), 0.1)
    wanted = []
    for row in range(6):
        for column in range(9):
            height, width = (5 + int(n) for n in torch.randint(7, (2,), generator=generator))
            top, left = 26 * row + 1 + int(torch.randint(12, (), generator=generator)), 26 * column + 2
            picture[0, 0, top : top + height, left : left + width] = 0.51 + 0.008 * len(wanted)
            wanted.append([left, top, left + width, top + height])
    found = found_in(picture, 0.4)
    assert sorted(found.tolist()) == sorted([[float(side) for side in box] for box in wanted])


def test_parts_of_cut_objects_would_be_found_without_overlap() -> None:
    picture = torch.full((1, 1, 64, 128), 0.1)
    picture[0, 0, 20:30, 55:70] = 0.8
    assert len(found_in(picture, 0.0)) == 2
    assert found_in(picture, 0.4).tolist() == [[55, 20, 70, 30]]


def test_border_around_a_picture_is_not_looked_at() -> None:
    looked = []

    def count(pictures: list[Tensor]) -> tuple[Tensor, Tensor]:
        looked.append(len(pictures[0]))
        return rectangles(pictures)

    picture = torch.full((2, 1, 256, 256), BORDER)
    picture[0, 0, 40:140, 100:130] = 0.1
    picture[0, 0, 100:110, 104:112] = 0.8
    boxes, scores = look_in_tiles(count, [picture], TILE, 0.25)
    assert looked == [2, 1]  # of a picture of 100 x 30, two tiles; of nothing, one
    assert boxes[0, scores[0, :, 0] > 0.5].tolist() == [[104, 100, 112, 110]]
    assert boxes.shape[:2] == scores.shape[:2]
    assert float(scores[1].max()) == torch.tensor(UNLIKELY)
