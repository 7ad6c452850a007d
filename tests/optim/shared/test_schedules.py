import pytest
import torch

from mpt.config.options import OptimizerOptions
from mpt.optim.shared.schedules import learning_rate

pytestmark = pytest.mark.tier("fast")


def rates(total=100, base=0.5, **settings):
    options = OptimizerOptions(**settings)
    return [learning_rate(options, step, total, base) for step in range(total + 5)]


def test_constant_stays_at_the_base():
    assert set(rates(schedule="constant")) == {0.5}


def test_warmup_rises_linearly_to_the_base_and_the_schedule_fills_the_rest():
    values = rates(schedule="linear", warmup_steps=10)
    assert values[:10] == pytest.approx([0.05 * (step + 1) for step in range(10)])
    assert values[10] == 0.5
    assert values[55] == pytest.approx(0.25)
    assert values[100:] == [0.0] * 5


def test_cosine_equals_the_torch_scheduler():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    expected = []
    for _ in range(100):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates(schedule="cosine")[:100] == pytest.approx(expected)


def test_one_cycle_starts_at_a_25th_peaks_at_30_percent_and_ends_near_zero():
    values = rates(schedule="one_cycle")
    assert values[0] == pytest.approx(0.5 / 25)
    assert values.index(max(values)) == 30
    assert max(values) == 0.5
    assert values[100] == pytest.approx(0.5 / 25e4)
    assert values[:31] == sorted(values[:31])
    assert values[30:] == sorted(values[30:], reverse=True)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "one_cycle"])
@pytest.mark.parametrize("total", [1, 2, 5])
def test_short_runs_and_warmups_longer_than_the_run_stay_in_range(schedule, total):
    for warmup_steps in (0, 3, 50):
        assert all(
            0 <= rate <= 0.5 for rate in rates(total, schedule=schedule, warmup_steps=warmup_steps)
        )
