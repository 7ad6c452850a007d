"""Losses of adversarial games: values by hand, limits, and gradients of gradients."""

import math

import pytest
import torch
from torch import Tensor, nn

from mpt.losses.shared import adversarial

pytestmark = pytest.mark.tier("fast")


@pytest.fixture
def numbers() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_an_undecided_discriminator_pays_log_two_for_each_part() -> None:
    parts = adversarial.make_objective("nonsaturating")
    for part in parts:
        assert part(torch.zeros(4)).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("logit", [-1e4, 1e4])
def test_cross_entropy_is_finite_and_has_a_gradient_for_confident_half_precision_logits(
    logit: float,
) -> None:
    scores = torch.full((2,), logit, dtype=torch.float16, requires_grad=True)
    loss = adversarial.make_objective("nonsaturating").generator(scores)
    torch.autograd.backward(loss)
    assert torch.isfinite(loss)
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()
    assert scores.grad.sum().item() == pytest.approx(-1.0 if logit < 0 else 0.0)


def test_least_squares_is_zero_exactly_at_its_targets() -> None:
    game, one, zero = adversarial.make_objective("least_squares"), torch.ones(3), torch.zeros(3)
    assert game.real(one) == game.fake(zero) == game.generator(one) == 0
    assert game.real(zero) == game.fake(one) == game.generator(zero) == 0.5


def test_the_critic_loss_is_minus_the_difference_of_means() -> None:
    game, real, fake = (
        adversarial.make_objective("wasserstein"),
        torch.tensor([1.0, 3.0]),
        torch.tensor([-1.0, 0.0]),
    )
    assert game.real(real) + game.fake(fake) == pytest.approx(-2.5)
    assert game.generator(fake) == pytest.approx(0.5)


def test_scores_beyond_the_hinge_cost_nothing() -> None:
    game = adversarial.make_objective("hinge")
    assert game.real(torch.tensor([1.5])) == game.fake(torch.tensor([-1.0])) == 0
    assert game.real(torch.tensor([0.0])) == game.fake(torch.tensor([0.0])) == 1
    assert game.generator(torch.tensor([2.0])) == -2


def test_fakes_beyond_the_energy_margin_are_left_alone() -> None:
    game = adversarial.make_objective("energy", margin=5.0)
    assert game.real(torch.tensor([0.5, 1.5])) == pytest.approx(1.0)
    assert game.fake(torch.tensor([7.0, 9.0])) == 0
    assert game.fake(torch.tensor([4.0, 4.0])) == pytest.approx(1.0)
    assert game.generator(torch.tensor([0.5, 1.5])) == pytest.approx(1.0)


def test_balance_rises_while_fakes_are_too_easy_and_stays_in_its_range() -> None:
    balance = torch.tensor(0.1)
    up = adversarial.next_balance(
        balance, torch.tensor(2.0), torch.tensor(0.5), diversity=0.5, rate=0.1
    )
    down = adversarial.next_balance(
        balance, torch.tensor(0.0), torch.tensor(9.0), diversity=0.5, rate=0.1
    )
    assert up.item() == pytest.approx(0.15)
    assert down.item() == 0.0


@pytest.mark.parametrize("energy", [math.inf, math.nan])
def test_energies_that_overflowed_leave_the_balance_alone(energy: float) -> None:
    balance, bad, good = torch.tensor(0.1), torch.tensor(energy), torch.tensor(2.0)
    assert adversarial.next_balance(balance, bad, good, diversity=0.5, rate=0.1) == balance
    assert adversarial.next_balance(balance, good, bad, diversity=0.5, rate=0.1) == balance


def test_pull_away_is_one_for_equal_codes_and_zero_for_orthogonal_ones() -> None:
    assert adversarial.pull_away(torch.ones(3, 4)).item() == pytest.approx(1.0)
    assert adversarial.pull_away(torch.eye(4)).item() == pytest.approx(0.0)
    assert adversarial.pull_away(torch.ones(1, 4)).item() == 0.0


def test_a_linear_critic_of_slope_three_pays_four(numbers: torch.Generator) -> None:
    real, fake = (
        torch.rand(5, 1, 2, 2, generator=numbers),
        torch.rand(5, 1, 2, 2, generator=numbers),
    )
    slope = torch.zeros(1, 2, 2)
    slope[0, 0, 0] = 3.0
    penalty = adversarial.gradient_penalty(
        lambda x: (x * slope).sum((1, 2, 3)), (real,), (fake,), torch.rand(5, generator=numbers)
    )
    assert penalty.item() == pytest.approx(4.0)
    assert adversarial.real_gradient_penalty(
        lambda x: (x * slope).sum((1, 2, 3)), real
    ).item() == pytest.approx(9.0)


def test_a_critic_of_pairs_pays_for_its_slope_in_both_parts(numbers: torch.Generator) -> None:
    real, fake = (
        (torch.rand(5, 2, generator=numbers), torch.rand(5, 3, generator=numbers)) for _ in range(2)
    )
    penalty = adversarial.gradient_penalty(
        lambda x, y: 3 * x[:, 0] + 4 * y[:, 0], real, fake, torch.rand(5, generator=numbers)
    )
    assert penalty.item() == pytest.approx(16.0)  # the norm of (3, 4) is 5


def test_a_dead_critic_has_a_finite_gradient_of_its_penalty(numbers: torch.Generator) -> None:
    weight = torch.zeros(3, requires_grad=True)
    samples = torch.rand(4, 3, generator=numbers)
    mix = torch.rand(4, generator=numbers)
    torch.autograd.backward(
        adversarial.gradient_penalty(lambda x: x @ weight, (samples,), (samples + 1,), mix)
    )
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("kind", ["between", "real"])
def test_penalties_agree_with_finite_differences_of_their_weights(
    kind: str, numbers: torch.Generator
) -> None:
    torch.manual_seed(3)
    first = nn.Linear(4, 6)
    critic = nn.Sequential(first, nn.Softplus(), nn.Linear(6, 1))
    real, fake, mix = (torch.rand(8, n, generator=numbers) for n in (4, 4, 1))

    def penalty() -> Tensor:
        if kind == "real":
            return adversarial.real_gradient_penalty(critic, real)
        return adversarial.gradient_penalty(critic, (real,), (fake,), mix.flatten())

    weight = first.weight
    (slope,) = torch.autograd.grad(penalty(), weight)
    direction = torch.randn(weight.shape, generator=numbers)
    with torch.no_grad():
        weight.add_(1e-2 * direction)
        above = penalty().item()
        weight.sub_(2e-2 * direction)
        below = penalty().item()
    # Float32 differences of a smooth function over 0.02: two per cent is its rounding and curvature.
    assert (above - below) / 2e-2 == pytest.approx(
        (slope * direction).sum().item(), rel=0.02, abs=1e-3
    )


def test_path_length_of_a_linear_synthesis_is_its_jacobians_norm(numbers: torch.Generator) -> None:
    styles = torch.randn(3, 2, 4, generator=numbers, requires_grad=True)
    noise = torch.randn(3, 1, 2, 2, generator=numbers)
    image = styles.sum(dim=1).reshape(3, 1, 2, 2)
    lengths = adversarial.path_lengths(image, styles, noise)
    # d(sum(image * noise) / 2)/dw is noise / 2 in each of the two layers; the mean over layers leaves one of them.
    assert torch.allclose(lengths, noise.flatten(1).norm(dim=1) / 2)
    assert (
        adversarial.path_length_penalty(torch.tensor([1.0, 3.0]), torch.tensor(2.0)).item() == 1.0
    )
