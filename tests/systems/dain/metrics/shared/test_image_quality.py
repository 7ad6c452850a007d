import numpy as np
import pytest
import torch

from mpt.systems.dain.metrics.shared.image_quality import (
    interpolation_error,
    peak_signal_to_noise,
    rounded,
    size_mask,
    structural_similarity,
)

RECORDED = (13.507145161372422, 0.7596177820356256)
"""scikit-image 0.26's PSNR and SSIM of the pictures below."""


def pictures() -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(0)
    one = numbers.random((2, 3, 21, 34))
    return one, np.clip(one + 0.25 * numbers.standard_normal(one.shape), 0, 1)


def test_figures_are_scikit_images():
    one, other = pictures()
    psnr = peak_signal_to_noise(torch.from_numpy(one), torch.from_numpy(other))
    ssim = structural_similarity(torch.from_numpy(one), torch.from_numpy(other))
    assert psnr[0].item() == pytest.approx(RECORDED[0], rel=1e-12)
    assert ssim[0].item() == pytest.approx(RECORDED[1], rel=1e-12)
    metrics = pytest.importorskip("skimage.metrics")
    for index in range(2):
        assert psnr[index].item() == pytest.approx(
            metrics.peak_signal_noise_ratio(one[index], other[index], data_range=1)
        )
        wanted = metrics.structural_similarity(
            one[index], other[index], channel_axis=0, data_range=1
        )
        assert ssim[index].item() == pytest.approx(wanted, abs=1e-12)


def test_padding_changes_no_figure():
    one, other = (torch.from_numpy(picture) for picture in pictures())
    padded = [
        torch.nn.functional.pad(picture, (0, 9, 0, 5), mode="replicate") for picture in (one, other)
    ]
    mask = size_mask(torch.tensor([[21, 34]] * 2), 26, 43)
    for figure in (peak_signal_to_noise, structural_similarity, interpolation_error):
        assert torch.allclose(figure(*padded, mask), figure(one, other), rtol=1e-12)


def test_interpolation_error_is_in_grey_levels_of_rounded_pictures():
    one, other = torch.full((1, 3, 8, 8), 10.4 / 255), torch.full((1, 3, 8, 8), 13.2 / 255)
    assert interpolation_error(rounded(one), rounded(other)).item() == pytest.approx(3, abs=1e-5)
    assert rounded(torch.tensor([-1.0, 2.0, 0.5 / 255, 1.5 / 255])).mul(255).round().tolist() == [
        0,
        255,
        0,
        2,
    ]
