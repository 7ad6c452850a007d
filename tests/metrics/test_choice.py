"""A metric is found by its file's name, and every file that offers one keeps the contract."""

import pytest
import torch

from mpt.config.registry import INSTALLED
from mpt.errors import ConfigError
from mpt.metrics.choice import find_metrics


def test_a_name_without_a_file_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"no metric 'top_6'; there are .*top_five"):
        find_metrics(["top_6"])


@pytest.mark.parametrize("name", ["os", "accuracy", "../accuracy", "choice"])
def test_only_files_with_a_measure_are_metrics(name):
    with pytest.raises(ConfigError, match="no metric"):
        find_metrics([name])


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
