"""`mpt compare fp32 amp`: the same config, seeds and data order under each mode, and a verdict.

Every run is a process of its own, started as a user would start it. Modes change global state (TF32, deterministic
kernels, cuDNN's chosen algorithms) and the allocator's reserve only grows, so within one process the second mode
would be measured in the first one's remains. Seeds are the outer loop and modes the inner one, turned round for every
other seed, so that a machine that grows warm or busy meets all modes alike.

Going on after an interruption needs no state: a run that is finished is there, one that was interrupted is resumed
from its checkpoint, and one that diverged left a note. The folder is found again by its config, which must be the same.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpt.commands.arguments import CompareArguments
from mpt.commands.training_process import Check, Train, check_in_process, train_in_process
from mpt.config.load import change_precision, load_config
from mpt.config.messages import nearest
from mpt.config.precision_names import resolve_precision_name
from mpt.config.registry import INSTALLED
from mpt.config.schema import Config
from mpt.errors import CheckpointError, ConfigError, GateError, InputOutputError, Interrupted, MptError
from mpt.report.comparison import Comparison, Group, compare_groups, group_runs
from mpt.report.comparison_page import say_spread, say_verdict, write_comparison
from mpt.report.read_run import RunRecord, read_run
from mpt.report.statistics import Margin
from mpt.report.units import show_bytes, show_figure, show_ratio, show_seconds, show_spread
from mpt.run.files import write_atomically
from mpt.run.layout import check_name, find_run

DEMO: dict[str, Any] = {
    "model": {"name": "dcgan", "image_size": 32, "features": 16, "latent_size": 64},
    "task": {"ema": 0.99},
    "dataset": {"name": "digits"},
    "optimizer": {"name": "adam", "lr": 5e-4, "betas": [0.5, 0.999]},
    "train": {"steps": 300, "batch_size": 64, "log_every": 25, "evaluate_every": 100},
}
"""What is compared when no config is given: a small DCGAN on the digits in the package."""
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
    """Compare modes or finished runs, write the comparison, and return it with its folder.

    `base` is what is trained, by default what `arguments.config` says.
    """
    margin = Margin.parse(arguments.margin)
    overrides = [word for word in arguments.what if "=" in word]
    words = [word for word in arguments.what if "=" not in word]
    modes = [resolve_mode(word) for word in words]
    if words and all(mode is None for mode in modes):
        records = read_records(words, arguments, overrides)
        groups = group_runs(records)
        folder = Path(arguments.output) if arguments.output else records[0].path.parent / f"compare-{records[0].name}"
    else:
        folder, groups = run_modes(
            arguments,
            base,
            check_modes(words, modes),
            overrides,
            train or train_in_process(arguments.allow),
            check or check_in_process(arguments.allow),
        )
    comparison = compare_groups(groups, margin)
    write_comparison(folder, comparison)
    return comparison, folder


def resolve_mode(word: str) -> str | None:
    """Return the canonical name of a precision mode, None if the word is none."""
    known = INSTALLED.names("precision")
    name = resolve_precision_name(word, known)[0]
    return name if name in known else None


def check_modes(words: Sequence[str], modes: Sequence[str | None]) -> dict[str, str]:
    """Return canonical name -> name as it was written, each mode once. Raises ConfigError."""
    unknown = [word for word, mode in zip(words, modes, strict=True) if mode is None]
    if unknown:
        if unknown[0].endswith((".yaml", ".yml")):
            raise ConfigError(f"mpt compare: the configuration is given as --config {unknown[0]}")
        known = INSTALLED.names("precision")
        raise ConfigError(
            f"mpt compare: {unknown[0]!r} is no precision mode{suggest(unknown[0], known)}; allowed are "
            f"{', '.join(known)}, or finished runs only (a mode and a run cannot be compared with each other)."
        )
    if len(words) < 2:
        raise ConfigError(
            "mpt compare: name two precision modes at least, such as `mpt compare fp32 amp`, or two runs."
        )
    for index, mode in enumerate(modes):
        if mode in modes[:index]:
            earlier = words[modes.index(mode)]
            raise ConfigError(f"mpt compare: {mode} was given twice ({earlier}, {words[index]}); give each mode once.")
    return {mode: word for mode, word in zip(modes, words, strict=True) if mode is not None}


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


def suggest(word: str, known: Sequence[str]) -> str:
    """Return a hint at the known word that was probably meant."""
    guess = nearest(word, known)
    return f"; did you mean {guess}?" if guess else ""


def run_modes(
    arguments: CompareArguments,
    base: Config | None,
    modes: Mapping[str, str],
    overrides: Sequence[str],
    train: Train,
    check: Check,
) -> tuple[Path, list[Group]]:
    """Train every mode with every seed where it was not done yet; return the comparison's folder and groups."""
    if arguments.seeds < 1:
        raise ConfigError(f"--seeds: found {arguments.seeds}; allowed is 1 or more, 3 or more for a verdict.")
    options = [f"train.device={arguments.device}"] if arguments.device else []
    options.append("train.plan_memory=false")  # a plan beside would take time from what is timed
    source = base.to_data() if base else arguments.config or DEMO
    base = load_config(source, [*overrides, *options], allow=arguments.allow)
    configs = {mode: in_mode(base, mode, word, overrides, arguments.allow) for mode, word in modes.items()}
    folder = open_folder(arguments, base, list(modes))
    seeds = [base.seed + index for index in range(arguments.seeds)]
    order = [
        (seed, mode)
        for index, seed in enumerate(seeds)
        for mode in (list(modes) if index % 2 == 0 else reversed(list(modes)))
    ]
    check_later_modes(folder, configs, seeds[0], check)
    runs: dict[str, dict[int, RunRecord]] = {mode: {} for mode in modes}
    failed: dict[str, dict[int, str]] = {mode: {} for mode in modes}
    for number, (seed, mode) in enumerate(order, 1):
        name = f"{mode}-seed-{seed}"
        say = f"[{number}/{len(order)}] {mode}, seed {seed}"
        failure = perform(folder, name, dataclasses.replace(configs[mode], seed=seed, name=name), train)
        record = read_run(folder / name)
        runs[mode][seed] = record
        if failure is not None:
            failed[mode][seed] = failure
        if not arguments.quiet and not arguments.json:
            print(f"{say}: {failure or describe_run(record)}", flush=True)
    return folder, [Group(mode, runs[mode], failed[mode]) for mode in modes]


