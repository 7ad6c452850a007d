"""`mpt diff A B`: the first step and the first operator or parameter where two trainings part, and why.

Two runs are compared by their files first. Then both configurations are trained for some steps side by side: from the
newest checkpoint that the runs have in common to the bit, else from the beginning.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mpt.commands.cli.arguments import DiffArguments
from mpt.commands.shared.diff_lines import not_finite_in, show
from mpt.config.differences import ABSENT, Difference, find_differences
from mpt.config.layers import write_override
from mpt.config.schema import Config
from mpt.errors import CheckpointError, ConfigError, GateError, NonFiniteError
from mpt.report.read_run import read_run
from mpt.run.records.kept_parts import lost_parts, own_parts
from mpt.run.records.layout import find_run
from mpt.run.records.used_parts import changed_parts
from mpt.workflows.sides import Side, is_config, read_side, resolve_mode, vary

if TYPE_CHECKING:
    from mpt.doctor.parting import Comparison
    from mpt.doctor.run_difference import RunDifference

SILENT: tuple[str, ...] = (
    "name",
    "train.log_every",
    "train.checkpoint_every",
    "train.sample_every",
    "train.keep_samples",
    "train.evaluate_every",
)
SILENT += ("train.early_stopping", "train.keep_last", "train.asynchronous_save", "train.tensorboard", "train.boards")
SILENT += ("train.plan_memory", "dataset.workers")
"""Settings that change nothing of what is learnt."""


def run(arguments: DiffArguments) -> None:
    """Find where two trainings part.

    Raises GateError (exit 8) where they part by more than rounding, NonFiniteError (exit 6) where neither is finite, so
    that nothing can be said.
    """
    if arguments.nproc is not None:
        compare_processes(arguments, arguments.nproc)
        return
    first, second = read_sides(arguments)
    differences = [
        one
        for one in find_differences(first.config.to_data(), second.config.to_data())
        if one.key not in SILENT and not is_default(one)
    ]
    files = compare_files(first, second)
    known_same = files is not None and not files.differs and not differences
    replayed = None if arguments.only_files or known_same else replay(arguments, first, second, differences, files)
    record = {
        "first": first.label,
        "second": second.label,
        "settings": [dataclasses.asdict(one) for one in differences],
        "files": files.to_record() if files is not None else None,
        "replay": replayed.to_record() if replayed is not None else None,
        "verdict": verdict_of(files, replayed),
    }
    if arguments.json:
        print(json.dumps(record, default=str))
    else:
        show(first, second, differences, files, replayed)
    if record["verdict"] == "apart":
        where = f" at step {replayed.beyond.step}" if replayed is not None and replayed.beyond is not None else ""
        raise GateError(f"diff: {first.label} and {second.label} part{where} by more than rounding")
    if record["verdict"] == "not finite":
        found = not_finite_in(files, replayed)
        raise NonFiniteError(
            f"diff: {found['name']} of both {first.label} and {second.label} is not finite at step {found['step']}, so "
            "whether they are the same cannot be said; `mpt doctor` finds the operator"
        )


def compare_processes(arguments: DiffArguments, nproc: int) -> None:
    """Compare one process with several. Raises GateError where they part by more than the order of sums."""
    from mpt.workflows.rank_comparison import compare_with_ranks

    overrides, words = split_words(arguments)
    if len(words) != 1 or arguments.variant is not None:
        raise ConfigError("mpt diff --nproc: name one configuration, which is compared with itself on N processes")
    side = read_with_own_parts(words[0], overrides, Path(arguments.runs), arguments.allow)
    found = compare_with_ranks(side.config, nproc, arguments.steps, arguments.allow)
    if arguments.json:
        print(json.dumps({"first": side.label, **dataclasses.asdict(found)}))
    else:
        print(f"A: {side.label} in one process\nB: the same in {nproc} processes ({side.config.parallel.strategy})")
        for note in found.notes:
            print(f"note: {note}")
        print(f"{found.steps} steps, each from one state")
        print(f"differs: {found.beyond.describe()}" if found.beyond else "never more than the order of sums explains")
    if found.beyond is not None:
        raise GateError(f"diff: {nproc} processes do not train what one does: {found.beyond.where}")


def is_default(difference: Difference) -> bool:
    """Return whether a setting is absent on one side and says nothing on the other."""
    values = (difference.before, difference.now)
    return ABSENT in values and any(value is None or value == [] for value in values)


def read_sides(arguments: DiffArguments) -> tuple[Side, Side]:
    """Return the two that are compared. Raises ConfigError unless they are two."""
    overrides, words = split_words(arguments)
    wanted = 1 if arguments.variant is not None else 2
    if len(words) != wanted:
        raise ConfigError(
            f"mpt diff: found {len(words)} of {wanted} to compare ({', '.join(words) or 'none'}); name two "
            "configurations or runs, or one and --variant KEY=VALUE"
        )
    runs = Path(arguments.runs)
    first = read_with_own_parts(words[0], overrides, runs, arguments.allow)

    def again(more: Sequence[str]) -> Config:
        return read_side(words[0], [*overrides, *more], runs, arguments.allow).config

    if arguments.variant is not None:
        varied = vary(first.config, arguments.variant, arguments.allow, again)
        return first, Side(f"{words[0]} with {arguments.variant}", varied)
    if resolve_mode(words[1]) is not None and not Path(words[1]).exists():
        return first, Side(words[1], vary(first.config, f"precision={words[1]}", arguments.allow, again))
    second = read_with_own_parts(words[1], overrides, runs, arguments.allow)
    homes = [side.config.task.plugin.package for side in (first, second)]
    if homes[0].name != homes[1].name:
        said = " and ".join(f"{side.label} trains task {side.config.task.name}" for side in (first, second))
        raise ConfigError(f"mpt diff: {said}, which have nothing in common; name two trainings of one task")
    return first, second


def split_words(arguments: DiffArguments) -> tuple[list[str], list[str]]:
    """Return the settings that are changed, and the names of what is compared."""
    overrides = [word for word in arguments.what if "=" in word]
    for key, value in (("train.device", arguments.device), ("seed", arguments.seed)):
        if value is not None:
            overrides.append(write_override(key, value))
    return overrides, [word for word in arguments.what if "=" not in word]


def read_with_own_parts(word: str, overrides: Sequence[str], runs: Path, allow: Sequence[str]) -> Side:
    """Return the side that a word names, a run's with the parts that it used, if it kept them."""
    directory = None
    if not is_config(word):
        with suppress(CheckpointError):  # said below
            directory, _ = find_run(word, runs)
    with own_parts(directory):
        return read_side(word, overrides, runs, allow)


