"""The numerics are held against closed forms and printed tables; the verdicts against their definition."""

import math
import random

import numpy
import pytest

from mpt.errors import ConfigError
from mpt.report.comparing.intervals import (
    LEVEL,
    difference_interval,
    fieller_interval,
    spread,
    student_quantile,
)
from mpt.report.comparing.sequential import levels
from mpt.report.comparing.statistics import Margin, judge, judge_until, seeds_to_decide

ONE_PER_CENT = Margin(0.01, relative=True)


def stopped(baseline, other, margin, most):
    """Add seeds until the verdict is in."""
    for look in levels(most):
        seen = ({seed: side[seed] for seed in range(look)} for side in (baseline, other))
        verdict = judge_until(*seen, margin, most, higher_is_better=True)
        if verdict.outcome != "undecided":
            break
    return verdict


def seeds(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [  # NIST/SEMATECH e-Handbook, table 1.3.6.7.2
        (0.95, 1, 6.314),
        (0.95, 2, 2.920),
        (0.95, 4, 2.132),
        (0.975, 9, 2.262),
        (0.99, 30, 2.457),
        (0.95, 100, 1.660),
    ],
)
def test_quantiles_agree_with_the_printed_table(probability, freedom, value):
    assert student_quantile(probability, freedom) == pytest.approx(value, abs=5e-4)
    assert student_quantile(1 - probability, freedom) == pytest.approx(-value, abs=5e-4)


def test_margin_reads_shares_and_amounts():
    assert Margin.parse("1%") == ONE_PER_CENT
    assert Margin.parse(" 2.5 % ") == Margin(0.025, relative=True)
    assert Margin.parse("0.5") == Margin(0.5, relative=False)


@pytest.mark.parametrize("text", ["", "%", "abc", "0", "-1%", "nan", "inf%", "1%%"])
def test_margin_refuses_what_is_no_positive_number(text):
    with pytest.raises(ConfigError, match="--margin"):
        Margin.parse(text)


def test_a_small_difference_with_small_spread_is_within():
    verdict = judge(
        seeds(90.0, 91.0, 89.5),
        seeds(90.1, 91.0, 89.4),
        Margin(1.0, relative=False),
        higher_is_better=True,
    )
    assert verdict.outcome == "within"
    assert -1 < verdict.low < verdict.difference < verdict.high < 1


def test_no_significant_difference_is_not_equivalence():
    verdict = judge(
        seeds(90.0, 80.0, 85.0), seeds(81.0, 89.0, 86.0), ONE_PER_CENT, higher_is_better=True
    )
    assert verdict.low < 0 < verdict.high
    assert verdict.outcome == "undecided"
    assert verdict.seeds_wanted is not None
    assert verdict.seeds_wanted > 3


@pytest.mark.parametrize(("higher_is_better", "direction"), [(True, "worse"), (False, "better")])
def test_a_large_steady_difference_is_outside_on_the_right_side(higher_is_better, direction):
    verdict = judge(
        seeds(90.0, 91.0, 89.5),
        seeds(80.0, 81.2, 79.4),
        ONE_PER_CENT,
        higher_is_better=higher_is_better,
    )
    assert (verdict.outcome, verdict.direction) == ("outside", direction)


def test_one_seed_decides_nothing_even_without_difference():
    verdict = judge(seeds(0.9), seeds(0.9), ONE_PER_CENT, higher_is_better=True)
    assert verdict.outcome == "undecided"
    assert "--seeds" in verdict.reason


def test_equal_runs_are_within_and_the_missing_width_is_said():
    verdict = judge(
        seeds(0.9, 0.91, 0.87), seeds(0.9, 0.91, 0.87), ONE_PER_CENT, higher_is_better=True
    )
    assert (verdict.outcome, verdict.low, verdict.high) == ("within", 0.0, 0.0)
    assert "no width" in verdict.reason


def test_a_difference_equal_to_the_margin_without_spread_is_never_decided():
    verdict = judge(
        seeds(1.0, 2.0), seeds(1.5, 2.5), Margin(0.5, relative=False), higher_is_better=True
    )
    assert verdict.outcome == "undecided"
    assert verdict.seeds_wanted is None


