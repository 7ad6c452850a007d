"""A comparison: configurations with the same seeds and data order, and a verdict.

Every run is a process of its own, started as a user would start it. Modes change global state (TF32, deterministic
kernels, cuDNN's chosen algorithms) and the allocator's reserve only grows, so within one process the second mode
would be measured in the first one's remains. Seeds are the outer loop and the sides of the comparison the inner one,
turned round for every other seed, so that a machine that grows warm or busy meets all alike. The number that run at a
time is chosen in `mpt.workflows.comparing.compare_jobs`; a run leaves the same weights whatever runs alongside.

Going on after an interruption needs no state: a run that is finished is there, one that was interrupted is resumed
from its checkpoint, and one that diverged left a note. The folder is found again by its config, which must be the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mpt.config.schema import Config
from mpt.errors import ConfigError, InputOutputError, Interrupted, MptError
from mpt.foreign.files import LARGEST_RECORD_BYTES, read_json, read_text
from mpt.report.comparing.comparison import Comparison, compare_groups
from mpt.report.comparing.groups import Group, group_runs
from mpt.report.comparing.sequential import FEWEST, looks
from mpt.report.comparing.statistics import Margin
from mpt.report.comparison_pages.comparison_page import write_comparison
from mpt.report.reading.read_run import read_run
from mpt.report.reading.run_record import RunRecord
from mpt.report.units import show_bytes, show_figure, show_seconds
from mpt.run.process.files import write_atomically
from mpt.run.records.layout import check_name
from mpt.workflows.comparing.compare_jobs import Jobs, choose_jobs
from mpt.workflows.comparing.compare_progress import announce, probe, shown
from mpt.workflows.comparing.compare_sides import Sides
from mpt.workflows.processes.training_process import (
    Check,
    Surroundings,
    Train,
    check_in_process,
    train_in_process,
)
from mpt.workflows.processes.turns import HostMemory, Stop, take_turns

BASE_CONFIG = "base.yaml"
NOT_FINITE, NO_MEMORY = 6, 7
"""Exit codes that are a result of the mode, not a mistake of the user: such a run counts as diverged."""


def compare(
    sides: Sides,
    *,
    margin: str = "1%",
    seeds: int | None = None,
    until_decided: bool = False,
    max_seeds: int = 16,
    jobs: int | None = None,
    name: str | None = None,
    output: Path | None = None,
    runs: Path = Path("runs"),
    quiet: bool = False,
    train: Train | None = None,
    check: Check | None = None,
) -> tuple[Comparison, Path]:
    """Train each side with the same seeds, write the comparison, and return it with its folder.

    `jobs` is how many at a time, by default the number of `choose_jobs`. Tests replace `train` and `check`: by
    default each is a process of its own. Raises ConfigError for numbers that make no comparison.
    """
    wanted = Margin.parse(margin)
    if jobs is not None and jobs < 1:
        raise ConfigError(f"--jobs: found {jobs}; allowed is 1 or more.")
    counts, most = rounds(
        seeds, max_seeds, until_decided=until_decided or (sides.is_demo and seeds is None)
    )
    with opened_folder(sides, output, name, runs) as folder:
        chosen = (
            choose_jobs(list(sides.configs.values()), counts[-1], jobs)
            if train is None
            else Jobs(jobs or 1, "")
        )
        told: set[str] = set()
        if train is None and not quiet:
            print(describe_start(sides, folder, counts, chosen), flush=True)
        trainer = Trainer(folder, sides, chosen, train, check)
        for count in counts:
            groups = run_sides(trainer, count, told, quiet=quiet)
            comparison = compare_groups(groups, wanted, most, models_differ=sides.models_differ)
            if comparison.is_decided:
                break
        write_comparison(folder, comparison)
    return comparison, folder


def compare_finished(
    records: Sequence[RunRecord],
    margin: str,
    output: Path | None = None,
    name: str | None = None,
    runs: Path = Path("runs"),
) -> tuple[Comparison, Path]:
    """Compare runs that are there, write the comparison, and return it with its folder.

    That is `output`, else `name` below `runs`, by default one alongside the first run.
    """
    if name:
        check_name(name)
    first = runs / name if name else records[0].path.parent / f"compare-{records[0].name}"
    models_differ = len({record.model for record in records} - {""}) > 1
    comparison = compare_groups(
        group_runs(records), Margin.parse(margin), models_differ=models_differ
    )
    folder = output or free_folder(records, first)
    write_comparison(folder, comparison)
    return comparison, folder


def free_folder(records: Sequence[RunRecord], first: Path) -> Path:
    """Return the folder of the comparison of just these runs: the one that is there, else one that is not."""
    wanted = {str(record.path.resolve()) for record in records}
    for number in itertools.count(1):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        if not folder.exists() or compared_runs(folder) == wanted:
            return folder
    raise AssertionError("there is always a next number")


def compared_runs(folder: Path) -> set[str]:
    """Return the paths of the runs that a comparison's folder is about; nothing if that cannot be read."""
    try:
        modes = json.loads((folder / "comparison.json").read_text("utf-8"))["modes"]
        return {str(Path(run["path"]).resolve()) for mode in modes for run in mode["runs"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()


def rounds(
    seeds: int | None, max_seeds: int, *, until_decided: bool
) -> tuple[Sequence[int], int | None]:
    """Return the numbers of seeds after which is looked, and the most of a sequential test; None for a single look."""
    if seeds is not None and seeds < 1:
        raise ConfigError(f"--seeds: found {seeds}; allowed is 1 or more, 3 or more for a verdict.")
    if not until_decided:
        return [seeds or FEWEST], None
    if max_seeds < FEWEST:
        raise ConfigError(f"--max-seeds: found {max_seeds}; allowed is {FEWEST} or more.")
    if (seeds or 0) > max_seeds:
        raise ConfigError(f"--seeds: found {seeds}, more than the {max_seeds} of --max-seeds.")
    return [look for look in looks(max_seeds) if look >= (seeds or 0)], max_seeds


def describe_start(sides: Sides, folder: Path, counts: Sequence[int], jobs: Jobs) -> str:
    """Log the trainings ahead and their approximate time, from a few steps of the first side."""
    config = next(iter(sides.configs.values()))
    file = folder / "configs" / "pace.yaml"
    write_atomically(file, dataclasses.replace(config, name=None).to_yaml())
    sides.pace = probe(file, sides.granted)
    file.unlink(missing_ok=True)
    said = announce(
        counts[0] * len(sides.configs),
        counts[-1] * len(sides.configs),
        sides.pace,
        partial(jobs.turns, first=len(sides.configs)),
    )
    return f"{', '.join(sides.configs)}: {said}\n{jobs.describe(len(sides.configs))}"


@dataclass
class Trainer:
    """Trains the runs of a comparison, several at a time."""

    folder: Path
    sides: Sides
    jobs: Jobs
    train: Train | None = None
    """In place of processes."""
    check: Check | None = None

    def __post_init__(self) -> None:
        self.memory = HostMemory(is_needed=not self.jobs.cards)

    def surroundings(self, slot: int, stop: Stop, *, beside: bool) -> Surroundings:
        """Return a process's environment."""
        environment = self.jobs.environment(slot, beside=beside)
        return Surroundings(self.sides.granted, environment, stop, self.memory)

    def perform_all(
        self,
        order: Sequence[tuple[int, str]],
        count: int,
        ended: Callable[[int, str, str | None], None],
    ) -> None:
        """Train (seed, label) pairs, `count` at a time; `ended` is called with each and why it diverged, if it did."""

        def one(index: int, slot: int, stop: Stop) -> str | None:
            seed, label = order[index]
            name = self.sides.run_name(label, seed)
            config = dataclasses.replace(self.sides.configs[label], seed=seed, name=name)
            train = self.train or train_in_process(self.surroundings(slot, stop, beside=count > 1))
            return perform(self.folder, name, config, train)

        works = [partial(one, index) for index in range(len(order))]
        take_turns(
            works, count, lambda index, failure: ended(*order[index], failure), self.memory.allows
        )

    def check_later_sides(self, seed: int) -> None:
        """Build the sides behind the first, which is about to be trained: one that this model or device refuses should
        say so now and not after the others' hours.
        """
        names = []
        for label in self.sides.checked:
            name = self.sides.run_name(label, seed)
            if (
                not (self.folder / name).exists()
                and not (self.folder / f"{name}.failed.json").exists()
            ):
                config = dataclasses.replace(self.sides.configs[label], seed=seed, name=name)
                write_atomically(self.folder / "configs" / f"{name}.yaml", config.to_yaml())
                names.append(name)

        def one(name: str, slot: int, stop: Stop) -> None:
            check = self.check or check_in_process(self.surroundings(slot, stop, beside=False))
            code, words = check(self.folder / "configs" / f"{name}.yaml")
            if code not in (NOT_FINITE, NO_MEMORY):  # these are results, and counted as such
                raise_failure(name, code, words)

        take_turns(
            [partial(one, name) for name in names], self.jobs.count, lambda index, done: None
        )


def run_sides(trainer: Trainer, count: int, told: set[str], *, quiet: bool) -> list[Group]:
    """Train every side with `count` seeds if it was not done yet; return the groups. `told` are the runs whose
    result was printed.
    """
    sides, folder, jobs = trainer.sides, trainer.folder, trainer.jobs
    labels = list(sides.configs)
    seeds = [sides.base.seed + index for index in range(count)]
    order = [
        (seed, label)
        for index, seed in enumerate(seeds)
        for label in (labels if index % 2 == 0 else reversed(labels))
    ]
    trainer.check_later_sides(seeds[0])
    records: dict[tuple[int, str], RunRecord] = {}
    failed: dict[str, dict[int, str]] = {label: {} for label in labels}
    steps = {folder / sides.run_name(label, seed): sides.steps(label) for seed, label in order}

    def ended(seed: int, label: str, failure: str | None) -> None:
        name = sides.run_name(label, seed)
        record = records[seed, label] = read_run(folder / name)
        if failure is not None:
            failed[label][seed] = failure
        if not quiet and name not in told:
            print(
                f"[{len(records)}/{len(order)}] {label}, seed {seed}: {failure or describe_run(record)}",
                flush=True,
            )
        told.add(name)

    with shown(steps, quiet=quiet):
        first = len(labels) if jobs.times_alone else 0
        trainer.perform_all(order[:first], 1, ended)
        trainer.perform_all(order[first:], jobs.count, ended)
    return [
        Group(label, {seed: records[seed, label] for seed in seeds}, failed[label])
        for label in labels
    ]


def raise_failure(name: str, code: int, words: str) -> None:
    """Raise the error of an exit code, unless it is 0."""
    if code > 128:
        raise Interrupted(
            f"interrupted during {name}; the same command goes on from here", code - 128
        )
    if code:
        failure = MptError(f"{name} failed: {words}")
        failure.exit_code = code
        raise failure


def describe_run(record: RunRecord) -> str:
    """Say a run's result in one line."""
    beside = f" with {record.at_a_time} at a time" if record.at_a_time > 1 else ""
    return (
        f"{record.metric} {show_figure(record.final)}, {show_seconds(record.step_seconds)} per step{beside}, "
        f"peak {show_bytes(record.step_peak_bytes)}"
    )


@contextlib.contextmanager
def opened_folder(
    sides: Sides, output: Path | None, name: str | None, runs: Path
) -> Iterator[Path]:
    """Yield the folder of this comparison: the one that holds the same config, else a new one.

    One that was made and holds no run yet does not outlast an error.
    """
    folder = find_folder(sides, output, name, runs)
    is_new = not folder.exists()
    try:
        (folder / "configs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputOutputError(
            f"{folder} could not be made: {error.strerror}. Name another one by --output."
        ) from error
    write_atomically(folder / BASE_CONFIG, sides.identity)
    try:
        yield folder
    except BaseException:
        if is_new and {path.name for path in folder.iterdir()} <= {"configs", BASE_CONFIG}:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def find_folder(sides: Sides, output: Path | None, name: str | None, runs: Path) -> Path:
    """Return where a comparison lies, or will lie."""
    text = sides.identity
    if output is not None:
        folder = output
        if (folder / BASE_CONFIG).is_file() and read_text(
            folder / BASE_CONFIG, LARGEST_RECORD_BYTES
        ) != text:
            raise ConfigError(
                f"--output: {folder} holds a comparison of another config; name another folder or remove that one."
            )
    else:
        name = name or sides.name
        check_name(name)
        number = 1
        while True:
            folder = runs / (name if number == 1 else f"{name}-{number}")
            if not folder.exists():
                break
            if (folder / BASE_CONFIG).is_file() and read_text(
                folder / BASE_CONFIG, LARGEST_RECORD_BYTES
            ) == text:
                break
            number += 1
    return folder


def perform(folder: Path, name: str, config: Config, train: Train) -> str | None:
    """Train one run unless it is done. Return why it diverged, None if it did not."""
    note = folder / f"{name}.failed.json"
    path = folder / name
    if note.is_file():
        return str(read_json(note)["message"])
    if path.is_dir():
        if (path / "config.yaml").is_file() and read_run(path).is_finished:
            return None
        if not any((path / "checkpoints").glob("step-*")):
            # stopped before its first checkpoint: there is nothing to continue from
            shutil.rmtree(path)
    file = folder / "configs" / f"{name}.yaml"
    write_atomically(file, config.to_yaml())
    code, words = train(file, folder, name, path.is_dir())
    if code in (NOT_FINITE, NO_MEMORY):
        message = words or ("not finite" if code == NOT_FINITE else "out of memory")
        write_atomically(note, json.dumps({"exit_code": code, "message": message}))
        return message
    raise_failure(name, code, words)
    return None
