"""Filtered resampling: constants stay constant, shapes halve and double, second derivatives exist."""

from collections.abc import Callable

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from mpt.systems.stylegan2.nn.shared.resampling import (
    Blur,
    sample_affine,
    sample_affine_filtered,
    symlet,
)
from tests.systems.stylegan2.original import recorded


def test_a_constant_stays_constant_away_from_the_border() -> None:
    image = torch.full((2, 3, 8, 8), 5.0)
    blur = Blur()
    doubled, halved = blur.upsample(image), blur.downsample(image)
    assert doubled.shape == (2, 3, 16, 16)
    assert halved.shape == (2, 3, 4, 4)
    assert torch.allclose(doubled[:, :, 2:-2, 2:-2], torch.tensor(5.0))
    assert torch.allclose(halved[:, :, 1:-1, 1:-1], torch.tensor(5.0))


def test_doubling_and_halving_are_adjoint_up_to_their_gain() -> None:
    numbers = torch.Generator().manual_seed(0)
    small, large = (
        torch.randn(1, 2, 4, 4, generator=numbers),
        torch.randn(1, 2, 8, 8, generator=numbers),
    )
    blur = Blur()
    # The filter is symmetric, so <upsample x, y> = 4 <x, downsample y>.
    assert torch.allclose(
        (blur.upsample(small) * large).sum(), 4 * (small * blur.downsample(large)).sum(), atol=1e-4
    )


def test_resampling_has_second_derivatives() -> None:
    blur = Blur()
    blur.kernel = blur.kernel.double()
    image = torch.rand(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradgradcheck(lambda x: blur.upsample(x).square(), (image,))
    torch.autograd.gradgradcheck(lambda x: blur.downsample(x).square(), (image,))


def test_a_penalty_on_gradients_equals_pytorchs_own_and_takes_no_kernel_per_channel() -> None:
    blur = Blur()
    image = torch.rand(2, 6, 8, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1)), blur.kernel.expand(6, 1, 4, 4), stride=2, groups=6)

    def penalty(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        (slope,) = torch.autograd.grad(function(image).square().sum(), image, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), image)[0]

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        found = penalty(lambda x: blur.filter(x, (1, 1, 1, 1), stride=2))
    assert torch.equal(found, penalty(plain))
    assert (
        sum(event.count for event in profiler.key_averages() if event.key == "aten::convolution")
        == 2
    )


def test_gradients_of_a_filter_under_autocast_are_those_of_pytorch() -> None:
    blur = Blur()
    image = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        own = blur.filter(image, (1, 1, 1, 1))
        plain = F.conv2d(F.pad(image, (1, 1, 1, 1)), blur.kernel.expand(3, 1, 4, 4), groups=3)
    assert own.dtype == torch.bfloat16
    (slope,), (expected,) = (
        torch.autograd.grad(x.float().square().sum(), image) for x in (own, plain)
    )
    assert slope.dtype == torch.float32
    assert torch.equal(slope, expected)


def test_affine_sampling_equals_grid_sample() -> None:
    numbers = torch.Generator().manual_seed(1)
    image = torch.rand(2, 3, 5, 5, generator=numbers)
    matrix = torch.eye(3)[:2] + 0.2 * torch.randn(2, 2, 3, generator=numbers)
    grid = F.affine_grid(matrix, [2, 3, 5, 5], align_corners=False)
    expected = F.grid_sample(image, grid, padding_mode="reflection", align_corners=False)
    assert torch.equal(sample_affine(image, matrix), expected)


def test_affine_sampling_can_be_differentiated_twice() -> None:
    image = torch.rand(1, 1, 4, 4, requires_grad=True)
    matrix = torch.tensor([[[0.8, 0.1, 0.2], [-0.1, 0.9, 0.0]]])

    def energy(x: torch.Tensor) -> torch.Tensor:
        return sample_affine(x, matrix).pow(3).sum()

    (slope,) = torch.autograd.grad(energy(image), image, create_graph=True)
    (second,) = torch.autograd.grad(slope.square().sum(), image)
    direction = torch.randn(image.shape, generator=torch.Generator().manual_seed(2))
    step = 1e-2

    def slope_energy(x: torch.Tensor) -> torch.Tensor:
        (found,) = torch.autograd.grad(energy(x), x)
        return found.square().sum()

    ahead = slope_energy((image + step * direction).detach().requires_grad_())
    behind = slope_energy((image - step * direction).detach().requires_grad_())
    # Central difference in float32 of a smooth function: a per cent is its error.
    assert torch.allclose((ahead - behind) / (2 * step), (second * direction).sum(), rtol=0.02)


def test_filtered_sampling_is_the_original_s_augmentation() -> None:
    """Flip, quarter turns, whole and broken shifts, scaling, rotation and stretching of NVIDIA's AugmentPipe, together.

    Written at its percentiles 0.3 and 0.7; parts of the pictures come from beyond the border.
    """
    kept = recorded("geometry")
    for number in (3, 7):
        moved = sample_affine_filtered(kept["image"], kept[f"matrix_{number}"], symlet())
        assert float((moved - kept[f"moved_{number}"]).abs().max()) < 2e-5
        assert (
            float((sample_affine(kept["image"], kept[f"matrix_{number}"]) - moved).abs().max())
            > 0.1
        )


def test_filtered_sampling_can_be_differentiated_twice() -> None:
    image = torch.rand(1, 1, 6, 6, dtype=torch.float32, requires_grad=True)
    matrix = torch.tensor([[[0.8, 0.1, 0.2], [-0.1, 0.9, 0.0]]])
    (slope,) = torch.autograd.grad(
        sample_affine_filtered(image, matrix, symlet()).pow(3).sum(), image, create_graph=True
    )
    (second,) = torch.autograd.grad(slope.square().sum(), image)
    assert bool(second.isfinite().all())
    assert float(second.abs().max()) > 0
