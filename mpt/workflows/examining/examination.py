"""The doctor's examinations: the machine, the data, the numerics and the speed of a configuration or a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpt.config.checking.precision_names import FLOAT32
from mpt.config.load import change_precision
from mpt.config.schema import Config
from mpt.errors import ConfigError, MptError
from mpt.outside.own_code import explain
from mpt.run.records.layout import RunDirectory

if TYPE_CHECKING:
    from mpt.doctor.findings import Section
    from mpt.seams import Dataset

MOST_INPUTS = 64
"""Samples of the batch that is followed to the network."""
PARTS = ("environment", "data", "numerics", "speed")
DEVICE = "device"
"""Takes minutes, and is examined only if it is asked for."""
WITHOUT_SUBJECT = ("environment", DEVICE)
DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Point:
    """A step of a training whose weights are examined; without a path it is the beginning."""

    step: int
    path: Path | None


BEGINNING = Point(0, None)


@dataclass(frozen=True)
class Wish:
    """How a subject is examined."""

    subject: str = "CONFIG"
    """Its name, for advice."""
    dtype: str | None = None
    """The dtype in which a mode that may choose is examined; on a CPU float16, as on most GPUs."""
    batch_size: int | None = None
    """Samples of the step whose numerics are examined."""
    runs: Path = Path("runs")
    device: str = "auto"
    """The one that is checked, for the device part."""
    device_file: Path = Path("device.json")
    """The file to which the device part writes its findings."""


def check_parts(wanted: Sequence[str], *, has_subject: bool) -> Sequence[str]:
    """Return the parts that are asked for. Raises ConfigError for one that there is not."""
    for part in wanted:
        if part not in (*PARTS, DEVICE):
            raise ConfigError(f"--only: found {part!r}; allowed are {', '.join((*PARTS, DEVICE))}")
        if part not in WITHOUT_SUBJECT and not has_subject:
            raise ConfigError(f"mpt doctor --only {part}: name a configuration or a run to examine")
    return wanted


def check_dtype(dtype: str | None) -> None:
    """Raise ConfigError for a `--dtype` that is none."""
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"--dtype: found {dtype!r}; allowed are {', '.join(DTYPES)}")


def examine_parts(
    wanted: Sequence[str], wish: Wish, config: Config | None, points: Sequence[Point]
) -> list[Section]:
    """Examine each part, whatever becomes of the others: one that raises is a fault of its own section.

    Raises the first error if no part of the configuration could be examined, or if it was the only one asked for, and
    ConfigError for a wrong dtype.
    """
    from mpt.doctor.findings import Section

    check_dtype(wish.dtype)
    sections, failures = [], []
    for part in wanted:
        try:
            sections.append(timed(lambda part=part: examine_part(part, wish, config, points)))  # type: ignore[misc]
        except Exception as error:
            if part in WITHOUT_SUBJECT:
                raise
            reason = str(error) if isinstance(error, MptError) else explain(error)
            if reason is None:
                raise
            if part == "speed" and config is not None and (patch := patch_of(sections)):
                sections.append(speed_with(patch, wish, config))
                continue
            failures.append(error)
            section = Section(part)
            advice = f"`mpt doctor {wish.subject} --only {part}` says more"
            section.add("fault", part, f"could not be examined: {reason.splitlines()[0]}", advice)
            sections.append(section)
    if failures and len(failures) == len([part for part in wanted if part not in WITHOUT_SUBJECT]):
        raise failures[0]
    return sections


def patch_of(sections: Sequence[Section]) -> Mapping[str, Any]:
    """Return the settings of the cure that was tried; none if the numerics needed none."""
    return next(
        (row["patch"] for section in sections for row in section.tables.get("cure", ())), {}
    )


def speed_with(patch: Mapping[str, Any], wish: Wish, config: Config) -> Section:
    """Measure the speed of a step that raises without the numerics' cure."""
    from mpt.doctor.numerics.cure import patched

    section = timed(lambda: examine_part("speed", wish, patched(config, patch), ()))
    section.add(
        "note", "speed", "measured with the cure of the numerics: the step raises without it"
    )
    return section


def timed(examine: Callable[[], Section]) -> Section:
    """Return a section with the seconds that it took."""
    started = time.perf_counter()
    section = examine()
    section.seconds = time.perf_counter() - started
    return section


