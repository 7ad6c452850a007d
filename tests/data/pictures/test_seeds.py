import pytest

from mpt.data.pictures.seeds import mix

pytestmark = pytest.mark.tier("fast")


def test_every_number_and_the_order_of_numbers_change_the_seed():
    seeds = {
        mix(seed, epoch, index) for seed in range(10) for epoch in range(10) for index in range(100)
    }
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert mix(1, 2) != mix(2, 1)
    assert mix(0) != mix(0, 0)


def test_seeds_never_change_between_releases():
    assert mix(0, 0, 0) == 1279368494785126216