def test_a_diverged_run_counts_against_its_mode_and_not_as_missing():
    verdict = judge(
        seeds(0.9, 0.9, 0.9), seeds(0.9, math.nan, 0.9), ONE_PER_CENT, higher_is_better=True
    )
    assert (verdict.outcome, verdict.direction) == ("outside", "worse")
    assert "seed 1" in verdict.reason


def test_a_diverged_baseline_decides_nothing():
    verdict = judge(seeds(0.9, math.inf), seeds(0.9, 0.9), ONE_PER_CENT, higher_is_better=True)
    assert verdict.outcome == "undecided"


def test_a_share_of_a_zero_mean_is_refused_with_what_to_do():
    verdict = judge(seeds(-1.0, 1.0), seeds(0.0, 0.1), ONE_PER_CENT, higher_is_better=True)
    assert verdict.outcome == "undecided"
    assert "--margin" in verdict.reason


def test_only_common_seeds_are_paired():
    baseline, other = {1: 0.9, 2: 0.8, 3: 0.85, 4: 0.83}, {2: 0.8, 3: 0.85, 4: 0.83, 9: 0.1}
    verdict = judge(baseline, other, ONE_PER_CENT, higher_is_better=True)
    assert verdict.seeds == 3
    assert verdict.outcome == "within"
    assert judge({1: 0.9}, {2: 0.9}, ONE_PER_CENT, higher_is_better=True).outcome == "undecided"


def test_relative_interval_of_a_negative_metric_keeps_its_direction():
    baseline, other = (-10.0, -10.2, -9.8), (-9.0, -9.3, -8.8)
    low, high = fieller_interval(baseline, other)
    assert 0 < low < high
    verdict = judge(seeds(*baseline), seeds(*other), ONE_PER_CENT, higher_is_better=True)
    assert (verdict.outcome, verdict.direction) == ("outside", "better")


def test_fieller_ends_are_where_the_paired_t_test_turns():
    baseline, other = (0.91, 0.90, 0.93, 0.89), (0.905, 0.90, 0.92, 0.895)
    for end in fieller_interval(baseline, other):
        residual = [
            after - (1 + end) * before for before, after in zip(baseline, other, strict=True)
        ]
        low, high = difference_interval([0.0] * 4, residual)
        assert min(abs(low), abs(high)) == pytest.approx(0, abs=1e-12)


def test_fieller_is_unbounded_when_the_baseline_may_be_zero():
    assert fieller_interval((-1.0, 1.2, 0.1), (0.3, 0.2, 0.1)) == (-math.inf, math.inf)


def test_wanted_seeds_decide_about_as_often_as_promised():
    generator = random.Random(0)
    deviation, margin = 0.8, Margin(1.0, relative=False)
    pilot = [generator.gauss(0, 1) for _ in range(4)]
    scale = deviation / spread(pilot).deviation
    centre = spread(pilot).mean
    pilot = [(value - centre) * scale + 0.2 for value in pilot]  # mean 0.2, deviation 0.8 exactly
    wanted = seeds_to_decide([0.0] * 4, pilot, margin, 0.2)
    assert wanted is not None
    decided = 0
    for _ in range(400):
        sample = [generator.gauss(0.2, deviation) for _ in range(wanted)]
        low, high = difference_interval([0.0] * wanted, sample)
        decided += low > -1 and high < 1
    assert 0.75 < decided / 400 < 0.97


def test_modes_that_differ_by_the_margin_are_called_equivalent_in_one_case_of_twenty():
    generator = random.Random(1)
    wrong = 0
    for _ in range(1000):
        baseline = seeds(*(generator.gauss(90, 0.5) for _ in range(5)))
        other = {seed: value * 0.99 + generator.gauss(0, 0.1) for seed, value in baseline.items()}
        wrong += judge(baseline, other, ONE_PER_CENT, higher_is_better=True).outcome == "within"
    assert 20 < wrong < 80


def test_spread_of_one_seed_has_no_deviation():
    assert math.isnan(spread([0.5]).deviation)
    assert spread([1.0, 3.0]).deviation == pytest.approx(math.sqrt(2))


