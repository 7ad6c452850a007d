"""A tie of a small test set is no equality."""

import json
import math

import pytest

from mpt.report.comparing.comparison import compare_groups
from mpt.report.comparing.groups import group_runs
from mpt.report.comparing.resolution import of_classes, of_samples
from mpt.report.comparing.statistics import Margin, judge
from mpt.report.reading.read_run import read_run

MARGIN = Margin(0.01, relative=True)


def compare_tied(make_run, details=None, loss=None, metric="map50"):
    paths = [
        make_run(f"{mode}-{seed}", mode=mode, seed=seed, final=0.7425, metric=metric)
        for mode in ("fp32", "amp")
        for seed in range(3)
    ]
    for path in paths:
        if details is not None:
            (path / "evaluation.json").write_text(json.dumps(details))
        if loss is not None and "amp" in path.name:
            line = {"step": 1, "kind": "train", "losses": {"net/box": loss}}
            with (path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
    return compare_groups(group_runs([read_run(path) for path in paths]), MARGIN).rows[1].verdict


def test_equal_map_is_decided_only_if_a_box_of_the_rarest_class_is_less_than_the_margin(make_run):
    verdict = compare_tied(make_run, {"objects": {"person": 400, "bus": 4, "tram": 0}})
    assert (verdict.outcome, verdict.direction) == ("undecided", "same")
    assert (
        "one object of class bus, of which it has 4, is 16.84 % of the metric" in verdict.reason
    ), "1 / 8 / .7425"
    assert "; 68 of each class would do." in verdict.reason, "1 / (1 % of .7425 x 2) and one more"


def test_with_boxes_enough_of_each_class_equal_map_is_within(make_run):
    assert compare_tied(make_run, {"objects": {"person": 400, "bus": 68}}).outcome == "within"


def test_f1_of_a_classifier_counts_the_samples_of_its_classes(make_run):
    details = {"per_class": [{"name": "0", "samples": 30}, {"name": "1", "samples": 50}, "damaged"]}
    assert (
        "one object of class 0, of which it has 30,"
        in compare_tied(make_run, details, metric="f1").reason
    )


def test_a_metric_equal_to_the_last_digit_of_trainings_that_differ_moves_in_steps(make_run):
    verdict = compare_tied(make_run, loss=0.123)
    assert verdict.outcome == "undecided"
    assert (
        "the same to the last digit for every seed although the trainings differ" in verdict.reason
    )


@pytest.mark.parametrize(
    "details", [{}, {"objects": None}, {"objects": {"a": "many"}}, {"objects": {"a": 0}}, []]
)
def test_trainings_that_are_the_same_to_the_bit_are_within(make_run, details):
    assert compare_tied(make_run, details, metric="psnr").outcome == "within"


def test_a_metric_that_counts_samples_is_no_finer_than_one_of_them():
    tied = dict.fromkeys(range(3), 28 / 30)
    assert of_samples([*tied.values()], 30).step == 1 / 30
    assert of_samples([28 / 30, 32.43], 30).step == 0, "not a share of 30 samples"
    assert of_samples([math.nan], 30).step == of_samples([0.5], 0).step == 0
    verdict = judge(tied, tied, MARGIN, higher_is_better=True, resolution=of_samples([1.0], 30))
    assert verdict.outcome == "undecided"
    assert (verdict.low, verdict.high) == pytest.approx((-1 / 28, 1 / 28))
    assert "one of its 30 samples is 3.57 % of the metric" in verdict.reason
    assert "at least 108 test samples" in verdict.reason, "1 / (1 % of 28 / 30) and one more"
    assert (
        judge(tied, tied, MARGIN, higher_is_better=True, resolution=of_samples([1.0], 1000)).outcome
        == "within"
    )
    assert of_classes({"a": 10, "b": 0, "c": 40}).step == 1 / 20
