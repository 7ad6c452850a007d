"""A finished run, built again for inference: its own configuration, weights from a checkpoint, no optimizer steps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.data.loading.absent import AbsentDataset
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.building.devices import choose_device
from mpt.engine.state.state import restore_trained
from mpt.errors import CheckpointError, ConfigError, DataError
from mpt.run.checkpoints import checkpoint
from mpt.run.checkpoints.choice import Wanted, load_wanted
from mpt.run.records.data_layout import read_layout
from mpt.run.records.ending import newest_finished_run
from mpt.run.records.layout import RunDirectory, find_run
from mpt.run.records.used_parts import changed_parts, missing_parts_explained
from mpt.seams import Dataset, Run

MOST_CLASSES = 8
"""Classes named in a message."""


@dataclass
class Trained:
    """The parts of a run that inference needs."""

    directory: RunDirectory
    config: Config
    run: Run
    train_data: Dataset
    test_data: Dataset
    loaded: checkpoint.LoadedCheckpoint


def open_datasets(config: Config, directory: RunDirectory) -> tuple[Dataset, Dataset]:
    """Build the run's data sets, or stand-ins without samples if they are not here."""
    try:
        return build_datasets(config)
    except DataError as error:
        layout = read_layout(directory.data_path)
        if layout is None:
            raise
        absent = AbsentDataset(layout, str(error))
        return absent, absent


def tell_notes(loaded: checkpoint.LoadedCheckpoint) -> None:
    """Say on standard error which checkpoints were passed over, why, and which one is used instead."""
    for note in loaded.notes:
        print(f"warning: {note}", file=sys.stderr)


def refuse_wish(which: Wanted, chosen: Path) -> None:
    """Raise ConfigError if a checkpoint was named and another one asked for."""
    if which is not None:
        raise ConfigError(
            f"--best, --newest and --step choose a checkpoint of a run, and {chosen} is one: name the run."
        )


def other_classes(directory: RunDirectory, classes: Sequence[str]) -> str:
    """Return a sentence on a data set's classes that are not those that a run was trained on, empty if they are."""
    layout = read_layout(directory.data_path)
    if layout is None or not layout.classes or list(layout.classes) == list(classes):
        return ""
    here, trained = (
        ", ".join(some[:MOST_CLASSES])
        + f" and {len(some) - MOST_CLASSES} more" * (len(some) > MOST_CLASSES)
        for some in (classes, layout.classes)
    )
    return f"the data set's classes are {here or 'none'}, and {directory.path} was trained on {trained}"


def open_trained(
    wanted: str | None,
    runs: Path,
    device_name: str = "auto",
    overrides: tuple[str, ...] = (),
    allow: tuple[str, ...] = (),
    which: Wanted = None,
) -> Trained:
    """Build the named run (a run's name or folder, or a checkpoint's folder; by default the newest finished one)
    with its weights, those of the best checkpoint unless `which` or the name says another.

    Which it is goes to standard error. A data set that is not here is no hindrance if the run remembers its layout:
    fetching from it is a DataError.
    Raises CheckpointError when there is none or its checkpoints are refused.
    """
    chosen: Path | None = None
    if wanted:
        directory, chosen = find_run(wanted, runs)
    else:
        directory, warning = newest_finished_run(runs)
        print(
            f"run {directory.path}" if warning is None else f"warning: {warning}", file=sys.stderr
        )
    if not directory.config_path.is_file():
        raise CheckpointError(f"{directory.path}: no config.yaml in it; it is not a run's folder")
    with missing_parts_explained(directory.path):
        config = load_config(directory.config_path, overrides, allow=allow)
    train_data, test_data = open_datasets(config, directory)
    run = build_run(config, choose_device(device_name), train_data.spec, trains=False)
    if chosen is not None:
        refuse_wish(which, chosen)
        loaded, words = checkpoint.load(chosen), ""
    else:
        loaded, words = load_wanted(directory, which, run.task.metric)
    others = other_classes(directory, train_data.spec.classes)
    try:
        restore_trained(run, loaded.state)
    except CheckpointError as error:
        if not others:
            raise
        raise CheckpointError(f"RUN: {others}; its network does not fit them") from error
    if others:
        print(f"warning: {others}", file=sys.stderr)
    tell_notes(loaded)
    if words:
        print(f"weights of {words}", file=sys.stderr)
    changed = changed_parts(directory.parts_path)
    if changed:
        print(
            f"warning: parts changed since {directory.path} was trained: {', '.join(changed)}",
            file=sys.stderr,
        )
    return Trained(directory, config, run, train_data, test_data, loaded)
