"""Networks as a model's build leaves them: in evaluation mode, frozen, with state that no checkpoint holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.engine.state.state import capture
from mpt.errors import ConfigError, PartError
from mpt.seams import Run
from tests.engine.parts import DIGITS

pytestmark = pytest.mark.tier("fast")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(256), nn.Dropout(0.5))
        self.head = nn.Linear(256, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.trunk(image))
        return logits


def run_of(monkeypatch: pytest.MonkeyPatch, change: Any, optimizer: str = "sgd") -> Run:
    """Build a run of a network that is changed after it was made."""
    config = load_config(
        {
            "model": {"name": "small_cnn", "image_size": 16},
            "dataset": "digits",
            "optimizer": optimizer,
            "precision": "fp32",
        }
    )
    net = Net()
    change(net)
    monkeypatch.setattr("mpt.nn.small_cnn.build", lambda settings, data: {"net": net})
    return build_run(config, torch.device("cpu"), DIGITS)


def test_a_network_that_was_built_in_evaluation_mode_is_trained_in_training_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_of(monkeypatch, lambda net: net.eval())
    assert all(module.training for module in run.task.modules["net"].modules())
    assert [
        note for note in run.notes if "net was built in evaluation mode, without dropout" in note
    ]
    run = run_of(monkeypatch, lambda net: net.trunk[1].eval())
    assert not run.task.modules["net"].trunk[1].training, "a part of it is meant"
    assert not any("evaluation mode" in note for note in run.notes)


def test_a_network_of_which_nothing_is_trained_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="network 'net' has no parameter to train: its build"):
        run_of(monkeypatch, lambda net: net.requires_grad_(False))


def test_an_optimizer_that_computes_losses_itself_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "mpt.optim.sgd.build", lambda settings, parameters: torch.optim.LBFGS(parameters)
    )
    with pytest.raises(ConfigError, match="returned a LBFGS, whose step needs closure: it comp"):
        run_of(monkeypatch, lambda net: None)


def test_state_that_is_no_tensor_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def keep(net: Net) -> None:
        monkeypatch.setattr(Net, "get_extra_state", lambda self: {"seen": 3})
        monkeypatch.setattr(Net, "set_extra_state", lambda self, state: None)

    run = run_of(monkeypatch, keep)
    with pytest.raises(
        PartError, match="Net: its state has a dict as '_extra_state'; a checkpoint"
    ):
        capture(run)
