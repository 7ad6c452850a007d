"""`mpt doctor`: the machine, the data, the numerics of a model and its speed, each with what to do.

A configuration is examined as it begins; a run at several points, with the weights of its checkpoints. The cure of a
numerical fault is written as a patch for `mpt train CONFIG --with FILE` after it was tried.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpt.commands.cli.arguments import DoctorArguments
from mpt.config.layers import write_override
from mpt.config.load import change_precision, load_config
from mpt.config.own_code import explain
from mpt.config.precision_names import FLOAT32
from mpt.config.schema import Config
from mpt.config.yaml_text import write_text
from mpt.errors import ConfigError, MptError, NonFiniteError
from mpt.run.process.files import write_atomically
from mpt.run.records.layout import RunDirectory, find_run
from mpt.workflows.sides import is_config

if TYPE_CHECKING:
    from mpt.doctor.findings import Section
    from mpt.seams import Dataset

MOST_INPUTS = 64
"""Samples of the batch that is followed to the network."""
PARTS = ("environment", "data", "numerics", "speed")
MARKS = {"ok": "ok", "note": "note", "warning": "WARN", "fault": "FAULT"}


@dataclass(frozen=True)
class Point:
    """A step of a training whose weights are examined; without a path it is the beginning."""

    step: int
    path: Path | None


BEGINNING = Point(0, None)


def run(arguments: DoctorArguments) -> None:
    """Examine what is asked for. Raises NonFiniteError (exit 6) when a fault was found."""
    from mpt.doctor.findings import worst_of
    from mpt.doctor.page import write_page

    wanted = read_parts(arguments)
    config, directory, points, subject = read_subject(arguments)
    sections = examine_parts(wanted, arguments, config, points)
    written = write_cure(arguments, sections)
    if directory is not None and "numerics" in wanted:
        write_atomically(directory.doctor_path, json.dumps({"sections": [one.to_record() for one in sections]}) + "\n")
    if arguments.json:
        print(json.dumps({"subject": subject, "sections": [one.to_record() for one in sections], "written": written}))
    else:
        for section in sections:
            print_section(section)
        for path in written:
            print(f"wrote {path}: the cure, tried; train with --with {path}")
    if arguments.page:
        write_page(Path(arguments.page), subject, sections)
        print(f"wrote {arguments.page}", file=sys.stderr if arguments.json else sys.stdout)
    if worst_of(sections) == "fault":
        faults = [one for section in sections for one in section.findings if one.level == "fault"]
        count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
        raise NonFiniteError(f"doctor: {count}, first {faults[0].about}: {faults[0].text}")


def read_parts(arguments: DoctorArguments) -> Sequence[str]:
    """Return the parts that are asked for. Raises ConfigError for one that there is not."""
    wanted = arguments.only or (PARTS if arguments.subject is not None else ("environment",))
    for part in wanted:
        if part not in PARTS:
            raise ConfigError(f"--only: found {part!r}; allowed are {', '.join(PARTS)}")
        if part != "environment" and arguments.subject is None:
            raise ConfigError(f"mpt doctor --only {part}: name a configuration or a run to examine")
    return wanted


def read_subject(
    arguments: DoctorArguments,
) -> tuple[Config | None, RunDirectory | None, Sequence[Point], str]:
    """Return the configuration, the run, the points of its training to examine, and what is examined in words."""
    if arguments.subject is None:
        return None, None, [], "this machine"
    path = Path(arguments.subject)
    overrides = list(arguments.overrides)
    if arguments.device is not None:
        overrides.append(write_override("train.device", arguments.device))
    if is_config(arguments.subject):
        config = load_config(path, overrides, allow=arguments.allow, patches=arguments.patches)
        return config, None, [BEGINNING], str(path)
    from mpt.run.checkpoints import checkpoint
    from mpt.run.checkpoints.retention import list_steps

    directory, chosen = find_run(arguments.subject, Path(arguments.runs))
    config = load_config(directory.config_path, overrides, allow=arguments.allow, patches=arguments.patches)
    if chosen is None:
        newest = checkpoint.load(directory)
        for note in newest.notes:
            print(f"warning: {note}", file=sys.stderr)
        earlier = [step for step in list_steps(directory) if 0 < step < newest.step]
        count = min(arguments.points - 2, len(earlier))
        kept = [earlier[round((index + 1) * len(earlier) / (count + 1)) - 1] for index in range(max(0, count))]
        points = [BEGINNING] if arguments.points > 1 else []
        points += [Point(step, directory.checkpoint_path(step)) for step in dict.fromkeys(kept)]
        points.append(Point(newest.step, newest.path))
    else:
        loaded = checkpoint.load(chosen)
        points = [Point(loaded.step, chosen)]
    return config, directory, points, f"{directory.path} at step {', '.join(str(point.step) for point in points)}"


def examine_parts(
    wanted: Sequence[str], arguments: DoctorArguments, config: Config | None, points: Sequence[Point]
) -> list[Section]:
    """Examine each part, whatever becomes of the others: one that raises is a fault of its own section.

    Raises what was raised if no part of the configuration could be examined, or if it was the only one asked for.
    """
    from mpt.doctor.findings import Section

    sections, failures = [], []
    for part in wanted:
        try:
            sections.append(timed(lambda part=part: examine_part(part, arguments, config, points)))  # type: ignore[misc]
        except Exception as error:
            if part == "environment":
                raise
            reason = str(error) if isinstance(error, MptError) else explain(error)
            if reason is None:
                raise
            failures.append(error)
            section = Section(part)
            advice = f"`mpt doctor {arguments.subject} --only {part}` says more"
            section.add("fault", part, f"could not be examined: {reason.splitlines()[0]}", advice)
            sections.append(section)
    if failures and len(failures) == len([part for part in wanted if part != "environment"]):
        raise failures[0]
    return sections


def timed(examine: Callable[[], Section]) -> Section:
    """Return a section with the seconds that it took."""
    started = time.perf_counter()
    section = examine()
    section.seconds = time.perf_counter() - started
    return section


def examine_part(part: str, arguments: DoctorArguments, config: Config | None, points: Sequence[Point]) -> Section:
    """Run one part."""
    from mpt.engine.building.build import build_datasets, build_run
    from mpt.engine.building.devices import choose_device

    if part == "environment":
        from mpt.doctor.environment import examine_environment

        choose_device(config.train.device if config is not None else "auto")  # refuses what is not there
        return examine_environment(config.train.batch_size if config is not None else 8, Path(arguments.runs))
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
    return examine_numerics(arguments, config, train_data, points)


def examine_data_of(config: Config, train: Dataset, test: Dataset) -> Section:
    """Look at both sets, and at a batch where it reaches the network."""
    from mpt.doctor.data_checks import examine_data
    from mpt.doctor.network_inputs import examine_inputs
    from mpt.doctor.subject import without_augmentation
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
        examine_inputs(section, build_run(float32, choose_device(config.train.device), train.spec), batch)
    except (MptError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, MptError) else explain(error) or str(error)
        section.add("note", "network", f"no batch reached it: {reason.splitlines()[0]}")
    return section


def examine_numerics(arguments: DoctorArguments, config: Config, data: Dataset, points: Sequence[Point]) -> Section:
    """Take the step of each point in float32 and in the run's mode, and look for a cure of what is wrong."""
    from mpt.doctor.numerics_section import describe_numerics
    from mpt.doctor.subject import Subject, as_on_a_gpu
    from mpt.engine.building.devices import choose_device
    from mpt.engine.loop.assembly import supply_batches
    from mpt.run.checkpoints import checkpoint

    device = choose_device(config.train.device)
    if device.type == "cpu" or arguments.dtype:
        config = as_on_a_gpu(config, arguments.dtype)
    size = min(config.train.batch_size, arguments.batch_size or config.train.batch_size)
    loader = supply_batches(config, data, batch_size=size)
    subjects = []
    for point in points:
        weights = None if point.path is None else checkpoint.load(point.path).state
        batch = next(iter(loader.batches(point.step)))
        subjects.append(Subject(config, data.spec, batch, device, weights, point.step, loader.indices(point.step)[0]))
    return describe_numerics(*subjects)


def write_cure(arguments: DoctorArguments, sections: Sequence[Section]) -> list[str]:
    """Write the patch that a section offers."""
    for section in sections:
        for row in section.tables.get("cure", ()):
            path = Path(arguments.output or "doctor.yaml")
            text = f"# {row['cure']}\n# found by mpt doctor {arguments.subject}\n{write_text(row['patch'])}"
            write_atomically(path, text)
            return [str(path)]
    return []


def print_section(section: Section) -> None:
    """Print a section's findings, those that matter with what to do."""
    print(f"{section.name} ({section.seconds:.1f} s)")
    for one in section.findings:
        print(f"  {MARKS[one.level]:5s} {one.about}: {one.text}")
        if one.advice:
            print(f"        {one.advice}")
