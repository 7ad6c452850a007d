import pytest
import torch
from torch.overrides import TorchFunctionMode

from mpt.systems.deepfacelab.losses.shared.dssim import dssim, dssim_at, formula, window


def noisy_pair(size=64):
    """A flat picture at .85, and the same with noise of sigma .005: where half precision fails."""
    numbers = torch.Generator().manual_seed(0)
    noise = torch.randn(4, 3, size, size, generator=numbers, dtype=torch.float64) * 0.005
    return torch.full_like(noise, 0.85), 0.85 + noise


class Rounded(TorchFunctionMode):
    """Round every result to a narrow dtype but compute in float32, as tensor cores do.

    CPUs without float16 arithmetic take minutes over a float16 convolution, or never return.
    """

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            return result.to(self.dtype).float()
        return result


def by_definition(first, second, size):
    """DSSIM in float64 with the whole two-dimensional window, one position at a time."""
    weights = torch.outer(window(size), window(size))
    patches = [image.unfold(2, size, 1).unfold(3, size, 1) for image in (first, second)]
    one, two = patches
    mean = [(patch * weights).sum(dim=(-1, -2)) for patch in patches]
    squares = ((one**2 + two**2) * weights).sum(dim=(-1, -2))
    product = (one * two * weights).sum(dim=(-1, -2))
    c1, c2 = 0.01**2, 0.03**2
    luminance = (2 * mean[0] * mean[1] + c1) / (mean[0] ** 2 + mean[1] ** 2 + c1)
    structure = (2 * (product - mean[0] * mean[1]) + c2) / (
        squares - mean[0] ** 2 - mean[1] ** 2 + c2
    )
    return (1 - (luminance * structure).mean(dim=(1, 2, 3))) / 2


@pytest.mark.parametrize("size", [1, 2, 5, 11, 22, 44])
def test_it_is_the_definition_although_the_window_is_cut_and_separated(size):
    numbers = torch.Generator().manual_seed(1)
    first = torch.rand(2, 3, 48, 48, generator=numbers, dtype=torch.float64)
    second = (first + torch.rand(2, 3, 48, 48, generator=numbers, dtype=torch.float64) * 0.3).clamp(
        0, 1
    )
    expected = by_definition(first, second, size)
    torch.testing.assert_close(formula(first, second, size), expected, atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(dssim(first, second, size).double(), expected, atol=2e-6, rtol=1e-5)


def test_half_precision_would_ruin_it_and_ours_is_not_ruined():
    first, second = noisy_pair()
    true = by_definition(first, second, 22).mean().item()
    assert true == pytest.approx(0.0126, abs=0.0005)
    single = first.float(), second.float()
    for dtype, least in ((torch.float16, 0.3), (torch.bfloat16, 0.1)):
        narrow = [image.to(dtype).float() for image in single]
        with Rounded(dtype):
            ruined = formula(*narrow, 22)
        assert ruined.mean().item() > least
    with torch.autocast("cpu", torch.bfloat16):
        ours = dssim(*single, 22)
    assert ours.dtype == torch.float32
    assert ours.mean().item() == pytest.approx(true, abs=1e-4)


def test_autocast_does_reach_the_bare_formula():
    """So that the test above proves the guard and not that autocast has nothing to do here."""
    first, second = (image.float() for image in noisy_pair())
    with torch.autocast("cpu", torch.bfloat16):
        assert formula(first, second, 22).dtype == torch.bfloat16


def test_equal_images_are_at_zero_and_gradients_are_finite():
    image = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(dssim(image, image, 5), torch.zeros(2), atol=1e-6, rtol=0)
    drawn = image.clone().requires_grad_()
    dssim(drawn, 1 - image, 5).sum().backward()
    assert torch.isfinite(drawn.grad).all()
    assert drawn.grad.abs().max() > 0


def test_a_window_larger_than_the_image_is_a_programming_error():
    with pytest.raises(AssertionError, match="larger than the image"):
        dssim(torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8), 9)


def test_windows_that_share_a_map_give_what_each_gives_alone():
    numbers = torch.Generator().manual_seed(3)
    first, second = torch.rand(2, 2, 3, 64, 64, generator=numbers).unbind()
    for sizes in ((44, 22), (22, 44), (33, 16), (22, 11)):
        for found, size in zip(dssim_at(first, second, sizes), sizes, strict=True):
            torch.testing.assert_close(
                found.double(),
                by_definition(first.double(), second.double(), size),
                atol=2e-6,
                rtol=1e-5,
            )
