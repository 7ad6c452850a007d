import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpt.metrics.distances.diversity import diversity_ratio
from mpt.metrics.distances.frechet import distance_of_moments, frechet_distance, too_few
from mpt.metrics.shared.float64 import in_float64

pytestmark = pytest.mark.tier("fast")


def normal(count, size, seed):
    return torch.randn(
        count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def test_commuting_gaussians_follow_the_closed_form():
    a = torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64)
    b = torch.tensor([4.0, 4.0, 1.0], dtype=torch.float64)
    shift = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)
    found = distance_of_moments((torch.zeros(3, dtype=torch.float64), a.diag()), (shift, b.diag()))
    assert found == pytest.approx(9.0 + 1.0 + 0.0 + 4.0)


def test_the_general_case_agrees_with_the_eigenvalues_of_the_unsymmetric_product():
    a, b = normal(50, 5, 0) @ normal(5, 5, 1), normal(60, 5, 2) @ normal(5, 5, 3) + 1
    covariance_a, covariance_b = torch.cov(a.T), torch.cov(b.T)
    trace_root = torch.linalg.eigvals(covariance_a @ covariance_b).real.sqrt().sum()
    expected = (
        (a.mean(0) - b.mean(0)).square().sum()
        + covariance_a.trace()
        + covariance_b.trace()
        - 2 * trace_root
    )
    assert frechet_distance(a, b) == pytest.approx(expected.item(), rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.integers(1, 6))
def test_it_is_symmetric_not_negative_and_zero_for_equal_sets(seed, size):
    a, b = normal(20, size, seed), 2 * normal(30, size, seed + 1) + 1
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-8)
    assert frechet_distance(a, b) >= 0
    assert frechet_distance(a, a.flip(0)) == pytest.approx(0, abs=1e-9)


def test_a_collapsed_set_with_a_singular_covariance_has_a_finite_distance():
    real = normal(100, 8, 0).float()
    assert frechet_distance(real, real[:1].expand(50, -1)) == pytest.approx(
        (
            real.double().var(0).sum() + (real[0].double() - real.double().mean(0)).square().sum()
        ).item()
    )


def test_features_that_are_not_finite_are_infinitely_far():
    broken = normal(10, 3, 0)
    broken[0, 0] = math.nan
    assert frechet_distance(normal(10, 3, 1), broken) == math.inf


def test_one_sample_is_refused():
    with pytest.raises(ValueError, match="two samples at least, got 1"):
        frechet_distance(normal(5, 2, 0), normal(1, 2, 0))


def test_diversity_is_the_ratio_of_spreads():
    real = normal(50, 3, 0)
    assert diversity_ratio(real, real * 0.5 + 7) == pytest.approx(0.5)
    assert diversity_ratio(real, real[:1].expand(9, -1)) == 0
    assert math.isnan(diversity_ratio(real[:1].expand(9, -1), real))
    # one image, computed in batches of several sizes
    rounded = real[:1] * (1 + 1e-7 * torch.rand(9, 1))
    assert math.isnan(diversity_ratio(rounded, real))


def test_a_distance_of_fewer_images_than_dimensions_is_doubted() -> None:
    assert too_few(torch.rand(9, 8), torch.rand(9, 8)) is None
    doubt = too_few(torch.rand(8, 8), torch.rand(20, 8))
    assert doubt is not None
    assert "rests on 8 test images and 20 samples, in 8 dimensions" in doubt


class OnAppleDevice:
    """Stands for a tensor of a device that has no float64."""

    device = torch.device("mps")

    def cpu(self) -> torch.Tensor:
        return torch.ones(2)


def test_a_device_without_float64_leaves_figures_to_the_cpu():
    assert in_float64(OnAppleDevice()).dtype == torch.float64
    assert in_float64(torch.ones(2)).dtype == torch.float64
