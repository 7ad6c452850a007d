"""Prune a trained run and train it on, measured at each stage: `mpt prune`.

The new run is the old one's configuration with `memory.prune` and `model.weights`, so it resumes, infers, exports and
is planned as any other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mpt.boards.console import Style
from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.data.loading.absent import AbsentDataset
from mpt.engine.building.build import build_run
from mpt.engine.state.evaluation import evaluate
from mpt.errors import ConfigError, DataError
from mpt.inference.trained import Trained, open_trained
from mpt.report.reading.read_run import read_run
from mpt.run.process.memory_meter import MemoryMeter
from mpt.seams import Dataset, Game, Run, Task
from mpt.workflows.training import train as training

TRICK = "prune"
MEBI = 2**20


@dataclass(frozen=True)
class Wishes:
    """How much is kept, of which networks, and how long is trained on."""

    share: float
    networks: tuple[str, ...]
    steps: int
    name: str | None
    overrides: tuple[str, ...] = ()
    runs: Path = Path("runs")
    style: Style = "quiet"


@dataclass(frozen=True)
class Stage:
    """A run at one moment: its figures on the test set, and what evaluating it takes."""

    figures: dict[str, float]
    parameters: int
    """Of the networks that are pruned."""
    peak_bytes: int
    """Live tensors of an evaluation, weights included."""
    seconds: float
    """Of the processor, for an evaluation."""
    step: dict[str, float] = field(default_factory=dict)
    """A training step's peak bytes and seconds, where the run has them."""


def prune(wanted: str, device: str, wishes: Wishes) -> str:
    """Prune a run, train it on, and return a table of all stages.

    Raises ConfigError for a run that is pruned already, DataError for one whose data are not here.
    """
    trained = open_trained(wanted, wishes.runs, device)
    if isinstance(trained.test_data, AbsentDataset):
        raise DataError(
            "pruning needs the run's data set, to train on and to measure; it is not here"
        )
    if TRICK in trained.config.memory.tricks:
        raise ConfigError(
            "RUN is pruned already; prune the run that it came from with another --share"
        )
    networks = wishes.networks or networks_of(trained.run.task)
    for name in networks:
        if name not in trained.run.task.trainable:
            raise ConfigError(
                f"--network: found {name!r}; allowed are {', '.join(trained.run.task.trainable)}"
            )
    before = measure(trained.run, networks, trained.test_data, trained.config)
    config = pruned_config(trained, networks, wishes)
    run = build_run(config, trained.run.device, trained.train_data.spec)
    pruned = measure(run, networks, trained.test_data, config)
    path = training.train(config, runs=wishes.runs, style=wishes.style)
    assert path is not None
    after = open_trained(str(path), wishes.runs, device)
    final = measure(after.run, networks, trained.test_data, config)
    columns = {
        "trained": with_step(before, Path(trained.directory.path)),
        "pruned": pruned,
        f"trained on, {wishes.steps} steps": with_step(final, path),
    }
    return table(columns, str(path))


def networks_of(task: Task) -> tuple[str, ...]:
    """Return the networks that are pruned by default: all that are trained, of a game the generator's alone."""
    if isinstance(task, Game):
        return (
            (task.opponents[1],) if task.opponents[1] in task.trainable else tuple(task.trainable)
        )
    return tuple(task.trainable)


def pruned_config(trained: Trained, networks: Sequence[str], wishes: Wishes) -> Config:
    """Return the configuration of the run that is trained on."""
    folder = Path(trained.directory.path)
    return load_config(
        trained.config.to_data(),
        [
            f"memory.{TRICK}.share={wishes.share}",
            f"memory.{TRICK}.networks=[{', '.join(networks)}]",
            f"model.weights={trained.loaded.path}",
            "train.epochs=null",
            f"train.steps={wishes.steps}",
            f"train.evaluate_every={wishes.steps}",
            f"train.checkpoint_every={wishes.steps}",
            f"train.device={trained.run.device}",
            f"name={wishes.name or f'{folder.name}-pruned'}",
            *wishes.overrides,
        ],
    )


def measure(run: Run, networks: Sequence[str], data: Dataset, config: Config) -> Stage:
    """Evaluate a run twice: for figures and time, and for the peak of memory, whose watch takes time."""
    modules = [run.task.modules[name] for name in networks]
    weights = [parameter for module in modules for parameter in module.parameters()]
    with torch.no_grad():
        begun = time.process_time()
        figures = evaluate(run, data, config.train.batch_size)
        seconds = time.process_time() - begun
        with MemoryMeter(lambda: {"parameters": weights}, run.device) as meter:
            evaluate(run, data, config.train.batch_size)
    count = sum(weight.numel() for weight in weights)
    return Stage(figures, count, meter.split.peak_bytes, seconds)


def with_step(stage: Stage, path: Path) -> Stage:
    """Return a stage with the cost of a training step, as the run's folder has it."""
    record = read_run(path)
    step = {"peak": record.step_peak_bytes, "seconds": record.step_seconds}
    return Stage(stage.figures, stage.parameters, stage.peak_bytes, stage.seconds, step)


def table(columns: dict[str, Stage], path: str) -> str:
    """Return all stages as a table in Markdown."""
    stages = list(columns.values())
    rows: dict[str, list[str]] = {"parameters": [f"{one.parameters:,}" for one in stages]}
    for name in stages[0].figures:
        if "/" not in name:  # figures of single classes or sequences
            rows[name] = [
                f"{one.figures[name]:.4g}" if name in one.figures else "" for one in stages
            ]
    rows["evaluation, peak"] = [f"{one.peak_bytes / MEBI:.1f} MiB" for one in stages]
    rows["evaluation, processor s"] = [f"{one.seconds:.2f}" for one in stages]
    rows["training step, peak"] = [
        f"{one.step['peak'] / MEBI:.1f} MiB" if one.step else "" for one in stages
    ]
    rows["training step, ms"] = [
        f"{1e3 * one.step['seconds']:.0f}" if one.step else "" for one in stages
    ]
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items()]
    return "\n".join([*lines, f"wrote {path}"])