def test_verdicts_agree_with_two_one_sided_tests_of_scipy_where_it_is_installed():
    stats = pytest.importorskip("scipy.stats")
    generator = random.Random(3)
    for _ in range(50):
        count = generator.randint(3, 7)
        baseline = [generator.gauss(1, 0.1) for _ in range(count)]
        other = [value + generator.gauss(0.01, 0.05) for value in baseline]
        for margin, lower, upper in (
            (Margin(0.03, relative=False), [b - a + 0.03 for a, b in zip(baseline, other)], None),
            (Margin(0.02, relative=True), [b - 0.98 * a for a, b in zip(baseline, other)], 1.02),
        ):
            above = [b - upper * a if upper else b - a - 0.03 for a, b in zip(baseline, other)]
            p = max(
                stats.ttest_1samp(lower, 0, alternative="greater").pvalue,
                stats.ttest_1samp(above, 0, alternative="less").pvalue,
            )
            verdict = judge(seeds(*baseline), seeds(*other), margin, higher_is_better=True)
            assert (verdict.outcome == "within") == (p < 0.05)


def test_a_baseline_too_wide_for_a_share_is_said_in_words_and_not_in_infinities():
    verdict = judge(
        seeds(-1.0, 1.2, 0.1), seeds(0.3, 0.2, 0.1), ONE_PER_CENT, higher_is_better=True
    )
    assert verdict.outcome == "undecided"
    assert "inf" not in verdict.reason
    assert "mean 0.1, standard deviation 1.1" in verdict.reason
    assert "give --margin as an amount" in verdict.reason


def test_looks_are_stricter_than_one_and_reach_the_most_seeds():
    for most in (3, 8, 16, 40):
        found = levels(most)
        assert list(found)[-1] == most
        assert all(0 < level <= LEVEL * 1.02 for level in found.values())
    assert levels(3)[3] == pytest.approx(LEVEL, rel=0.02)
    assert levels(16)[3] < LEVEL / 2


@pytest.mark.parametrize("relative", [False, True])
def test_adding_seeds_until_decided_errs_no_more_often_than_one_look(relative):
    """At the edge of the margin "within" is wrong. Looking each time at 5 % would say so far more often."""
    numbers = numpy.random.default_rng(5)
    margin = Margin(0.01, relative=True) if relative else Margin(1.0, relative=False)
    trials, most = 600, 12
    wrong = naive = outside = 0
    for _ in range(trials):
        baseline = numbers.normal(100.0, 3.0, most)
        edge = baseline * 1.01 if relative else baseline + 1.0
        other = edge + numbers.normal(0, 0.3, most)
        sides = dict(enumerate(baseline)), dict(enumerate(other))
        outcome = stopped(*sides, margin, most).outcome
        wrong += outcome == "within"
        outside += outcome == "outside"
        naive += any(
            judge(
                *({s: v for s, v in side.items() if s < look} for side in sides),
                margin,
                higher_is_better=True,
            ).outcome
            == "within"
            for look in levels(most)
        )
    error = math.sqrt(LEVEL * (1 - LEVEL) / trials)
    assert abs(wrong / trials - LEVEL) < 4 * error
    assert outside / trials < LEVEL + 4 * error
    assert naive / trials > 2 * LEVEL


def test_adding_seeds_decides_early_where_the_difference_is_small_and_the_verdict_stands():
    numbers = numpy.random.default_rng(6)
    used = []
    for _ in range(200):
        baseline = numbers.normal(100.0, 3.0, 16)
        other = baseline + numbers.normal(0, 0.4, 16)
        verdict = stopped(dict(enumerate(baseline)), dict(enumerate(other)), ONE_PER_CENT, 16)
        assert verdict.outcome == "within"
        used.append(verdict.seeds)
    assert sum(used) / len(used) < 7


def published(mean, deviation, pattern):
    """Return 15 values with exactly this mean and standard deviation, spread after a pattern."""
    pattern = numpy.asarray(pattern) - numpy.mean(pattern)
    return dict(enumerate(mean + deviation * pattern / numpy.std(pattern, ddof=1)))


