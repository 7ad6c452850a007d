"""Prune a trained detector's hidden channels and train it on: mAP before, after and after that."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import safetensors.torch
import torch
import typer
from torch import nn

from mpt.commands.cli.arguments import Device, Runs
from mpt.commands.train import Command as TrainArguments
from mpt.commands.train import train
from mpt.config.load import load_config
from mpt.data.loading.absent import AbsentDataset
from mpt.engine.building.build import build_run
from mpt.engine.state.evaluation import evaluate
from mpt.engine.state.moving_averages import evaluated_module
from mpt.errors import ConfigError, DataError
from mpt.inference.trained import Trained, open_trained
from mpt.report.read_run import read_run
from mpt.run.process.files import write_atomically
from mpt.systems.yolofuse.commands.shared.detection import yolo_detector
from mpt.systems.yolofuse.nn.weights.pruning import narrow

SHOWN = (("map50", "mAP50"), ("map50_95", "mAP50-95"))


@dataclass(frozen=True)
class Command:
    """Prune a detector's hidden channels and train it on.

    Writes a run of its own, with mAP before pruning, after it and after training on.
    """

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)]
    """A run or a checkpoint."""
    overrides: Annotated[tuple[str, ...], typer.Argument(metavar="KEY=VALUE", show_default=False)] = ()
    """Changes for the training after pruning, such as optimizer.lr=1e-3."""
    share: Annotated[float, typer.Option(min=0.05, max=0.95)] = 0.5
    """The share of hidden channels that is kept."""
    steps: Annotated[int, typer.Option(min=1)] = 100
    """Steps to train on."""
    name: str | None = None
    """The new run's folder below --runs; by default RUN-pruned."""
    runs: Runs = "runs"
    device: Device = None


def run(command: Command) -> None:
    """Prune, train on and print the table. Raises ConfigError for a run that is pruned already, DataError for no
    data."""
    trained = open_trained(command.run, Path(command.runs), command.device or "auto")
    task = yolo_detector(trained.run, "mpt yolofuse prune")
    if isinstance(trained.test_data, AbsentDataset):
        raise DataError("pruning needs the run's data set, to train on and to measure; it is not here")
    if trained.config.model.settings.hidden_share < 1:
        raise ConfigError("RUN is pruned already; prune the run that it came from with another --share")
    before = measured(trained, evaluated_module(task, "net"))
    net = copy.deepcopy(evaluated_module(task, "net")).cpu().float()
    narrow(net, command.share)
    folder = Path(trained.directory.path)
    weights = folder / f"pruned-{command.share:g}.safetensors"
    state = {name: value.contiguous() for name, value in net.state_dict().items()}
    write_atomically(weights, safetensors.torch.save(state))
    name = command.name or f"{folder.name}-pruned"
    config = load_config(
        trained.config.to_data(),
        [
            f"model.hidden_share={command.share}",
            f"model.weights={weights}",
            "train.epochs=null",
            f"train.steps={command.steps}",
            f"train.evaluate_every={command.steps}",
            f"train.checkpoint_every={command.steps}",
            f"train.device={trained.run.device}",
            f"name={name}",
            *command.overrides,
        ],
    )
    run = build_run(config, trained.run.device, trained.train_data.spec, trains=False)
    for module in run.task.modules.values():  # the network and its average
        module.load_state_dict(state)
    figures = evaluate(run, trained.test_data, config.train.batch_size)
    pruned = {**figures, "parameters": count(net)}
    path = train(config, TrainArguments(config="config.yaml", runs=command.runs))
    assert path is not None
    final: dict[str, Any] = {**read_run(path).figures, "parameters": count(net)}
    print("| | trained | pruned | trained on |\n|---|---:|---:|---:|")
    print(f"| parameters | {before['parameters']:,} | {pruned['parameters']:,} | {final['parameters']:,} |")
    for key, label in SHOWN:
        print(f"| {label} | {before[key]:.4f} | {pruned[key]:.4f} | {final[key]:.4f} |")


def measured(trained: Trained, net: nn.Module) -> dict[str, Any]:
    """Return a run's figures on its test set, and its number of parameters."""
    with torch.no_grad():
        figures = evaluate(trained.run, trained.test_data, trained.config.train.batch_size)
    return {**figures, "parameters": count(net)}


def count(net: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in net.parameters())
