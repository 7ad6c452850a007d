"""What parts must make is checked where they make it, and said in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mpt.engine.built_parts import Networks, check_figures, check_loss, require
from mpt.errors import ConfigError, PartError
from mpt.seams import Loss, Phase, Precision, Task


class Judged(Task):
    metric = "accuracy"


def test_figures_are_numbers_and_have_the_tasks_metric() -> None:
    assert check_figures(Judged(), {"accuracy": torch.tensor(0.5), "loss": 2}) == {"accuracy": 0.5, "loss": 2.0}


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, r"task Judged: its conclude returned nothing; expected a dict of figures, as in \{'accuracy': 0.9\}"),
        ({"accuracy": "good"}, "returned a str as 'accuracy'; expected a number"),
        ({"accuracy": torch.zeros(2)}, "returned a Tensor as 'accuracy'; expected a number"),
        ({"loss": 1.0}, "returned the figures loss; 'accuracy', the task's metric, is missing"),
    ],
)
def test_figures_that_are_none_are_refused(made: Any, words: str) -> None:
    with pytest.raises(PartError, match=words):
        check_figures(Judged(), made)


def test_what_a_build_returns_must_be_of_its_kind() -> None:
    net = nn.Linear(1, 1)
    assert require("net", net, nn.Module) is net
    with pytest.raises(PartError, match=r"precision mine: its build returned an int; .* mpt.seams.Precision"):
        require("precision mine: its build", 3, Precision)
    with pytest.raises(ConfigError, match=r"task gan wants a network called 'disc'; .* returned 'gen'"):
        Networks("mine", "gan", {"gen": net})["disc"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.5, "found a float; do not call .item"),
        (torch.zeros(3), r"found a tensor of shape \(3,\); take its mean"),
        (torch.zeros(()), "depends on no trained weight"),
    ],
)
def test_a_loss_that_cannot_be_back_propagated_is_said(value: Any, words: str) -> None:
    net = nn.Linear(1, 1)
    phase = Phase("net", net, torch.optim.SGD(net.parameters()), lambda batch: iter(()))
    with pytest.raises(ConfigError, match=words):
        check_loss(Loss("mine", value), phase)
    check_loss(Loss("mine", net(torch.ones(1, 1)).sum()), phase)
