"""Faces are redrawn in halves where a batch does not fit, and what a failed attempt held is gone before the next."""

import dataclasses
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mpt.errors import MemoryBudgetError
from mpt.systems.deepfacelab.data.faces.face_files import describe
from mpt.systems.deepfacelab.inference.frames import (
    DRAWN,
    Merging,
    draw_within_memory,
    merge_frames,
    motions_of,
)
from mpt.systems.deepfacelab.inference.merge_options import MergeSettings
from tests.systems.deepfacelab.pixels import arrays

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.mark.parametrize(
    "refusal", ["CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"]
)
def test_a_batch_that_finds_no_memory_is_halved_without_holding_on_to_it(refusal):
    held = []
    kind = torch.OutOfMemoryError if refusal == "CUDA out of memory" else RuntimeError

    def draw(batch):
        assert not any(one() is not None for one in held), (
            "the attempt before this one still holds its memory"
        )
        activation = batch / 2 + 0.05
        held.append(weakref.ref(activation))
        if len(batch) > 2:
            raise kind(refusal)
        held.clear()
        return dict.fromkeys(("swap", "swap_mask", "dst_mask"), activation)

    drawn = draw_within_memory(torch.arange(5.0)[:, None, None, None] / 10, draw)
    assert [float(one.swap[0, 0, 0]) for one in drawn] == pytest.approx(
        [0.05, 0.1, 0.15, 0.2, 0.25]
    )


def test_a_single_face_that_does_not_fit_is_said_and_another_error_is_left_alone():
    def refuse(batch):
        raise RuntimeError("CUDA error: out of memory")

    def fail(batch):
        raise RuntimeError("shapes differ")

    with pytest.raises(MemoryBudgetError, match="single face"):
        draw_within_memory(torch.zeros(3, 1, 1, 1), refuse)
    with pytest.raises(RuntimeError, match="shapes differ"):
        draw_within_memory(torch.zeros(3, 1, 1, 1), fail)


def test_frames_that_are_merged_at_once_come_in_order_and_as_one_by_one():
    stored = arrays("merger_inputs")
    face = dataclasses.replace(
        describe(FIXTURES / "full.jpg"), source_landmarks=stored["one_landmarks"][0]
    )
    frame = torch.from_numpy(np.ascontiguousarray(stored["one_frame_u8"][..., ::-1])).permute(
        2, 0, 1
    )
    shifted = [frame.roll(shift, 1) for shift in range(5)]
    frames = SimpleNamespace(
        read=lambda wanted: ((index, shifted[index]) for index in sorted(wanted))
    )

    def draw(batch):
        return {
            "swap": 1 - batch,
            "swap_mask": batch[:, :1] * 0 + 1,
            "dst_mask": batch[:, :1] * 0 + 1,
        }

    faces = {index: [face, face] for index in (0, 1, 3, 4)}

    def merged(batch_size):
        # which draws random numbers
        merging = Merging(draw, 64, "f", MergeSettings(colours="idt"), batch_size)
        return list(merge_frames(frames, faces, set(range(5)), merging))

    one_by_one, at_once = merged(1), merged(16)
    assert [index for index, _, _ in at_once] == list(range(5))
    for one, other in zip(one_by_one, at_once, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other))
    assert not at_once[2][2].any()
    assert at_once[3][2].any()


def test_faces_are_shown_at_super_resolution_and_nothing_moves_where_a_frame_has_two():
    stored = arrays("merger_inputs")
    face = dataclasses.replace(
        describe(FIXTURES / "full.jpg"), source_landmarks=stored["one_landmarks"][0]
    )
    frame = np.ascontiguousarray(stored["one_frame_u8"][..., ::-1])
    shown = []

    def draw(batch):
        shown.append(batch)
        return {name: batch[:, : 1 + 2 * (name == "swap")] for name in DRAWN}

    for power in (0, 100):
        merging = Merging(
            draw,
            64,
            "f",
            MergeSettings(super_resolution=power, colours="none"),
            1,
            enhance=lambda picture: np.repeat(np.repeat(picture, 4, axis=0), 4, axis=1),
        )
        frames = SimpleNamespace(read=lambda _: [(0, torch.from_numpy(frame).permute(2, 0, 1))])
        assert list(merge_frames(frames, {0: [face]}, {0}, merging))
    assert (shown[0] - shown[1]).abs().max() > 0.05

    further = dataclasses.replace(face, source_landmarks=face.source_landmarks + 9)
    alone = {0: [face], 1: [further], 2: [face]}
    assert set(motions_of(alone, 3)) == {0, 1, 2}
    assert motions_of({**alone, 2: [face, further]}, 3) == {}
