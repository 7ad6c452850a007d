"""One process against two: equal but for the order of sums, and what was planted is named as the first that differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mpt.commands import diff
from mpt.commands.diff import Command as DiffArguments
from mpt.doctor.partings import rank_steps
from mpt.errors import ConfigError, GateError
from mpt.parallel import ranks
from mpt.workflows.examining import rank_comparison
from tests.parallel.forked import run_ranks

OWN_TASK = """
import torch
import torch.distributed as dist
from torch.nn import functional
from mpt.config.options import Options
from mpt.seams import Loss, Phase, Task

class Settings(Options):
    fault: str = ""

class Own(Task):
    metric, higher_is_better = "accuracy", True

    def __init__(self, settings, net):
        self.fault, self.net = settings.fault, net
        net.register_buffer("centre", torch.zeros(()))
        self.modules, self.trainable = {"net": net}, {"net": net}

    def phases(self, optimizers):
        return [Phase("net", self.net, optimizers["net"], self.losses)]

    def losses(self, batch):
        image, label = batch["image"], batch["label"]
        each = functional.cross_entropy(self.net(image), label, reduction="none")
        if self.fault == "divided twice" and dist.is_initialized():
            return (Loss("loss", each.mean() / dist.get_world_size()),)
        if self.fault == "own divisor":
            counts = (label < 4).float()
            return (Loss("loss", (each * counts).sum() / counts.sum()),)
        if self.fault == "own buffer":
            self.net.centre.lerp_(image.mean(), 0.1)
        return (Loss("loss", each.mean()),)

def build(settings, model_settings, modules, data, precision):
    return Own(settings, modules["net"])
"""
BASE: dict[str, Any] = {
    "model": {"name": "small_cnn", "image_size": 16, "features": 4},
    "dataset": "digits",
    "precision": "fp32",
    "train": {"steps": 4, "batch_size": 8, "device": "cpu"},
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Processes are forks of this one, which has imported torch already."""

    def run_group(folder: Path, nproc: int) -> None:
        assert (
            run_ranks(nproc, lambda rank, folder: rank_steps.main(folder), folder) == [None] * nproc
        )

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rank_comparison, "run_group", run_group)
    (tmp_path / "own/tasks").mkdir(parents=True)
    (tmp_path / "own/tasks/own_task.py").write_text(OWN_TASK)
    monkeypatch.setenv("MPT_PARTS", str(tmp_path / "own"))
    return tmp_path


def ask(
    capsys: pytest.CaptureFixture[str], settings: dict[str, Any], *, code: int = 0
) -> dict[str, Any]:
    Path("c.yaml").write_text(yaml.safe_dump({**BASE, **settings}))
    asked = DiffArguments(("c.yaml",), nproc=2, steps=2, json=True)
    if code:
        with pytest.raises(GateError):
            diff.run(asked)
    else:
        diff.run(asked)
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "settings",
    [
        {"task": "own_task"},
        {
            "optimizer": {"name": "sgd", "lr": 0.1},
            "task": {"name": "classify", "class_weights": "balanced"},
        },
    ],
    ids=["own task", "a normalised loss"],
)
def test_two_processes_that_train_what_one_does_raise_no_alarm(
    own: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any]
) -> None:
    told = ask(capsys, settings)
    assert told["beyond"] is None, told
    assert told["steps"] == 2
    assert "BatchNorm or dropout are in evaluation mode" in told["notes"][0]


@pytest.mark.parametrize(
    ("fault", "kind", "where", "reason"),
    [
        (
            "divided twice",
            "loss",
            "loss loss",
            "2 times too small: divided by the number of processes once more",
        ),
        ("own divisor", "loss", "loss loss", "a process divides by a number of its own samples"),
        (
            "own buffer",
            "update",
            "net.centre",
            "the processes hold different ones: not summed over them",
        ),
    ],
)
def test_a_planted_fault_of_several_processes_is_the_first_tensor_that_is_named(
    own: Path, capsys: pytest.CaptureFixture[str], fault: str, kind: str, where: str, reason: str
) -> None:
    beyond = ask(capsys, {"task": {"name": "own_task", "fault": fault}}, code=8)["beyond"]
    assert (beyond["step"], beyond["kind"], beyond["where"]) == (0, kind, where)
    assert beyond["reason"].startswith(reason)


def test_a_gradient_that_is_not_summed_over_the_processes_is_named_with_its_weight(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = ranks.Ranks.exchange

    def without_the_last(self: Any, phase: str, parameters: Any) -> Any:
        return exchange(self, phase, parameters[:-1])

    monkeypatch.setattr(ranks.Ranks, "exchange", without_the_last)
    beyond = ask(capsys, {"task": "own_task"}, code=8)["beyond"]
    assert (beyond["kind"], beyond["where"]) == ("gradient", "gradient of net.head.3.bias")
    assert beyond["reason"] == "the processes hold different ones: not summed over them"


def test_two_configurations_are_not_compared_on_several_processes() -> None:
    with pytest.raises(ConfigError, match="name one configuration"):
        diff.run(DiffArguments(("@lsgan", "@vae"), nproc=2))
