"""Cuts in the dark, fast pans that are none, and frames that repeat the one before."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mpt.systems.dain.data.shared.duplicates import MOST_HELD, distinct_frames, is_repeat
from mpt.systems.dain.data.shared.scene_cuts import is_cut, similarity, thumbnail

from ...inference.clips import draw_texture


def frame(seed: int, light: float = 1.0, shift: int = 0) -> Tensor:
    """Return 96 x 160 of a scene, uint8, with noise."""
    grain = np.random.default_rng([seed, shift]).normal(0, 0.004, (96, 160, 3))
    seen = draw_texture(seed, 96, 240)[:, shift : shift + 160] * light + grain
    return torch.from_numpy((seen.clip(0, 1) * 255).round().astype(np.uint8)).permute(2, 0, 1)


@pytest.mark.parametrize("light", [1.0, 0.08, 0.04])
def test_a_cut_is_found_at_any_brightness(light):
    assert all(
        is_cut(thumbnail(frame(seed, light)), thumbnail(frame(seed + 1, light)))
        for seed in range(6)
    )


@pytest.mark.parametrize("share", [0.04, 0.11, 0.25])
def test_a_fast_pan_is_no_cut(share):
    pans = [
        (thumbnail(frame(seed)), thumbnail(frame(seed, shift=round(160 * share))))
        for seed in range(6)
    ]
    assert not any(is_cut(*pan) for pan in pans)


def test_black_is_another_scene_than_a_picture_and_no_other_than_black():
    black = thumbnail(torch.zeros(3, 96, 160, dtype=torch.uint8))
    assert is_cut(black, thumbnail(frame(0)))
    assert not is_cut(black, black)
    assert not is_cut(black, thumbnail(frame(0)), threshold=0)
    assert similarity(thumbnail(frame(0)), thumbnail(frame(0))) == pytest.approx(1)


def test_sixteen_bits_are_the_same_scene_as_eight():
    shallow = frame(0)
    assert similarity(thumbnail(shallow), thumbnail(shallow.int() * 257)) == pytest.approx(1)


def test_a_repeat_differs_by_noise_alone():
    still, moved = draw_texture(1, 96, 160), draw_texture(1, 96, 161)[:, 1:]
    one, other = (
        torch.from_numpy((image * 255).astype(np.uint8)).permute(2, 0, 1)
        for image in (still, moved)
    )
    assert is_repeat(one, one.clone())
    assert not is_repeat(one, other)
    patch = one.clone()
    patch[:, 40:44, 40:44] = 255 - patch[:, 40:44, 40:44]
    assert not is_repeat(one, patch)


@pytest.mark.parametrize(
    ("frames", "wanted"),
    [
        ("aabbcc", ["a+1", "b+1", "c", "c"]),
        ("abc", ["a", "b", "c"]),
        ("aaB", ["a", "a", "B"]),  # a capital letter begins another scene
        ("a" * (MOST_HELD + 1) + "b", [f"a+{MOST_HELD}", "b"]),
        ("a" * (MOST_HELD + 3) + "b", ["a"] * (MOST_HELD + 3) + ["b"]),
        ("", []),
    ],
)
def test_repeats_are_left_out_but_not_before_a_cut_or_where_a_picture_is_held(frames, wanted):
    found = distinct_frames(
        iter(frames), lambda one, other: one == other, lambda one, other: other.isupper()
    )
    assert [
        f"{one.frame}+{len(one.repeats)}" if one.repeats else one.frame for one in found
    ] == wanted