def check_later_modes(folder: Path, configs: Mapping[str, Config], seed: int, check: Check) -> None:
    """Build every mode but the first, which is about to be trained: a mode that this model or device refuses should
    say so now and not after the others' hours.
    """
    for mode in list(configs)[1:]:
        name = f"{mode}-seed-{seed}"
        if (folder / name).exists() or (folder / f"{name}.failed.json").exists():
            continue
        file = folder / "configs" / f"{name}.yaml"
        write_atomically(file, dataclasses.replace(configs[mode], seed=seed, name=name).to_yaml())
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


def in_mode(base: Config, mode: str, word: str, overrides: Sequence[str], allow: Sequence[str]) -> Config:
    """Return the config in another mode. What the user set in `precision` stays, as far as the mode has it."""
    if any(override.split("=")[0].strip() in ("precision", "precision.mode") for override in overrides):
        raise ConfigError("mpt compare: the modes are named as words; leave precision.mode out of the overrides.")
    if mode == base.precision.mode and word == mode:
        return base
    # Changing the mode gives dtype and loss scale back to the mode; what was asked for in so many words is put on top.
    asked = [override for override in overrides if override.startswith("precision.")]
    changed = change_precision(base, word)
    return load_config(changed.to_data(), asked, allow=allow) if asked else changed


def describe_run(record: RunRecord) -> str:
    """Say a run's result in one line."""
    return (
        f"{record.metric} {show_figure(record.final)}, {show_seconds(record.step_seconds)} per step, "
        f"peak {show_bytes(record.step_peak_bytes)}"
    )


def open_folder(arguments: CompareArguments, base: Config, modes: Sequence[str]) -> Path:
    """Return the folder of this comparison: the one that holds the same config, else a new one."""
    text = dataclasses.replace(base, name=None).to_yaml()
    if arguments.output:
        folder = Path(arguments.output)
        if (folder / BASE_CONFIG).is_file() and (folder / BASE_CONFIG).read_text("utf-8") != text:
            raise ConfigError(
                f"--output: {folder} holds a comparison of another config; name another folder or remove that one."
            )
    else:
        name = arguments.name or f"compare-{base.name or base.model.name.replace(':', '-')}-{'-'.join(modes)}"
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
