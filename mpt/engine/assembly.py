"""From a configuration to everything that its training needs and that can be refused before a folder is made.

Device, data, networks and the rest of the built run, in the order in which a mistake is cheapest to find.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mpt.config.schema import Config
from mpt.data.loader import Loader
from mpt.engine.build import build_datasets, build_run
from mpt.engine.devices import choose_device
from mpt.engine.early_stopping import Rule
from mpt.engine.faults import is_out_of_memory, out_of_memory_reason
from mpt.engine.training import Training
from mpt.errors import MemoryBudgetError
from mpt.parallel.world import ALONE, World
from mpt.run.boards import Boards, check_installed
from mpt.run.console import Console
from mpt.run.layout import RunDirectory
from mpt.run.recorder import Recorder
from mpt.seams import Dataset, DataSpec, Run


@dataclass(frozen=True)
class Supply:
    """What a training takes its batches from, and how long it is."""

    device: torch.device
    train_data: Dataset
    test_data: Dataset
    loader: Loader
    total_steps: int


def supply(config: Config, world: World = ALONE) -> Supply:
    """Choose the device and open the data. Raises what is the user's to mend."""
    check_installed(board_names(config))
    device = choose_device(world.choose_device(config.train.device))
    train_data, test_data = build_datasets(config)
    loader = Loader(
        train_data,
        config.train.batch_size,
        config.seed,
        workers=config.dataset.settings.workers,
        pin_memory=device.type == "cuda",
        place=world.place,
        sampling=config.dataset.settings.sampling,
    )
    steps = config.train.steps or max(1, round((config.train.epochs or 0) * loader.steps_per_epoch))
    return Supply(device, train_data, test_data, loader, steps)


def build_explained(
    config: Config, device: torch.device, data: DataSpec, restores: bool = False, world: World = ALONE
) -> Run:
    """Build the run.

    Raises MemoryBudgetError where not even the weights find room, ConfigError where settings do not go with the task.
    """
    try:
        run = build_run(config, device, data, restores=restores, world=world)
        if config.train.early_stopping is not None:
            Rule(config.train.early_stopping, run.task)
        return run
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = out_of_memory_reason(error)
    raise MemoryBudgetError(
        f"out of memory before the first step ({reason}): the weights alone are too much for {device}. "
        "Use a smaller model, or precision=bf16-sr; `mpt plan CONFIG` says what it needs"
    )


def open_training(
    run: Run, supplied: Supply, directory: RunDirectory, recorder: Recorder, console: Console
) -> Training:
    """Return the training of a built run in its folder, at step 0."""
    names = board_names(run.config) if run.world.is_first else []
    boards = Boards(names, directory, run.config.to_data())
    return Training(
        run, directory, recorder, console, supplied.loader, supplied.test_data, supplied.total_steps, boards
    )


def board_names(config: Config) -> list[str]:
    """Return the boards that a run writes to, each once."""
    tensorboard = ["tensorboard"] if config.train.tensorboard else []
    return list(dict.fromkeys([*tensorboard, *config.train.boards]))