def compare_files(first: Side, second: Side) -> RunDifference | None:
    """Compare what two runs left; None where one of the two is no run."""
    from mpt.doctor.run_difference import compare_runs

    if first.run is None or second.run is None:
        return None
    if first.run.path == second.run.path:
        raise ConfigError(f"mpt diff: {first.label} and {second.label} are the same run")
    return compare_runs(read_run(first.run.path), read_run(second.run.path))


def replay(
    arguments: DiffArguments,
    first: Side,
    second: Side,
    differences: list[Difference],
    files: RunDifference | None,
) -> Comparison:
    """Train both for some steps side by side."""
    from mpt.doctor.lockstep import Training
    from mpt.doctor.side_by_side import Lockstep
    from mpt.doctor.subject import as_on_a_gpu
    from mpt.engine.building.build import build_datasets
    from mpt.engine.building.devices import choose_device
    from mpt.run.checkpoints import checkpoint

    trainings, states = [], []
    for side in (first, second):
        config = as_on_a_gpu(side.config, arguments.dtype) if arguments.dtype else side.config
        code = partial(own_parts, side.run)
        with code():
            training = Training(config, choose_device(config.train.device), build_datasets(config)[0])
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
    found = Lockstep(trainings[0], trainings[1], differences).compare(start, arguments.steps)
    found.notes += [note for letter, side in (("A", first), ("B", second)) for note in notes_on_parts(letter, side)]
    return found


def notes_on_parts(letter: str, side: Side) -> list[str]:
    """Say with which code a run was trained again, if its parts were edited since."""
    changed = changed_parts(side.run.parts_path) if side.run is not None else []
    if side.run is None or not changed:
        return []
    lost = lost_parts(side.run)
    own = [file for file in changed if file not in lost]
    notes = [f"{letter}: trained again with its own {', '.join(own)}, as the run kept it"] if own else []
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
