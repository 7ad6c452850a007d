"""`mpt compare fp32 amp`: configurations with the same seeds and data order, and a verdict.

Every run is a process of its own, started as a user would start it. Modes change global state (TF32, deterministic
kernels, cuDNN's chosen algorithms) and the allocator's reserve only grows, so within one process the second mode
would be measured in the first one's remains. Seeds are the outer loop and what is compared the inner one, turned round
for every other seed, so that a machine that grows warm or busy meets all alike.

Going on after an interruption needs no state: a run that is finished is there, one that was interrupted is resumed
from its checkpoint, and one that diverged left a note. The folder is found again by its config, which must be the same.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from mpt.commands.arguments import CompareArguments
from mpt.commands.compare_progress import announce, probe, shown
from mpt.commands.compare_sides import Sides, read_sides
from mpt.commands.sides import is_config, resolve_mode, suggest
from mpt.commands.training_process import Check, Train, check_in_process, train_in_process
from mpt.commands.warm_process import WarmProcess
from mpt.config.registry import INSTALLED
from mpt.config.schema import Config
from mpt.errors import CheckpointError, ConfigError, GateError, InputOutputError, Interrupted, MptError
from mpt.report.comparison import Comparison, Group, compare_groups, group_runs
from mpt.report.comparison_page import say_spread, say_verdict, write_comparison
from mpt.report.read_run import RunRecord, read_run
from mpt.report.sequential import FEWEST, looks
from mpt.report.statistics import Margin
from mpt.report.units import show_bytes, show_figure, show_ratio, show_seconds, show_spread
from mpt.run.files import write_atomically
from mpt.run.layout import check_name, find_run

BASE_CONFIG = "base.yaml"
NOT_FINITE, NO_MEMORY = 6, 7
"""Exit codes that are a result of the mode, not a mistake of the user: such a run counts as diverged."""


def run(arguments: CompareArguments, train: Train | None = None, check: Check | None = None) -> None:
    """Compare modes or finished runs; print and write the comparison.

    `train` and `check` are what tests replace: by default each is a process of its own.
    Raises ConfigError for what cannot be compared, GateError under `--gate` unless every mode is within the margin.
    """
    comparison, folder = compare(arguments, None, train, check)
    print_comparison(comparison, folder, as_json=arguments.json)
    if arguments.gate and not comparison.passes:
        failing = [
            say_verdict(row, comparison) for row in comparison.rows if row.verdict and row.verdict.outcome != "within"
        ]
        raise GateError("\n".join(failing))


def compare(
    arguments: CompareArguments, base: Config | None = None, train: Train | None = None, check: Check | None = None
) -> tuple[Comparison, Path]:
    """Compare configurations or finished runs, write the comparison, and return it with its folder.

    `base` is what is trained, by default what `arguments.config` says.
    """
    margin = Margin.parse(arguments.margin)
    overrides = [word for word in arguments.what if "=" in word]
    words = [word for word in arguments.what if "=" not in word]
    if words and not arguments.variant and not any(resolve_mode(word) or is_config(word) for word in words):
        records = read_records(words, arguments, overrides)
        groups = group_runs(records)
        folder = Path(arguments.output) if arguments.output else records[0].path.parent / f"compare-{records[0].name}"
        comparison = compare_groups(groups, margin)
        write_comparison(folder, comparison)
        return comparison, folder
    sides = read_sides(arguments, base, words, overrides)
    counts, most = rounds(arguments, is_bare=base is None and sides.is_demo)
    folder = open_folder(arguments, sides)
    told: set[str] = set()
    if train is None and not arguments.quiet and not arguments.json:
        print(describe_start(arguments, sides, folder, counts), flush=True)
    with WarmProcess() as warm:
        train = train or train_in_process(arguments.allow, warm)
        check = check or check_in_process(arguments.allow, warm)
        for count in counts:
            groups = run_sides(arguments, sides, folder, count, train, check, told)
            comparison = compare_groups(groups, margin, most, models_differ=sides.models_differ)
            if comparison.is_decided:
                break
    write_comparison(folder, comparison)
    return comparison, folder


def rounds(arguments: CompareArguments, *, is_bare: bool) -> tuple[Sequence[int], int | None]:
    """Return the numbers of seeds after which is looked, and the most of a sequential test; None for a single look.

    Without a configuration and a number of seeds, seeds are added until they decide.
    """
    if arguments.seeds is not None and arguments.seeds < 1:
        raise ConfigError(f"--seeds: found {arguments.seeds}; allowed is 1 or more, 3 or more for a verdict.")
    if not arguments.until_decided and not (is_bare and arguments.seeds is None):
        return [arguments.seeds or FEWEST], None
    if arguments.max_seeds < FEWEST:
        raise ConfigError(f"--max-seeds: found {arguments.max_seeds}; allowed is {FEWEST} or more.")
    if (arguments.seeds or 0) > arguments.max_seeds:
        raise ConfigError(f"--seeds: found {arguments.seeds}, more than the {arguments.max_seeds} of --max-seeds.")
    most = arguments.max_seeds
    return [look for look in looks(most) if look >= (arguments.seeds or 0)], most


def describe_start(arguments: CompareArguments, sides: Sides, folder: Path, counts: Sequence[int]) -> str:
    """Say what is about to be trained and about how long it takes, from a few steps of the first side."""
    config = next(iter(sides.configs.values()))
    file = folder / "configs" / "pace.yaml"
    write_atomically(file, dataclasses.replace(config, name=None).to_yaml())
    sides.pace = probe(file, arguments.allow)
    file.unlink(missing_ok=True)
    return f"{', '.join(sides.configs)}: " + announce(
        counts[0] * len(sides.configs), counts[-1] * len(sides.configs), sides.pace
    )


def read_records(words: Sequence[str], arguments: CompareArguments, overrides: Sequence[str]) -> list[RunRecord]:
    """Read the runs that were named. Raises ConfigError for settings, which finished runs cannot take any more."""
    given = [*overrides, *(["--config"] if arguments.config else []), *(["--device"] if arguments.device else [])]
    if given:
        raise ConfigError(f"mpt compare: {given[0]} changes nothing about finished runs ({', '.join(words)}).")
    records = []
    for word in words:
        try:
            records.append(read_run(find_run(word, Path(arguments.runs))[0].path))
        except CheckpointError as error:
            hint = suggest(word, INSTALLED.names("precision"))
            raise CheckpointError(f"{error}{' Nor is it a precision mode' + hint if hint else ''}") from error
    return records


def run_sides(
    arguments: CompareArguments,
    sides: Sides,
    folder: Path,
    count: int,
    train: Train,
    check: Check,
    told: set[str],
) -> list[Group]:
    """Train every side with `count` seeds where it was not done yet; return the groups. `told` are the runs whose
    result was printed.
    """
    labels = list(sides.configs)
    seeds = [sides.base.seed + index for index in range(count)]
    order = [
        (seed, label) for index, seed in enumerate(seeds) for label in (labels if index % 2 == 0 else reversed(labels))
    ]
    check_later_sides(folder, sides, seeds[0], check)
    runs: dict[str, dict[int, RunRecord]] = {label: {} for label in labels}
    failed: dict[str, dict[int, str]] = {label: {} for label in labels}
    quiet = arguments.quiet or arguments.json
    steps = {folder / sides.run_name(label, seed): sides.steps(label) for seed, label in order}
    with shown(steps, quiet=quiet):
        for number, (seed, label) in enumerate(order, 1):
            name = sides.run_name(label, seed)
            failure = perform(folder, name, dataclasses.replace(sides.configs[label], seed=seed, name=name), train)
            record = read_run(folder / name)
            runs[label][seed] = record
            if failure is not None:
                failed[label][seed] = failure
            if not quiet and name not in told:
                print(f"[{number}/{len(order)}] {label}, seed {seed}: {failure or describe_run(record)}", flush=True)
            told.add(name)
    return [Group(label, runs[label], failed[label]) for label in labels]


def check_later_sides(folder: Path, sides: Sides, seed: int, check: Check) -> None:
    """Build every side but the first, which is about to be trained: one that this model or device refuses should say
    so now and not after the others' hours.
    """
    for label in list(sides.configs)[1:]:
        name = sides.run_name(label, seed)
        if (folder / name).exists() or (folder / f"{name}.failed.json").exists():
            continue
        file = folder / "configs" / f"{name}.yaml"
        write_atomically(file, dataclasses.replace(sides.configs[label], seed=seed, name=name).to_yaml())
        code, words = check(file)
        if code not in (NOT_FINITE, NO_MEMORY):  # these are results, and counted as such
            raise_failure(name, code, words)


def raise_failure(name: str, code: int, words: str) -> None:
    """Raise what an exit code stands for, unless it is 0."""
    if code > 128:
        raise Interrupted(f"interrupted during {name}; the same command goes on from here", code - 128)
    if code:
        failure = MptError(f"{name} failed: {words}")
        failure.exit_code = code
        raise failure


def describe_run(record: RunRecord) -> str:
    """Say a run's result in one line."""
    return (
        f"{record.metric} {show_figure(record.final)}, {show_seconds(record.step_seconds)} per step, "
        f"peak {show_bytes(record.step_peak_bytes)}"
    )


