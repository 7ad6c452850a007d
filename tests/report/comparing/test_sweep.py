"""Windows of a setting: edges and best values of curves that are known, and what cannot be said."""

import math

import pytest
from matplotlib.figure import Figure

from mpt.errors import ConfigError
from mpt.report.comparing.groups import Group
from mpt.report.comparing.statistics import Margin
from mpt.report.comparing.sweep import edge, estimate, read_sweep, summit
from mpt.report.comparison_pages.sweep_page import paint, sweep_lines
from mpt.report.reading.run_record import RunRecord

pytestmark = pytest.mark.tier("fast")
VALUES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def groups(tmp_path, curve, *, higher_is_better=True, diverged=()):
    """Return value, word and runs of a mode whose metric at a value is `curve(value, seed)`."""
    found = []
    for value in VALUES:
        runs = {
            seed: RunRecord(
                path=tmp_path,
                evaluations=[
                    {"step": 1, "kind": "evaluate", "metrics": {"psnr": curve(value, seed)}}
                ],
                summary={
                    "metric": "psnr",
                    "higher_is_better": higher_is_better,
                    "final": curve(value, seed),
                    "steps": 1,
                },
            )
            for seed in range(3)
        }
        failed = dict.fromkeys(range(3), "not finite") if value in diverged else {}
        found.append((value, f"{value:g}x", Group("a mode", runs, failed)))
    return found


def parabola(top):
    """Return a curve whose best value is at `top`, 1 lower at each doubling's square away from it."""
    return lambda value, seed: 30 + 0.01 * seed - math.log2(value / top) ** 2


def test_window_edges_and_best_value_of_a_known_curve_are_found(tmp_path):
    modes = {"fp32": groups(tmp_path, parabola(1.0)), "half": groups(tmp_path, parabola(0.7))}
    found = read_sweep("optimizer.lr", modes, Margin(3.0, relative=False))
    fp32, half = found.windows
    assert (fp32.lowest.label, fp32.highest.label) == ("0.5x", "2x")
    assert [point.state for point in fp32.points] == [
        "does not train",
        *["trains"] * 3,
        *["does not train"] * 2,
    ]
    assert fp32.best.value == pytest.approx(1.0)
    assert half.best_ratio.value == pytest.approx(0.7)
    assert half.best_ratio.low == pytest.approx(0.7) == half.best_ratio.high
    # 30 falls to 29 at 2x and to 26 at 4x; linear in between it is 27 at two thirds of the doubling.
    assert fp32.upper_edge.value == pytest.approx(2 * 2 ** (2 / 3))
    assert half.upper_ratio.value < 0.8


@pytest.mark.tier("full")
def test_marks_of_two_modes_and_the_margin_s_label_cover_nothing(tmp_path):
    modes = {"fp32": groups(tmp_path, parabola(1.0)), "half": groups(tmp_path, parabola(1.0))}
    axes = Figure(figsize=(11, 4.2), dpi=72).subplots()
    paint(axes, read_sweep("optimizer.lr", modes, Margin(3.0, relative=False)))
    first, second = (line for line in axes.lines if line.get_label() in modes)
    places = [axes.transData.transform(line.get_xydata())[:, 0] for line in (first, second)]
    assert min(places[1] - places[0]) > 5, "points, the size of a mark"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert (labels, len(axes.texts)) == (["fp32", "half", "3 worse than the best of fp32"], 0)


def test_a_lower_metric_may_be_the_better_one(tmp_path):
    modes = {
        "fp32": groups(
            tmp_path, lambda value, seed: 60 - parabola(1.0)(value, seed), higher_is_better=False
        )
    }
    found = read_sweep("optimizer.lr", modes, Margin(3.0, relative=False))
    assert (found.windows[0].lowest.label, found.windows[0].highest.label) == ("0.5x", "2x")
    assert found.windows[0].best.value == pytest.approx(1.0)


def test_values_at_which_a_run_diverged_do_not_train_and_put_the_edge_half_way(tmp_path):
    modes = {"fp32": groups(tmp_path, lambda value, seed: 30.0 + 0.01 * seed, diverged=(4.0, 8.0))}
    found = read_sweep("optimizer.lr", modes, Margin(0.1, relative=True)).windows[0]
    assert [point.state for point in found.points][-2:] == ["does not train"] * 2
    assert found.highest.label == "2x"
    assert found.upper_edge.value == pytest.approx(math.sqrt(8))


def test_an_edge_beyond_the_grid_has_no_interval_and_no_ratio(tmp_path):
    flat = groups(tmp_path, lambda value, seed: 30.0)
    found = read_sweep(
        "optimizer.lr",
        {"fp32": flat, "half": groups(tmp_path, parabola(1.0))},
        Margin(3.0, relative=False),
    )
    assert found.windows[0].upper_edge.beyond == 3
    assert math.isnan(found.windows[0].upper_edge.low)
    assert found.windows[1].upper_ratio.beyond == 3
    assert "; upper edge beyond the grid in 3 seeds; best at " in sweep_lines(found)[0]
    assert "at at" not in sweep_lines(found)[0]


def test_a_baseline_that_diverges_everywhere_is_refused(tmp_path):
    modes = {"fp32": groups(tmp_path, parabola(1.0), diverged=VALUES)}
    with pytest.raises(ConfigError, match="diverged at every value"):
        read_sweep("optimizer.lr", modes, Margin(3.0, relative=False))


def test_seeds_that_scatter_leave_a_value_undecided(tmp_path):
    def scattered(value, seed):
        return 30.0 if value == 1.0 else 27.0 + 4 * (seed - 1)

    found = read_sweep(
        "optimizer.lr", {"fp32": groups(tmp_path, scattered)}, Margin(3.0, relative=False)
    )
    assert {point.state for point in found.windows[0].points if point.value != 1.0} == {
        "not decided"
    }


def test_places_on_a_logarithmic_scale():
    assert edge((1.0, 2.0, 4.0), (3.0, 3.0, 1.0), 2.0) == (pytest.approx(math.sqrt(8)), False)
    assert edge((1.0, 2.0), (3.0, 3.0), 2.0) == (2.0, True)
    assert math.isnan(edge((1.0, 2.0), (1.0, 1.5), 2.0)[0])
    assert summit((1.0, 2.0, 4.0), (0.0, 1.0, 0.0)) == (pytest.approx(2.0), False)
    assert summit((1.0, 2.0, 4.0), (3.0, 1.0, 0.0)) == (1.0, True)
    two = estimate([(1.0, False), (4.0, False)])
    assert two.value == pytest.approx(2.0)
    assert two.low * two.high == pytest.approx(4.0)
    assert two.low < 1.0
