"""Plots take the page's ink, keep words as words, and draw what the logs hold."""

import json
import math
import re
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from mpt.report.drawing import (
    INK,
    MOST_POINTS,
    draw_svg,
    label_steps,
    marks_alone,
    running_mean,
    thin,
)
from mpt.report.reading.read_run import read_run
from mpt.report.run_page.plots import constant_rates, draw_memory, draw_run, skipped_steps


def test_every_plot_is_well_formed_and_takes_the_colour_of_the_text_around_it(make_run):
    drawn = draw_run(read_run(make_run()))
    assert set(drawn) == {"metric", "losses", "learning_rate", "loss_scale", "memory", "throughput"}
    for svg in drawn.values():
        ElementTree.fromstring(svg)
        assert "currentColor" in svg
        assert INK not in svg
        assert "#000000" not in svg.lower()
        assert "mathdefault" not in svg


def test_ids_do_not_repeat_between_plots_of_one_page(make_run):
    found = [
        identity
        for svg in draw_run(read_run(make_run())).values()
        for identity in re.findall(r'id="([^"]+)"', svg)
    ]
    assert len(found) == len(set(found))


def test_axes_have_numbers_to_read_and_none_is_an_offset(make_run):
    path = make_run()
    lines = [
        {
            "step": step,
            "kind": "train",
            "lr": {"gen": 2.1e-4 if step else 9.4e-4},
            "losses": {"x": 152.94 + step / 1e5},
            "samples_per_second": 3e6,
        }
        for step in range(5)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = draw_run(read_run(path))
    words = {name: re.findall(r"<text[^>]*>([^<]*)</text>", svg) for name, svg in drawn.items()}
    assert "0.0005" in words["learning_rate"]
    assert not [word for word in words["losses"] if word.startswith("+")]
    assert any(word.startswith("152.94") for word in words["losses"])
    assert not [
        word for curve in words.values() for word in curve if re.fullmatch(r"1e[-+]?[0-9]+", word)
    ]


def test_a_figure_that_stays_zero_has_an_axis_from_zero_to_one():
    for limits, expected in ((None, (-0.05, 1.05)), ((0, 100), (0, 100))):
        axes = Figure().add_subplot()
        axes.plot([1, 2, 3], [0.0, 0.0, 0.0])
        if limits:
            axes.set_ylim(*limits)
        label_steps(axes, "mAP50")
        assert axes.get_ylim() == expected


def test_a_part_of_the_peak_has_one_colour_in_all_plots():
    some = {"parameters": 2**20, "activations": 2**21}
    for memory in (some, {**some, "gradients": 2**20, "optimizer_state": 2**20}):
        svg = draw_memory(memory)
        bars = re.findall(r"fill: (#[0-9a-f]{6})", svg)
        assert {"#3f86d8", "#c65b9b"} <= {*bars}, bars
        assert ("#e07b26" in bars) == ("gradients" in memory)


def test_a_run_with_one_logged_line_is_drawn_as_points_at_whole_steps(make_run):
    path = make_run()
    (path / "metrics.jsonl").write_text(
        '{"step": 50, "kind": "train", "losses": {"x": 1.5}, "lr": {"x": 1e-5}}\n'
    )
    for svg in (draw_run(read_run(path))[name] for name in ("losses",)):
        assert "<use" in svg.partition("legend")[0]
        steps = re.findall(r"<text[^>]*>((?:4|5)[^<]*)</text>", svg)
        assert "50" in steps
        assert all(step.isdigit() for step in steps)


def test_markup_and_formulas_in_names_stay_words(make_run):
    path = make_run()
    line = {"step": 1, "kind": "train", "losses": {'<script>alert(1)</script> $x$ & "q"': 1.0}}
    (path / "metrics.jsonl").write_text(json.dumps(line))
    svg = draw_run(read_run(path))["losses"]
    ElementTree.fromstring(svg)
    assert "<script" not in svg
    assert "&lt;script&gt;" in svg
    assert "$x$" in svg


def test_a_run_that_diverged_draws_what_is_finite(make_run):
    path = make_run()
    lines = [
        {"step": step, "kind": "train", "losses": {"a": value}}
        for step, value in enumerate([1.0, "NaN", None])
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "losses" in draw_run(read_run(path))
    (path / "metrics.jsonl").write_text(
        json.dumps({"step": 0, "kind": "train", "losses": {"a": "NaN"}})
    )
    assert "losses" not in draw_run(read_run(path))


def test_a_value_between_two_that_are_not_finite_is_marked_and_the_others_are_a_line():
    nan = math.nan
    assert marks_alone([1.0, 2.0, nan]) == {}
    assert marks_alone([2.3, nan, nan])["markevery"] == [0]
    assert marks_alone([1.0, 2.0, nan, 3.0, math.inf, 4.0, 5.0])["markevery"] == [3]


def test_skipped_steps_come_from_events_or_from_counters(make_run):
    path = make_run(seed=0)
    steps = skipped_steps(read_run(path))
    assert steps
    (path / "events.jsonl").write_text("")
    assert skipped_steps(read_run(path)) == steps


def test_a_mode_without_loss_scale_has_no_plot_of_it(make_run):
    path = make_run(mode="fp32")
    text = (path / "metrics.jsonl").read_text().replace("65536.0", "1.0")
    (path / "metrics.jsonl").write_text(text)
    assert "loss_scale" not in draw_run(read_run(path))


def test_long_runs_are_thinned_to_means_and_gaps_survive():
    values = [1.0, 3.0] * MOST_POINTS
    values[0] = math.nan
    steps, means = thin((list(range(len(values))), values))
    assert len(steps) == MOST_POINTS
    assert math.isnan(means[0])
    assert set(means[1:]) == {2.0}


def test_running_mean_of_a_constant_is_that_constant():
    assert running_mean([2.0, 2.0, 2.0], 0.9) == [2.0, 2.0, 2.0]


def test_a_learning_rate_that_never_changes_is_a_figure_and_one_evaluation_is_a_number(make_run):
    path = make_run()
    lines = [
        {
            "step": step,
            "kind": "train",
            "losses": {"x": 1.0 / step},
            "lr": {"net": 1e-3},
            "samples_per_second": 3.0,
        }
        for step in (1, 2, 3)
    ]
    lines.append({"step": 3, "kind": "eval", "metrics": {"accuracy": 0.5}})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = read_run(path)
    assert "learning_rate" not in draw_run(record)
    assert "metric" not in draw_run(record)
    assert constant_rates(record) == {"net": 1e-3}


@pytest.mark.parametrize(("best", "anchor"), [(0, "start"), (1, "middle"), (2, "end")])
def test_the_words_at_the_best_evaluation_stay_within_the_plot(make_run, best, anchor):
    path = make_run(finished=False)
    lines = [
        {"step": 30 + at, "kind": "evaluate", "metrics": {"accuracy": float(at == best)}}
        for at in range(3)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    svg = draw_run(read_run(path))["metric"]
    assert re.search(r"text-anchor: (\w+)[^>]*>best 1 at", svg)[1] == anchor


def test_letters_have_one_size_in_all_plots(make_run):
    """A plot is no wider on a page than its inches, so that a narrow one is not blown up to a column's width."""
    widths = {}
    for inches in (4.2, 6.4):
        svg = draw_svg(lambda axes: None, "plot", width=inches)
        widths[inches] = int(re.search(r'style="max-width: (\d+)px"', svg)[1])
    assert widths == {4.2: 357, 6.4: 544}