def test_the_published_runs_of_ssd300_come_out_as_equal():
    """NVIDIA's DeepLearningExamples, SSD300, 15 seeds each: mAP .26795 +- .00136 with AMP and .26707 +- .00164 in TF32.

    Published are means and deviations; the values here have exactly these, and no correlation between seeds.
    """
    stats = pytest.importorskip("scipy.stats")
    numbers = numpy.random.default_rng(7)
    first, second = numbers.normal(size=15), numbers.normal(size=15)
    first, second = first - first.mean(), second - second.mean()
    second -= first * (first @ second) / (first @ first)
    tf32, amp = published(0.26707, 0.00164, first), published(0.26795, 0.00136, second)
    assert spread(list(amp.values())).deviation == pytest.approx(0.00136)
    verdict = judge(tf32, amp, ONE_PER_CENT, higher_is_better=True)
    assert (verdict.outcome, verdict.direction, verdict.seeds) == ("within", "better", 15)
    # no difference is shown, and none as large as the margin
    assert verdict.low < 0 < verdict.high < 0.008
    sequential = judge_until(tf32, amp, ONE_PER_CENT, 15, higher_is_better=True)
    assert sequential.outcome == "within"
    margin = 0.01 * 0.26707
    # Welch's test from the published figures alone
    for shift, way in ((margin, "greater"), (-margin, "less")):
        assert (
            stats.ttest_ind_from_stats(
                0.26795 + shift, 0.00136, 15, 0.26707, 0.00164, 15, equal_var=False, alternative=way
            ).pvalue
            < 0.05
        )
    tight = judge(tf32, amp, Margin(0.003, relative=True), higher_is_better=True)
    assert tight.outcome == "undecided"
    assert tight.seeds_wanted is None or tight.seeds_wanted > 15


def test_a_divergence_after_the_verdict_counts_in_a_sequential_test():
    baseline = seeds(*(0.9 + 0.0001 * seed for seed in range(5)))
    other = {**baseline, 4: math.nan}
    judged = judge_until(
        {seed: baseline[seed] for seed in range(3)}, other, ONE_PER_CENT, 16, higher_is_better=True
    )
    assert judged.outcome == "within", "three seeds decide it"
    judged = judge_until(baseline, other, ONE_PER_CENT, 16, higher_is_better=True)
    assert (judged.outcome, judged.direction) == ("outside", "worse")
    assert "seed 4" in judged.reason


def test_a_seed_that_collapses_after_the_verdict_takes_it_back():
    baseline = seeds(*(1.0 for _ in range(5)))
    other = {**seeds(1.0, 1.001, 0.999), 3: 0.5, 4: 1.0}
    margin = Margin(0.4, relative=True)
    assert stopped(baseline, other, margin, 6).outcome == "within", "after three seeds"
    assert judge_until(baseline, other, margin, 6, higher_is_better=True).seeds == 5
    assert (
        judge_until(baseline, {**other, 4: 0.5}, margin, 6, higher_is_better=True).outcome
        == "undecided"
    )


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_seeds_give_no_verdict(count):
    same = seeds(*(0.9 + 0.01 * seed for seed in range(count)))
    verdict = judge(same, same, ONE_PER_CENT, higher_is_better=True)
    assert verdict.outcome == "undecided"
    assert "--seeds 3" in verdict.reason


def test_a_mode_that_is_worse_by_an_unknown_amount_is_called_worse():
    verdict = judge(
        seeds(1.0, 1.0, 1.0),
        seeds(0.6, 0.4, 0.5),
        Margin(0.5, relative=False),
        higher_is_better=True,
    )
    assert verdict.outcome == "undecided"
    assert verdict.high < 0
    assert verdict.headline == "worse, size not decided"


def test_within_names_what_few_seeds_cannot_show():
    steady = seeds(0.90, 0.91, 0.89)
    verdict = judge(steady, seeds(0.9001, 0.9101, 0.8899), ONE_PER_CENT, higher_is_better=True)
    assert verdict.outcome == "within"
    assert "Assumes that differences between seeds are about normal" in verdict.reason
    assert "up to 63 % of seeds" in verdict.reason, "1 - .05 ** (1 / 3)"


def test_with_eight_seeds_one_far_from_the_others_keeps_it_undecided():
    """The interval alone would say within, but what it assumes does not hold."""
    margin = Margin(1.0, relative=False)
    others = seeds(-0.1, -0.2, -0.1, -0.3, -0.2, -0.1, -0.2, -1.2)
    verdict = judge(dict.fromkeys(others, 0.0), others, margin, higher_is_better=True)
    assert -1 < verdict.low < verdict.high < 1
    assert verdict.outcome == "undecided"
    assert "Shapiro" in verdict.reason
    calmer = {**others, 7: -0.4}
    assert (
        judge(dict.fromkeys(others, 0.0), calmer, margin, higher_is_better=True).outcome == "within"
    )
