"""From a configuration to everything that its training needs and that can be refused before a folder is made.

Device, data, networks and the rest of the built run, in the order in which a mistake is cheapest to find.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mpt import accelerator
from mpt.boards.boards import Boards, check_installed
from mpt.boards.console import Console
from mpt.config.schema import Config
from mpt.data.loading.loader import Loader
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.building.devices import choose_device
from mpt.engine.loop.training import Training
from mpt.engine.step.faults import describe_out_of_memory, is_out_of_memory, out_of_memory_reason
from mpt.errors import MemoryBudgetError
from mpt.parallel.world import ALONE, World
from mpt.run.records.layout import RunDirectory
from mpt.run.records.recorder import Recorder
from mpt.seams import Dataset, DataSpec, Run


@dataclass(frozen=True)
class Supply:
    """A training's source of batches, and its length."""

    device: torch.device
    train_data: Dataset
    test_data: Dataset
    loader: Loader
    total_steps: int


def supply(config: Config, world: World = ALONE) -> Supply:
    """Choose the device and open the data. Raises errors that the user can mend."""
    check_installed(board_names(config))
    device = choose_device(world.choose_device(config.train.device))
    train_data, test_data = build_datasets(config)
    loader = supply_batches(
        config, train_data, device, config.dataset.settings.workers, world.place
    )
    return Supply(device, train_data, test_data, loader, count_steps(config, loader))


def supply_batches(
    config: Config,
    data: Dataset,
    device: torch.device | None = None,
    workers: int = 0,
    place: Callable[[int], tuple[int, int]] | None = None,
    batch_size: int | None = None,
) -> Loader:
    """Return the loader of the training's batches: the same batch at each step for every caller.

    For a CUDA `device` they are pinned; `place` is a rank's share of a batch (`World.place`).
    """
    return Loader(
        data,
        config.train.batch_size if batch_size is None else batch_size,
        config.seed,
        workers=workers,
        pin_memory=device is not None and accelerator.has_allocator(device),
        place=place,
        sampling=config.dataset.settings.sampling,
    )


def count_steps(config: Config, loader: Loader) -> int:
    """Return a training's number of steps, from which schedules follow: as configured, or that of its epochs."""
    return config.train.steps or max(1, round((config.train.epochs or 0) * loader.steps_per_epoch))


def build_explained(
    config: Config,
    device: torch.device,
    data: DataSpec,
    restores: bool = False,
    world: World = ALONE,
) -> Run:
    """Build the run.

    Raises MemoryBudgetError if not even the weights find room, ConfigError if settings do not go with the task.
    """
    try:
        return build_run(config, device, data, restores=restores, world=world)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = out_of_memory_reason(error)
    advice = (
        f"the weights alone are too much for {device}{accelerator.held_by_others(device)}. "
        "Use a smaller model, or precision=bf16-sr; `mpt plan CONFIG` says what it needs"
    )
    raise MemoryBudgetError(describe_out_of_memory("before the first step", reason, advice))


def open_training(
    run: Run, supplied: Supply, directory: RunDirectory, recorder: Recorder, console: Console
) -> Training:
    """Return the training of a built run in its folder, at step 0."""
    names = board_names(run.config) if run.world.is_first else []
    boards = Boards(names, directory, run.config.to_data())
    return Training(
        run,
        directory,
        recorder,
        console,
        supplied.loader,
        supplied.test_data,
        supplied.total_steps,
        boards,
    )


def board_names(config: Config) -> list[str]:
    """Return the boards that a run writes to, each once."""
    tensorboard = ["tensorboard"] if config.train.tensorboard else []
    return list(dict.fromkeys([*tensorboard, *config.train.boards]))
