"""Large pictures in tiles: each object once and whole, wherever tiles meet."""

import itertools

import torch
from torch import Tensor

from mpt.systems.yolofuse.metrics.shared.suppression import Suppression, suppress_batch
from mpt.systems.yolofuse.tasks.shared import tiles
from mpt.systems.yolofuse.tasks.shared.tiles import (
    BORDER,
    look_in_tiles,
    shown_part,
    starts,
    tiles_of,
)

TILE = (64, 64)
LIKELY, UNLIKELY = 0.9, 0.001


def rectangles(pictures: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Detect what is bright: a detector that sees exactly what lies in its tile, each value being one object."""
    boxes, scores = (
        torch.zeros(len(pictures[0]), 40, 4),
        torch.full((len(pictures[0]), 40, 1), UNLIKELY),
    )
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
            top, left = (
                26 * row + 1 + int(torch.randint(12, (), generator=generator)),
                26 * column + 2,
            )
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


def test_an_object_a_little_larger_than_the_overlap_is_kept_by_the_tile_that_has_the_whole() -> (
    None
):
    picture = torch.full((1, 1, 64, 100), 0.1)
    picture[0, 0, 20:40, 32:64] = (
        0.9  # tiles begin at 0 and 36: it ends at the first one's border, 28 before that of both
    )
    assert found_in(picture, 0.25).tolist() == [[32, 20, 64, 40]]


def test_places_are_chosen_by_their_likeliest_class_and_a_crowd_in_a_tile_stays(
    monkeypatch,
) -> None:
    picture = torch.full((1, 1, 64, 64), 0.1)
    for number in range(36):
        top, left = divmod(number, 6)
        picture[0, 0, 10 * top + 1 : 10 * top + 7, 10 * left + 1 : 10 * left + 7] = (
            0.51 + 0.01 * number
        )
    assert len(found_in(picture, 0.25)) == 36
    monkeypatch.setattr(tiles, "PLACES_OF_TILE", 36)

    def second_class(pictures: list[Tensor]) -> tuple[Tensor, Tensor]:
        boxes, scores = rectangles(pictures)
        order = list(range(39, -1, -1))  # the unlikely places first
        return boxes[:, order], torch.cat([(scores < 0.5) * UNLIKELY, scores * (scores > 0.5)], 2)[
            :, order
        ]

    _, scores = look_in_tiles(second_class, [picture], TILE, 0.25)
    assert int((scores[0, :, 1] > 0.5).sum()) == 36


def test_a_picture_narrower_than_a_tile_is_looked_at_in_the_middle_of_it() -> None:
    canvas = torch.full((1, 3, 200, 200), BORDER)
    canvas[..., 90:110, 20:180] = 0.1
    assert shown_part([canvas], TILE) == (68, 20, 64, 160)  # 20 rows, 22 of border before and after
