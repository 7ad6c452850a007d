"""Faces go back to where they came from: what is put back whole is what was cut out."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from mpt.systems.deepfacelab.data.face_files import describe, open_image
from mpt.systems.deepfacelab.data.face_geometry import face_matrix, invert
from mpt.systems.deepfacelab.data.resampling import cut
from mpt.systems.deepfacelab.inference.merging import (
    Drawn,
    MergeSettings,
    choose_mask,
    cut_face,
    merge_face,
    sharpened,
    spread,
    work_on_edges,
)

FIXTURES = Path(__file__).parents[1] / "fixtures"
SIZE = 64


@pytest.fixture(scope="module")
def face():
    return describe(FIXTURES / "full.jpg")


@pytest.fixture(scope="module")
def frame(face):
    picture = torch.from_numpy(np.array(open_image(face.read(), "face").convert("RGB"))).permute(2, 0, 1).float() / 255
    return cut(picture, invert(face.source_matrix), (720, 800), "bicubic", "border").clamp(0, 1)


def drawn(swap, mask=1.0):
    return Drawn(swap, torch.full((1, SIZE, SIZE), mask), torch.full((1, SIZE, SIZE), mask))


def psnr(one, two):
    return -10 * torch.log10((one - two).square().mean()).item()


def test_a_face_put_back_as_it_was_cut_leaves_the_frame(face, frame):
    same = drawn(cut_face(frame, face, SIZE, "f"))
    for settings in (MergeSettings(raw=True), MergeSettings(mask="dst", colours="rct"), MergeSettings(mask="full")):
        merged, covered = merge_face(frame, face, same, "f", settings, 0)
        assert covered.sum() > 1000
        assert psnr(merged, frame) > 30
        outside = covered[0] == 0
        assert torch.equal(merged[:, outside], frame[:, outside])


def test_the_swap_lies_on_the_face(face, frame):
    red = torch.zeros(3, SIZE, SIZE)
    red[0] = 1
    merged, covered = merge_face(frame, face, drawn(red), "f", MergeSettings(mask="full", colours="none"), 0)
    left, top = face.source_landmarks.min(axis=0).astype(int)
    right, bottom = face.source_landmarks.max(axis=0).astype(int)
    inside = merged[:, top:bottom, left:right]
    torch.testing.assert_close(inside, torch.tensor([1.0, 0, 0])[:, None, None].expand_as(inside), atol=1e-3, rtol=0)
    assert covered.sum() < covered.numel()


def test_masks_are_what_their_names_say(face):
    ours = Drawn(torch.zeros(3, SIZE, SIZE), torch.full((1, SIZE, SIZE), 0.5), torch.full((1, SIZE, SIZE), 0.8))
    values = {mode: choose_mask(face, ours, "f", mode).mean().item() for mode in ("full", "learned-prd", "learned-dst")}
    assert values == pytest.approx({"full": 1.0, "learned-prd": 0.5, "learned-dst": 0.8})
    assert choose_mask(face, ours, "f", "learned").mean() == pytest.approx(0.4)
    assert choose_mask(face, ours, "f", "learned-sum").mean() == 1
    hull = choose_mask(face, ours, "f", "dst")
    assert 0.2 < hull.mean() < 0.8
    painted = describe(FIXTURES / "wf_xseg.jpg")
    mask = choose_mask(painted, ours, "wf", "xseg")
    assert mask[0, SIZE // 2 + 2, SIZE // 2] == 0 < mask[0, SIZE // 3, SIZE // 2]
    torch.testing.assert_close(choose_mask(painted, ours, "wf", "learned-xseg"), mask * 0.4)
    smaller = choose_mask(painted, ours, "f", "xseg")
    assert smaller.mean() > mask.mean()


def test_edges_shrink_grow_and_fade():
    mask = torch.zeros(1, SIZE, SIZE)
    mask[:, 16:48, 16:48] = 1
    plain, less, more, soft = (
        work_on_edges(mask, dataclasses.replace(MergeSettings(), erode=erode, blur=blur))
        for erode, blur in ((0, 0), (20, 0), (-20, 0), (0, 41))
    )
    assert plain.shape == (1, 256, 256)
    assert less.sum() < plain.sum() < more.sum()
    assert soft.sum() == pytest.approx(plain.sum().item(), rel=0.02)
    assert 0.3 < soft[0, 128, 64] < 0.7
    assert soft[0, 0].max() == 0


def test_spreading_is_opencvs_dilation():
    cv2 = pytest.importorskip("cv2")
    mask = torch.rand(1, 30, 40, generator=torch.Generator().manual_seed(0))
    for size in (1, 2, 5, 8):
        expected = cv2.dilate(mask[0].numpy(), cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (size, size)))
        np.testing.assert_allclose(spread(mask, size)[0].numpy(), expected)


def test_sharpening_is_opencvs_weighted_sum_with_its_blur():
    cv2 = pytest.importorskip("cv2")
    image = np.random.default_rng(0).random((30, 40, 3), np.float32)
    expected = cv2.addWeighted(image, 1 + 0.5 * 3, cv2.GaussianBlur(image, (3, 3), 0), -0.5 * 3, 0)
    result = sharpened(torch.from_numpy(image).permute(2, 0, 1), 3)
    np.testing.assert_allclose(result.permute(1, 2, 0).numpy(), expected, atol=1e-5)


def test_a_sharpened_face_changes_the_frame_where_its_mask_is(face, frame):
    soft = drawn(torch.rand(3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)))
    plain, sharp = (
        merge_face(frame, face, soft, "f", MergeSettings(mask="dst", colours="none", sharpen=amount), 0)
        for amount in (0, 4)
    )
    assert torch.equal(plain[1], sharp[1])
    outside = (plain[1] == 0).expand_as(frame)
    assert torch.equal(plain[0][outside], sharp[0][outside])
    assert sharp[0].std() > plain[0].std()


def test_colours_are_taken_from_the_frame(face, frame):
    target = cut(frame, face_matrix(face.source_landmarks, SIZE, "f"), SIZE, "bicubic", "zeros").clamp(0, 1)
    dark = drawn(target * 0.4)
    results = {
        colours: merge_face(frame, face, dark, "f", MergeSettings(mask="dst", colours=colours), 0)[0]
        for colours in ("none", "rct", "lct", "mkl", "sot")
    }
    for colours in ("rct", "lct", "mkl", "sot"):
        assert psnr(results[colours], frame) > psnr(results["none"], frame) + 3, colours
