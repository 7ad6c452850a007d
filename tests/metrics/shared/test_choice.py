"""A metric is found by its file's name, and every file that offers one keeps the contract."""

import sys
from types import SimpleNamespace

import pytest
import torch

from mpt.config.finding.registry import INSTALLED
from mpt.errors import ConfigError, PartError
from mpt.metrics.shared.choice import measure_all, measure_possible, metrics_of, refuse_taken
from mpt.metrics.shared.torchmetrics_call import of_torchmetrics


def find_metrics(names):
    return metrics_of(SimpleNamespace(metrics=names))


pytestmark = pytest.mark.tier("fast")


def test_a_name_without_a_file_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"no metric 'top_6'; there are .*top_five"):
        find_metrics(["top_6"])


@pytest.mark.parametrize("name", ["os", "accuracy", "../accuracy", "choice"])
def test_only_files_with_a_measure_are_metrics(name):
    with pytest.raises(ConfigError, match="no metric"):
        find_metrics([name])


def test_a_metric_gets_what_its_parameters_name_of_all_batches_of_any_task():
    def widest(width, height):
        return (width / height).max()

    evidence = [
        {"width": torch.tensor([2.0]), "height": torch.tensor([4.0]), "more": torch.zeros(1)}
    ]
    evidence += [
        {
            "width": torch.tensor([3.0, 1.0]),
            "height": torch.tensor([2.0, 1.0]),
            "more": torch.zeros(2),
        }
    ]
    assert measure_all({"widest": widest}, evidence) == {"widest": 1.5}
    with pytest.raises(
        ConfigError,
        match=r"widest \(test_choice.py:34\) measures height, which .* keep; it has width",
    ):
        measure_all({"widest": widest}, [{"width": torch.ones(1)}])


def test_a_parameter_with_a_default_needs_no_output():
    def wide(width, factor=3.0, height=None):
        return factor * width.max() if height is None else height.max()

    one = {"width": torch.tensor([2.0])}
    assert measure_all({"wide": wide}, [one]) == {"wide": 6.0}
    assert measure_all({"wide": wide}, [one | {"height": torch.tensor([5.0])}]) == {"wide": 5.0}


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ((1.0, 2.0), "a tuple"),
        (None, "nothing"),
        (torch.ones(2), "a Tensor"),
        ({"a": 1.0}, "a dict"),
        (1j, "a complex"),
        (10**400, "an int"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_is_no_number_is_refused_in_a_line_that_names_the_metric(made, found):
    with pytest.raises(PartError, match=f"metric odd: its measure returned {found}; expected one"):
        measure_all({"odd": lambda width: made}, [{"width": torch.ones(1)}])


def test_a_metric_does_not_take_the_name_of_a_figure_of_the_task():
    with pytest.raises(ConfigError, match="a figure named accuracy of its own; rename"):
        refuse_taken(["top_five", "accuracy"], {"accuracy": 0.5})
    evidence = [{"logits": torch.eye(10), "labels": torch.arange(10)}]
    figures, refused = measure_possible(evidence, taken=["top_five"])
    assert "top_five" not in figures
    assert "named top_five of its own" in refused["top_five"]


def test_a_metric_that_fails_leaves_the_others(monkeypatch):
    part = SimpleNamespace(member=lambda name: lambda logits: {}["none"])
    functions = {"broken": part, **INSTALLED.functions("metrics")}
    monkeypatch.setattr(type(INSTALLED), "functions", lambda self, kind: functions)
    figures, refused = measure_possible([{"logits": torch.eye(10), "labels": torch.arange(10)}])
    assert figures["top_five"] == 1.0
    assert "none" in refused["broken"]


@pytest.mark.parametrize("name", sorted(INSTALLED.functions("metrics")))
def test_every_metric_makes_one_finite_number_of_logits_and_labels(name):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(30, 10, generator=generator)
    figure = find_metrics([name])[name](logits, torch.arange(30) % 10)
    assert isinstance(figure, float)
    assert figure == figure


def test_top_five_counts_what_top_one_misses():
    logits = torch.arange(10.0).repeat(4, 1)
    assert find_metrics(["top_five"])["top_five"](logits, torch.tensor([9, 5, 4, 0])) == 0.5


def test_figures_of_torchmetrics_are_means_over_the_classes_that_are_there():
    pytest.importorskip("torchmetrics", reason="the extra metrics is not installed")
    logits = torch.tensor([[3.0, 0, 0], [2, 1, 0], [0, 1, 0], [1, 0, 0]])
    labels = torch.tensor([0, 0, 1, 1])  # class 2 has no image
    names = ["f1", "precision", "recall", "roc_auc"]
    figures = {name: measure(logits, labels) for name, measure in find_metrics(names).items()}
    assert figures["recall"] == pytest.approx((1 + 0.5) / 2)
    assert figures["precision"] == pytest.approx((2 / 3 + 1) / 2)
    assert figures["f1"] == pytest.approx((0.8 + 2 / 3) / 2)
    assert figures["roc_auc"] == pytest.approx((1 + 0.75) / 2)


def test_a_missing_torchmetrics_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics.functional.classification", None)
    with pytest.raises(
        ConfigError, match=r"need torchmetrics: `pip install 'mpt-trainer\[metrics\]'`"
    ):
        of_torchmetrics("multiclass_f1_score")
