"""The point where two trainings part: two runs by their files, and both trained for some steps side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpt.config.differences import ABSENT, Difference, find_differences
from mpt.errors import CheckpointError, ConfigError
from mpt.report.reading.read_run import read_run
from mpt.report.units import counted
from mpt.run.records.kept_parts import lost_parts, own_parts
from mpt.run.records.layout import find_run
from mpt.run.records.used_parts import changed_parts
from mpt.workflows.comparing.sides import Side, is_config, read_side
from mpt.workflows.examining.examination import check_dtype

if TYPE_CHECKING:
    from mpt.doctor.partings.parting import Comparison
    from mpt.doctor.partings.run_difference import RunDifference

SILENT: tuple[str, ...] = (
    "name",
    "train.log_every",
    "train.checkpoint_every",
    "train.sample_every",
    "train.keep_samples",
    "train.evaluate_every",
)
SILENT += (
    "train.early_stopping",
    "train.keep_last",
    "train.asynchronous_save",
    "train.tensorboard",
    "train.boards",
)
SILENT += ("train.plan_memory", "train.on_end", "dataset.workers")
"""Settings that do not change the result."""


@dataclass(frozen=True)
class Parted:
    """Findings of a comparison of two trainings."""

    first: Side
    second: Side
    differences: list[Difference]
    """Settings that differ and that training sees."""
    files: RunDifference | None
    """Findings from two runs' files; None unless both are runs."""
    replayed: Comparison | None
    """Findings of training both side by side; None if that was not needed."""

    @property
    def verdict(self) -> str:
        """`same`, `rounding`, `apart` or `not finite`."""
        return verdict_of(self.files, self.replayed)

    def lines(self) -> Iterator[str]:
        """Yield the findings in words, a line each."""
        files, replayed = self.files, self.replayed
        yield f"A: {self.first.label}"
        yield f"B: {self.second.label}"
        yield f"settings that differ: {', '.join(map(str, self.differences)) or 'none that training sees'}"
        if files is not None:
            yield from files.lines()
        if replayed is None:
            if files is not None and not files.differs and not files.not_finite:
                yield "the same to the bit, as far as the runs kept it"
            return
        yield f"trained side by side: {counted(replayed.steps, 'step')} from step {replayed.start}"
        for note in replayed.notes:
            yield f"note: {note}"
        if replayed.bits is not None:
            yield f"first difference: {replayed.bits.describe()}"
        elif not_finite_in(files, replayed):
            yield "no difference was seen up to the first loss that is not finite"
        else:
            yield "the same to the bit"
            if files is not None and files.differs:
                where = "; ".join(files.environment) or "it is not recorded what"
                yield f"so what the runs differ in was not the configuration but what they ran on: {where}"
        if replayed.beyond is not None and replayed.beyond is not replayed.bits:
            yield f"beyond rounding: {replayed.beyond.describe()}"
        elif replayed.beyond is not None:
            yield "it is more than rounding"
        elif replayed.bits is not None:
            yield "never more than rounding explains"
        yield from replayed.table()

    def to_record(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {
            "first": self.first.label,
            "second": self.second.label,
            "settings": [dataclasses.asdict(one) for one in self.differences],
            "files": self.files.to_record() if self.files is not None else None,
            "replay": self.replayed.to_record() if self.replayed is not None else None,
            "verdict": self.verdict,
        }


def compare_sides(
    first: Side,
    second: Side,
    *,
    steps: int = 10,
    dtype: str | None = None,
    only_files: bool = False,
) -> Parted:
    """Find the point where two trainings part. Raises ConfigError for two that have nothing in common, and for a dtype
    that is none.
    """
    check_dtype(dtype)
    refuse_strangers(first, second)
    differences = [
        one
        for one in find_differences(first.config.to_data(), second.config.to_data())
        if one.key not in SILENT and not is_default(one)
    ]
    files = compare_files(first, second)
    if only_files and files is not None and not files.can_tell:
        raise ConfigError(
            f"mpt diff: {first.label} and {second.label} kept no log line, evaluation or checkpoint of the same step; "
            "leave out --only-files, and both are trained again"
        )
    known_same = files is not None and files.can_tell and not files.differs and not differences
    replayed = (
        None
        if only_files or known_same
        else replay(steps, dtype, first, second, differences, files)
    )
    return Parted(first, second, differences, files, replayed)


def refuse_strangers(first: Side, second: Side) -> None:
    """Raise ConfigError for trainings of two systems. A task from outside may be a script's step of either."""
    homes = [side.config.task.plugin.package for side in (first, second)]
    if homes[0].name != homes[1].name and not any(home.outside for home in homes):
        said = " and ".join(
            f"{side.label} trains task {side.config.task.name}" for side in (first, second)
        )
        raise ConfigError(
            f"mpt diff: {said}, which have nothing in common; name two trainings of one task"
        )


def is_default(difference: Difference) -> bool:
    """Return whether a setting is absent on one side and says nothing on the other."""
    values = (difference.before, difference.now)
    return ABSENT in values and any(value is None or value == [] for value in values)


def read_with_own_parts(
    word: str, overrides: Sequence[str], runs: Path, allow: Sequence[str]
) -> Side:
    """Return the side that a word names, a run's with the parts that it used, if it kept them."""
    directory = None
    if not is_config(word):
        with suppress(CheckpointError):  # said below
            directory, _ = find_run(word, runs)
    with own_parts(directory):
        return read_side(word, overrides, runs, allow)


def compare_files(first: Side, second: Side) -> RunDifference | None:
    """Compare the files of two runs; None if one of the two is no run."""
    from mpt.doctor.partings.run_difference import compare_runs

    if first.run is None or second.run is None:
        return None
    if first.run.path == second.run.path:
        raise ConfigError(f"mpt diff: {first.label} and {second.label} are the same run")
    return compare_runs(read_run(first.run.path), read_run(second.run.path))


def replay(
    steps: int,
    dtype: str | None,
    first: Side,
    second: Side,
    differences: list[Difference],
    files: RunDifference | None,
) -> Comparison:
    """Train both for some steps side by side."""
    from mpt.doctor.numerics.subject import as_on_a_gpu
    from mpt.doctor.partings.lockstep import Training
    from mpt.doctor.partings.side_by_side import Lockstep
    from mpt.engine.building.build import build_datasets
    from mpt.engine.building.devices import choose_device
    from mpt.run.checkpoints import checkpoint

    trainings, states = [], []
    for side in (first, second):
        config = as_on_a_gpu(side.config, dtype) if dtype else side.config
        code = partial(own_parts, side.run)
        with code():
            training = Training(
                config, choose_device(config.train.device), build_datasets(config)[0]
            )
        training.code = code
        if side.checkpoint is not None:
            states.append(checkpoint.load(side.checkpoint))
        elif files is not None and files.common is not None:
            states.append(files.common)
        trainings.append(training)
    start = 0
    if states:
        if len(states) != 2 or states[0].step != states[1].step:
            raise ConfigError("mpt diff: name two checkpoints of one step, or neither")
        start = states[0].step
        for training, state in zip(trainings, states, strict=True):
            training.restore(state.state)
    found = Lockstep(trainings[0], trainings[1], differences).compare(start, steps)
    found.notes += [
        note
        for letter, side in (("A", first), ("B", second))
        for note in notes_on_parts(letter, side)
    ]
    return found


def notes_on_parts(letter: str, side: Side) -> list[str]:
    """Say with which code a run was trained again, if its parts were edited since."""
    changed = changed_parts(side.run.parts_path) if side.run is not None else []
    if side.run is None or not changed:
        return []
    lost = lost_parts(side.run)
    own = [file for file in changed if file not in lost]
    notes = (
        [f"{letter}: trained again with its own {', '.join(own)}, as the run kept it"]
        if own
        else []
    )
    if lost:
        notes.append(
            f"{letter}: made with another {', '.join(lost)}, which is not kept: trained with the one that is here"
        )
    return notes


def verdict_of(files: RunDifference | None, replayed: Comparison | None) -> str:
    """Return `same`, `rounding`, `apart` or `not finite`."""
    if replayed is not None and replayed.beyond is not None:
        return "apart"
    if not_finite_in(files, replayed):
        return "not finite"
    if replayed is not None and replayed.bits is not None:
        return "rounding"
    if files is not None and files.differs:
        return "apart"
    return "same"


def not_finite_in(files: RunDifference | None, replayed: Comparison | None) -> dict[str, Any]:
    """Return step and name of the first loss that is finite in neither, in the replay or in the files; else nothing."""
    found = [one.not_finite for one in (replayed, files) if one is not None and one.not_finite]
    return found[0] if found else {}