def open_folder(arguments: CompareArguments, sides: Sides) -> Path:
    """Return the folder of this comparison: the one that holds the same config, else a new one."""
    text = sides.identity
    if arguments.output:
        folder = Path(arguments.output)
        if (folder / BASE_CONFIG).is_file() and (folder / BASE_CONFIG).read_text("utf-8") != text:
            raise ConfigError(
                f"--output: {folder} holds a comparison of another config; name another folder or remove that one."
            )
    else:
        name = arguments.name or sides.name
        check_name(name)
        number = 1
        while True:
            folder = Path(arguments.runs) / (name if number == 1 else f"{name}-{number}")
            if not folder.exists():
                break
            if (folder / BASE_CONFIG).is_file() and (folder / BASE_CONFIG).read_text("utf-8") == text:
                break
            number += 1
    try:
        (folder / "configs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputOutputError(
            f"{folder} could not be made: {error.strerror}. Name another one by --output."
        ) from error
    write_atomically(folder / BASE_CONFIG, text)
    return folder


def perform(folder: Path, name: str, config: Config, train: Train) -> str | None:
    """Train one run unless it is done. Return why it diverged, None if it did not."""
    note = folder / f"{name}.failed.json"
    path = folder / name
    if note.is_file():
        return str(json.loads(note.read_text("utf-8"))["message"])
    if path.is_dir():
        if (path / "config.yaml").is_file() and read_run(path).is_finished:
            return None
        if not any((path / "checkpoints").glob("step-*")):
            shutil.rmtree(path)  # stopped before its first checkpoint: there is nothing to go on from
    file = folder / "configs" / f"{name}.yaml"
    write_atomically(file, config.to_yaml())
    code, words = train(file, folder, name, path.is_dir())
    if code in (NOT_FINITE, NO_MEMORY):
        message = words or ("not finite" if code == NOT_FINITE else "out of memory")
        write_atomically(note, json.dumps({"exit_code": code, "message": message}))
        return message
    raise_failure(name, code, words)
    return None