def examine_part(part: str, wish: Wish, config: Config | None, points: Sequence[Point]) -> Section:
    """Run one part."""
    from mpt.engine.building.build import build_datasets, build_run
    from mpt.engine.building.devices import choose_device

    if part == "environment":
        from mpt.doctor.machine.environment import examine_environment

        # refuses a device that is not there
        choose_device(config.train.device if config is not None else wish.device)
        return examine_environment(config.train.batch_size if config is not None else 8, wish.runs)
    if part == DEVICE:
        from mpt.doctor.card.section import examine_device

        return examine_device(choose_device(wish.device), wish.device_file)
    assert config is not None
    train_data, test_data = build_datasets(config)
    if part == "data":
        return examine_data_of(config, train_data, test_data)
    device = choose_device(config.train.device)
    if part == "speed":
        from mpt.doctor.speed import examine_speed
        from mpt.engine.loop.assembly import supply_batches

        loader = supply_batches(config, train_data, workers=config.dataset.settings.workers)
        return examine_speed(build_run(config, device, train_data.spec), loader)
    return examine_numerics(wish, config, train_data, points)


def examine_data_of(config: Config, train: Dataset, test: Dataset) -> Section:
    """Look at both sets, and at a batch as it reaches the network."""
    from mpt.doctor.data.data_checks import examine_data
    from mpt.doctor.data.network_inputs import examine_inputs
    from mpt.doctor.numerics.subject import without_augmentation
    from mpt.engine.building.build import build_datasets, build_run
    from mpt.engine.building.devices import choose_device
    from mpt.engine.loop.assembly import supply_batches

    plain = without_augmentation(config)
    if plain is config:
        section = examine_data(train, test)
    else:
        section = examine_data(build_datasets(plain)[0], test, augmented=train)
    float32 = change_precision(config, FLOAT32)
    try:
        size = min(config.train.batch_size, MOST_INPUTS)
        batch = next(iter(supply_batches(config, train, batch_size=size).batches(0)))
        examine_inputs(
            section, build_run(float32, choose_device(config.train.device), train.spec), batch
        )
    except (MptError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, MptError) else explain(error) or str(error)
        section.add("note", "network", f"no batch reached it: {reason.splitlines()[0]}")
    return section


def examine_numerics(wish: Wish, config: Config, data: Dataset, points: Sequence[Point]) -> Section:
    """Take the step of each point in float32 and in the run's mode, and look for a cure of the faults."""
    from mpt.doctor.numerics.numerics_section import describe_numerics
    from mpt.doctor.numerics.subject import Subject, as_on_a_gpu
    from mpt.engine.building.devices import choose_device
    from mpt.engine.loop.assembly import supply_batches
    from mpt.run.checkpoints import checkpoint

    device = choose_device(config.train.device)
    if device.type == "cpu" or wish.dtype:
        config = as_on_a_gpu(config, wish.dtype)
    size = min(config.train.batch_size, wish.batch_size or config.train.batch_size)
    loader = supply_batches(config, data, batch_size=size)
    subjects = []
    for point in points:
        weights = None if point.path is None else checkpoint.load(point.path).state
        batch = next(iter(loader.batches(point.step)))
        subjects.append(
            Subject(
                config, data.spec, batch, device, weights, point.step, loader.indices(point.step)[0]
            )
        )
    return describe_numerics(*subjects)


def choose_points(directory: RunDirectory, chosen: Path | None, count: int) -> list[Point]:
    """Return the steps of a run to examine: the chosen checkpoint alone, or up to `count`, the newest among them."""
    from mpt.run.checkpoints import checkpoint
    from mpt.run.checkpoints.retention import list_steps

    if chosen is not None:
        return [Point(checkpoint.load(chosen).step, chosen)]
    newest = checkpoint.load(directory)
    for note in newest.notes:
        print(f"warning: {note}", file=sys.stderr)
    earlier = [step for step in list_steps(directory) if 0 < step < newest.step]
    between = min(count - 2, len(earlier))
    kept = [
        earlier[round((index + 1) * len(earlier) / (between + 1)) - 1]
        for index in range(max(0, between))
    ]
    points = [BEGINNING] if count > 1 else []
    points += [Point(step, directory.checkpoint_path(step)) for step in dict.fromkeys(kept)]
    return [*points, Point(newest.step, newest.path)]
