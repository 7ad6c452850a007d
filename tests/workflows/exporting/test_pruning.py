"""`mpt prune` on a GAN: the generator alone becomes narrow, the run trains on, resumes and infers."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import mpt
from mpt.cli import main
from mpt.errors import ConfigError
from mpt.inference.trained import open_trained
from mpt.memory.prune import Settings, build
from mpt.workflows.exporting.pruning import Wishes, prune
from mpt.workflows.training.train import train

SMALL = [
    "model.features=8",
    "model.image_size=16",
    "train.epochs=null",
    "train.steps=2",
    "train.batch_size=8",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    path = train(
        mpt.load("@dcgan_amp", *SMALL, "train.device=cpu", "name=whole"), runs=runs, reports=False
    )
    assert path is not None
    return path


def test_a_pruned_generator_is_trained_on_and_measured(trained: Path) -> None:
    table = prune(str(trained), "cpu", Wishes(0.5, (), 2, None, runs=trained.parent))
    rows = {
        line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:]
        for line in table.splitlines()
    }
    before, pruned, after = rows["parameters"]
    assert pruned == after
    assert int(pruned.replace(",", "")) < 0.6 * int(before.replace(",", ""))
    assert {"frechet_distance", "evaluation, peak", "training step, ms"} <= set(rows)
    narrow = open_trained("whole-pruned", trained.parent, "cpu").run.task.modules
    whole = open_trained("whole", trained.parent, "cpu").run.task.modules
    shapes = [
        {name: value.shape for name, value in one["disc"].state_dict().items()}
        for one in (narrow, whole)
    ]
    assert shapes[0] == shapes[1]
    with pytest.raises(SystemExit) as left:
        main(
            [
                "infer",
                "whole-pruned",
                "--count",
                "2",
                "--runs",
                str(trained.parent),
                "--device",
                "cpu",
            ]
        )
    assert not left.value.code
    with pytest.raises(ConfigError, match="RUN is pruned already"):
        prune("whole-pruned", "cpu", Wishes(0.5, (), 1, None, runs=trained.parent))


def test_a_network_that_is_not_there_or_has_nothing_hidden_is_refused(trained: Path) -> None:
    with pytest.raises(ConfigError, match=r"--network: found 'nothing'; allowed are .*gen"):
        prune(str(trained), "cpu", Wishes(0.5, ("nothing",), 1, "none", runs=trained.parent))
    with pytest.raises(ConfigError, match=r"memory\.prune: no hidden channels to remove in net"):
        build(Settings()).pack_weights({"net": nn.Linear(8, 8)})
