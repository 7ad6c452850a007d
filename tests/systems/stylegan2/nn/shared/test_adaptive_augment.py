"""Adaptive augmentation: identity at probability 0, its group of transforms, its controller, and second derivatives."""

import math

import pytest
import torch

from mpt.systems.stylegan2.nn.shared.adaptive_augment import (
    DRAWS,
    AdaptiveAugment,
    Draws,
    colour,
    geometry,
)


def uniforms(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, DRAWS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("channels", [1, 3])
def test_nothing_happens_at_probability_zero(channels: int) -> None:
    image = torch.rand(4, channels, 8, 8) * 2 - 1
    assert torch.allclose(AdaptiveAugment()(image, uniforms(4)), image, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
def test_every_sample_changes_at_probability_one_and_one_draw_gives_one_result(
    channels: int,
) -> None:
    augment = AdaptiveAugment()
    augment.probability.fill_(1.0)
    image = torch.rand(8, channels, 8, 8)
    changed = augment(image, uniforms(8))
    assert torch.isfinite(changed).all()
    assert ((changed - image).abs().flatten(1).max(dim=1).values > 0.05).all()
    assert torch.equal(changed, augment(image, uniforms(8)))
    parts = [augment(image[:3], uniforms(8)[:3]), augment(image[3:], uniforms(8)[3:])]
    assert torch.allclose(torch.cat(parts), changed, atol=1e-6)


def test_the_share_of_changed_samples_follows_the_probability() -> None:
    neutral = torch.eye(3)
    shares = []
    for probability in (0.1, 0.5):
        matrix = geometry(Draws(uniforms(4000), torch.tensor(probability)), 16)
        shares.append((matrix - neutral).abs().amax((1, 2)).gt(1e-6).float().mean().item())
    # Eight independent gates, two of which do nothing in a half or a quarter of the cases.
    assert shares[0] < 0.7 < 0.95 < shares[1]


@pytest.mark.parametrize(("column", "share"), [(4, 0.25), (15, 0.0)])
def test_both_directions_of_a_shift_happen_together(column: int, share: float) -> None:
    draws = torch.full((2, DRAWS), 0.99)  # no gate opens below it
    draws[:, column : column + 2] = torch.tensor([0.99, 0.2])
    draws[0, column + 2] = 0.1
    moved, still = geometry(Draws(draws, torch.tensor(0.5)), 64)
    assert torch.equal(still, torch.eye(3))
    assert (moved[:2, 2].abs() > 0.1).all()
    if share:  # by whole pixels, and an eighth of the image at most
        assert torch.equal(moved[:2, 2] * 32, (moved[:2, 2] * 32).round())
        assert moved[:2, 2].abs().max() <= share


def test_colours_keep_grey_grey() -> None:
    grey = torch.full((16, 3, 2, 2), 0.3)
    changed = colour(grey, Draws(uniforms(16), torch.tensor(1.0)))
    assert torch.allclose(changed[:, 0], changed[:, 1], atol=1e-5)
    assert torch.allclose(changed[:, 0], changed[:, 2], atol=1e-5)


def test_the_controller_moves_towards_its_target_within_bounds() -> None:
    augment = AdaptiveAugment()
    for _ in range(3):
        augment.steer(torch.tensor(0.9), target=0.6, step=0.25)
    assert augment.probability.item() == pytest.approx(0.75)
    for _ in range(5):
        augment.steer(torch.tensor(-0.9), target=0.6, step=0.25)
    assert augment.probability.item() == 0.0


def test_gradients_of_gradients_pass_through_it() -> None:
    augment = AdaptiveAugment()
    augment.probability.fill_(1.0)
    weight = torch.randn(3, 8, 8, requires_grad=True)
    image = torch.rand(2, 3, 8, 8, requires_grad=True)
    score = (augment(image, uniforms(2)) * weight).square().sum()
    (slope,) = torch.autograd.grad(score, image, create_graph=True)
    torch.autograd.backward(slope.square().sum())
    assert weight.grad is not None
    assert math.isfinite(weight.grad.abs().sum().item())
    assert weight.grad.abs().sum() > 0
