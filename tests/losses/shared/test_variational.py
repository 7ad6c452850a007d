"""The two terms of the bound against torch's own distributions."""

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Normal, kl_divergence

from mpt.losses.shared import variational

pytestmark = pytest.mark.tier("fast")


def test_reconstruction_is_the_bernoulli_log_likelihood_summed_over_pixels() -> None:
    numbers = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 1, 3, 3, generator=numbers)
    target = (torch.rand(5, 1, 3, 3, generator=numbers) > 0.5).float()
    likelihood: Tensor = Bernoulli(logits=logits).log_prob(target)  # type: ignore[no-untyped-call]
    expected = -likelihood.sum((1, 2, 3)).mean()
    assert variational.bernoulli_reconstruction(logits, target).item() == pytest.approx(
        expected.item(), rel=1e-5
    )


def test_reconstruction_of_half_precision_logits_is_summed_in_float32() -> None:
    logits = torch.full((1, 1, 300, 300), -1.0, dtype=torch.float16)
    loss = variational.bernoulli_reconstruction(logits, torch.ones(1, 1, 300, 300))
    assert loss.dtype == torch.float32
    # above float16's largest number
    assert loss.item() == pytest.approx(90000 * 1.3132617, rel=1e-4)


def test_divergence_agrees_with_the_closed_form_of_torch() -> None:
    numbers = torch.Generator().manual_seed(2)
    mean, log_variance = torch.randn(6, 3, generator=numbers), torch.randn(6, 3, generator=numbers)
    posterior = Normal(mean, (0.5 * log_variance).exp())
    expected = kl_divergence(posterior, Normal(torch.zeros(()), torch.ones(()))).sum(1).mean()
    assert variational.gaussian_divergence(mean, log_variance).item() == pytest.approx(
        expected.item(), rel=1e-5
    )
    assert variational.gaussian_divergence(torch.zeros(2, 3), torch.zeros(2, 3)) == 0


def test_samples_are_the_mean_when_the_noise_is_zero() -> None:
    mean = torch.tensor([[1.0, -2.0]])
    assert torch.equal(
        variational.sample_gaussian(mean, torch.tensor([[3.0, 3.0]]), torch.zeros(1, 2)), mean
    )
    spread = variational.sample_gaussian(
        torch.zeros(1, 1), torch.log(torch.tensor([[4.0]])), torch.ones(1, 1)
    )
    assert spread.item() == pytest.approx(2.0)
