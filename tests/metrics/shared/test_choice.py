"""A metric is found by its file's name, and every file that offers one keeps the contract."""

import sys
from types import SimpleNamespace

import pytest
import torch

from mpt.config.registry import INSTALLED
from mpt.errors import ConfigError
from mpt.metrics.shared.choice import measure_all, metrics_of
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
    with pytest.raises(ConfigError, match=r"widest measures height, which .* keep; it has width"):
        measure_all({"widest": widest}, [{"width": torch.ones(1)}])


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