def print_comparison(comparison: Comparison, folder: Path, *, as_json: bool) -> None:
    """Print the table and the verdicts, or the JSON in one line."""
    if as_json:
        print(json.dumps(json.loads((folder / "comparison.json").read_text("utf-8"))))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title=None)
    table.add_column("mode")
    for heading in ("peak memory", "step", "samples/s", "skipped", f"{comparison.metric}, final", "best"):
        table.add_column(heading, justify="right")
    peaks = [row.peak_bytes for row in comparison.rows]
    for row in comparison.rows:
        table.add_row(
            row.group.label,
            f"{show_bytes(row.peak_bytes, peaks)}\n{show_ratio(row.peak_ratio)}",
            f"{show_seconds(row.step_seconds)}\n{show_ratio(row.step_ratio)}",
            f"{show_figure(row.samples_per_second)}\n{show_ratio(row.throughput_ratio)}",
            str(row.skipped),
            f"{show_spread(row.final.mean, row.final.deviation)}\n{show_ratio(row.final_ratio)}",
            f"{show_figure(row.best.mean)}\n{show_ratio(row.best_ratio)}",
        )
    console.print(table)
    for row in comparison.rows:
        for phase, (first, lowest, last) in row.scales.items():
            scales = f"first {show_figure(first)}, lowest {show_figure(lowest)}, last {show_figure(last)}"
            console.print(f"loss scale, {row.group.label} {phase}: {scales}", markup=False, highlight=False)
    for row in comparison.rows:
        if row.verdict is not None:
            console.print(say_verdict(row, comparison), markup=False, highlight=False)
    console.print(say_spread(comparison), markup=False, highlight=False)
    for note in comparison.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    console.print(
        f"wrote {os.path.join(folder, 'comparison.html')} (and .md, .json, .png)", markup=False, highlight=False
    )
