import math

import pytest
import torch
import torch.nn.functional as F

from mpt.systems.deepfacelab.losses.shared import face_swap as losses
from mpt.systems.deepfacelab.losses.shared.dssim import dssim


def images(side=64, seed=0):
    return torch.rand(2, 2, 3, side, side, generator=torch.Generator().manual_seed(seed)).unbind()


def test_one_window_below_256_pixels_and_two_from_there():
    first, second = images(64)
    error = (first - second).square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(
        losses.reconstruction(first, second), 10 * dssim(first, second, 5) + 10 * error
    )
    first, second = images(256)
    error = (first - second).square().mean(dim=(1, 2, 3))
    both = 5 * dssim(first, second, 22) + 5 * dssim(first, second, 11)
    torch.testing.assert_close(losses.reconstruction(first, second), both + 10 * error)


@pytest.mark.parametrize(("side", "sizes"), [(512, (44, 22)), (256, (22, 11))])
def test_the_two_windows_are_those_of_deepfacelab(side, sizes):
    assert (int(side / 11.6), int(side / 23.2)) == sizes


def test_eyes_mouth_counts_only_its_region():
    first, second = images(8)
    region = torch.zeros(2, 1, 8, 8)
    assert losses.eyes_mouth_error(first, second, region).tolist() == [0, 0]
    region[0, 0, 2, 3] = 1
    expected = 300 * (first - second)[0, :, 2, 3].abs().sum() / (3 * 64)
    torch.testing.assert_close(losses.eyes_mouth_error(first, second, region)[0], expected)


def test_a_softened_mask_is_full_inside_and_at_half_coverage_and_empty_far_outside():
    mask = torch.zeros(1, 1, 64, 64)
    mask[:, :, 16:48, 16:48] = 1
    soft = losses.soften(mask)
    assert soft[0, 0, 32, 32] == 1
    assert soft[0, 0, 16, 32] == 1  # half covered by the blur
    assert soft[0, 0, 0, 0] == 0
    assert 0 < soft[0, 0, 14, 32] < 1


def test_the_blur_is_a_normalised_gaussian_of_four_sigma_taps():
    spot = torch.zeros(1, 1, 31, 31)
    spot[0, 0, 15, 15] = 1
    blurred = losses.blur(spot, 2)
    assert blurred.sum().item() == pytest.approx(1, abs=1e-5)
    assert (blurred > 0).sum() == 9 * 9
    assert (blurred[0, 0, 15, 16] / blurred[0, 0, 15, 15]).item() == pytest.approx(
        math.exp(-1 / 8), rel=1e-4
    )


def test_a_verdict_is_binary_cross_entropy():
    logits = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0)) * 5
    for real in (True, False):
        target = torch.full_like(logits, float(real))
        expected = F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(
            dim=(1, 2, 3)
        )
        torch.testing.assert_close(losses.verdict(logits, real), expected)


def test_the_background_term_is_total_variation_and_error_outside_the_mask():
    flat = torch.full((1, 3, 8, 8), 0.5)
    inside = torch.ones(1, 1, 8, 8)
    assert losses.background(flat * 0, flat, inside).item() == 0
    assert losses.background(flat * 0, flat, inside * 0).item() == pytest.approx(0.02 * 0.25)
    step = flat.clone()
    step[..., 4:] = 1.5
    assert losses.background(step, step, inside).item() == pytest.approx(1e-6 * 3 * 8)


def test_style_is_the_distance_of_means_and_deviations():
    numbers = torch.Generator().manual_seed(0)
    drawn, style = torch.rand(2, 2, 3, 32, 32, generator=numbers).unbind()
    one, other = (losses.blur(picture, 4) for picture in (drawn, style))
    mean = (one.mean((2, 3)) - other.mean((2, 3))) ** 2
    spread = (
        (one.var((2, 3), correction=0) + 1e-5).sqrt()
        - (other.var((2, 3), correction=0) + 1e-5).sqrt()
    ) ** 2
    torch.testing.assert_close(
        losses.style_error(drawn, style), 10_000 * (mean + spread).sum(1) / 3
    )
    assert losses.style_error(drawn, drawn).abs().max() == 0


def test_the_surround_counts_only_outside_the_mask():
    numbers = torch.Generator().manual_seed(0)
    target, drawn = torch.rand(2, 2, 3, 32, 32, generator=numbers).unbind()
    inside = torch.zeros(2, 1, 32, 32)
    inside[..., 8:24, 8:24] = 1
    mixed = torch.where(inside > 0, drawn, target)
    torch.testing.assert_close(
        losses.surround_error(target, mixed, inside), torch.zeros(2), atol=1e-5, rtol=0
    )
    assert (losses.surround_error(target, drawn, inside) > 1).all()


def test_a_smoothed_surround_does_not_take_in_the_face():
    image, mask = torch.zeros(1, 3, 128, 128), torch.zeros(1, 1, 128, 128)
    mask[..., 32:96, 32:96] = 1
    image[..., 32:96, 32:96] = 1
    torch.testing.assert_close(losses.smooth_surround(image, mask), image, atol=1e-6, rtol=0)


def test_weights_are_deepfacelabs():
    """Model_SAEHD/Model.py: 10 for structure, colour and mask, 300 for eyes and mouth; masks blurred by side // 32."""
    ones, zeros = torch.ones(2, 1, 4, 4), torch.zeros(2, 1, 4, 4)
    assert losses.mask_error(ones, zeros).tolist() == [10.0, 10.0]
    region = torch.zeros(2, 1, 4, 4)
    region[:, :, :2] = 1
    assert losses.eyes_mouth_error(ones.expand(2, 3, 4, 4), zeros, region).tolist() == [
        150.0,
        150.0,
    ]
    mask = torch.zeros(1, 1, 64, 64)
    mask[:, :, :32] = 1
    assert torch.equal(losses.soften(mask), (losses.blur(mask, 2.0) * 2).clamp(0, 1))
