"""`mpt compare fp32 amp`: precision modes, settings, configurations or finished runs, and a verdict on each.

The comparison itself is `mpt.workflows.comparing.compare`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.arguments import Allow, Device, Json, Output, Quiet, Runs
from mpt.commands.cli.command_line import given
from mpt.commands.cli.console import columns, open_console
from mpt.config.finding.registry import INSTALLED
from mpt.errors import CheckpointError, ConfigError, GateError
from mpt.foreign.files import read_json
from mpt.report.comparing.comparison import Comparison
from mpt.report.comparison_pages.comparison_page import say_spread, say_verdict
from mpt.report.comparison_pages.sweep_page import sweep_lines
from mpt.report.reading.read_run import read_run
from mpt.report.reading.run_record import RunRecord
from mpt.report.units import show_bytes, show_figure, show_ratio, show_seconds, show_spread
from mpt.run.records.layout import find_run
from mpt.workflows.comparing.compare import compare, compare_finished
from mpt.workflows.comparing.compare_over import MARGIN, Over, Swept, compare_over
from mpt.workflows.comparing.compare_sides import Sides, read_sides
from mpt.workflows.comparing.sides import is_config, resolve_mode, suggest
from mpt.workflows.processes.training_process import Check, Train


@dataclass(frozen=True)
class Command:
    """Compare precision modes or settings by training in each.

    All are trained with the same seeds and data; the verdict says whether the metric stays within the margin of the
    first one's, which is fp32's if that takes part. Without a configuration and --seeds a small classifier is
    trained until its seeds decide.

    Examples:
      mpt compare fp32 amp --config mine.yaml
      mpt compare fp32 bf16 --config mine.yaml --over optimizer.lr=0.5x,1x,2x
      mpt compare mine.yaml --variant "memory.micro_batch=8"
      mpt compare RUN RUN
    """

    what: Annotated[
        tuple[str, ...], typer.Argument(metavar="MODE|CONFIG|RUN|KEY=VALUE", show_default=False)
    ] = ()
    """Precision modes, configurations, or finished runs."""
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default="a small classifier")
    ] = None
    """The configuration that modes and settings are compared in."""
    variant: Annotated[tuple[str, ...], typer.Option("--variant", metavar="KEY=VALUE")] = ()
    """Compare with the configuration changed so, several settings in quotes; may be given several times."""
    over: Annotated[str | None, typer.Option(metavar="KEY=VALUES")] = None
    """Train each at several values of a setting, optimizer.lr=0.5x,1x,2x, and say at which it trains."""
    seeds: Annotated[int | None, typer.Option(show_default="3")] = None
    """Runs per mode, three at least for a verdict; with --until-decided, before the first look."""
    until_decided: bool = False
    """Add seeds until every verdict is in; each look is stricter for it, so that the error rates hold."""
    max_seeds: int = 16
    """The last seed of --until-decided."""
    jobs: Annotated[int | None, typer.Option(metavar="N", show_default="free cores or cards")] = (
        None
    )
    """Runs at a time; 1 for step times of every seed. On a CPU the first seed's runs are alone, for the step times."""
    margin: Annotated[str | None, typer.Option(show_default="1%; 10% with --over")] = None
    """The difference that matters: 1% or 0.5."""
    gate: bool = False
    """Exit with 8 unless every mode is within the margin."""
    name: str | None = None
    """The comparison's folder below --runs."""
    output: Output = None
    """The folder to write into, by default one below --runs."""
    device: Device = None
    json: Json = False
    quiet: Quiet = False
    allow: Allow = ()
    runs: Runs = "runs"


def run(arguments: Command, train: Train | None = None, check: Check | None = None) -> None:
    """Compare modes or finished runs; print and write the comparison.

    Tests replace `train` and `check`: by default each is a process of its own. Raises ConfigError for anything
    that cannot be compared, GateError under `--gate` unless every mode is within the margin.
    """
    overrides = [word for word in arguments.what if "=" in word]
    words = [word for word in arguments.what if "=" not in word]
    output = Path(arguments.output) if arguments.output else None
    if arguments.over:
        sweep(words, overrides, arguments, train, check)
        return
    margin = arguments.margin or "1%"
    if (
        words
        and not arguments.variant
        and not any(resolve_mode(word) or is_config(word) for word in words)
    ):
        comparison, folder = compare_finished(
            read_records(words, arguments, overrides),
            margin,
            output,
            arguments.name,
            Path(arguments.runs),
        )
    else:
        sides = sides_of(words, overrides, arguments)
        comparison, folder = compare(
            sides,
            margin=margin,
            seeds=arguments.seeds,
            until_decided=arguments.until_decided,
            max_seeds=arguments.max_seeds,
            jobs=arguments.jobs,
            name=arguments.name,
            output=output,
            runs=Path(arguments.runs),
            quiet=arguments.quiet or arguments.json,
            train=train,
            check=check,
        )
    print_comparison(comparison, folder, as_json=arguments.json)
    if arguments.gate and not comparison.passes:
        failing = [
            say_verdict(row, comparison)
            for row in comparison.rows
            if row.verdict and row.verdict.outcome != "within"
        ]
        raise GateError("\n".join(failing))


def sweep(
    words: Sequence[str],
    overrides: Sequence[str],
    arguments: Command,
    train: Train | None = None,
    check: Check | None = None,
) -> None:
    """Train each mode at several values of a setting; print and write the range in which it trains."""
    for option in given(arguments, ("until_decided", "gate")):
        raise ConfigError(f"mpt compare: {option} does not go with --over, which gives windows.")
    sides = sides_of(words, overrides, arguments, alone=True)
    found, folder = compare_over(
        Swept(sides, Over.parse(arguments.over or ""), arguments.allow),
        margin=arguments.margin or MARGIN,
        seeds=arguments.seeds,
        jobs=arguments.jobs,
        name=arguments.name,
        output=Path(arguments.output) if arguments.output else None,
        runs=Path(arguments.runs),
        quiet=arguments.quiet or arguments.json,
        train=train,
        check=check,
    )
    if arguments.json:
        print(json.dumps(read_json(folder / "comparison.json")))
        return
    print("\n".join(sweep_lines(found)))
    print(f"wrote {os.path.join(folder, 'comparison.html')} (and .md, .json)")


def sides_of(
    words: Sequence[str], overrides: Sequence[str], arguments: Command, alone: bool = False
) -> Sides:
    """Return the modes and configurations that were named; `alone` allows a single one."""
    return read_sides(
        words,
        arguments.config,
        variants=arguments.variant,
        overrides=overrides,
        device=arguments.device,
        allow=arguments.allow,
        alone=alone,
    )


def read_records(
    words: Sequence[str], arguments: Command, overrides: Sequence[str]
) -> list[RunRecord]:
    """Read the runs that were named. Raises ConfigError for settings, which finished runs cannot take any more."""
    for word in words:
        if all(resolve_mode(part) for part in word.split(",")):
            raise ConfigError(
                f"mpt compare: modes are separated by spaces: {word.replace(',', ' ')}"
            )
    records = []
    for word in words:
        try:
            records.append(read_run(find_run(word, Path(arguments.runs))[0].path))
        except CheckpointError as error:
            hint = suggest(word, INSTALLED.names("precision"))
            raise CheckpointError(
                f"{error}{' Nor is it a precision mode' + hint if hint else ''}"
            ) from error
    options = ("config", "device", "jobs", "seeds", "until_decided", "max_seeds")
    for said in (*overrides, *given(arguments, options)):
        raise ConfigError(
            f"mpt compare: {said} changes nothing about finished runs ({', '.join(words)})."
        )
    return records


def print_comparison(comparison: Comparison, folder: Path, *, as_json: bool) -> None:
    """Print the table and the verdicts, or the JSON in one line."""
    if as_json:
        print(json.dumps(read_json(folder / "comparison.json")))
        return
    console = open_console()
    figures = (
        ">peak memory",
        ">step",
        ">samples/s",
        ">skipped",
        f">{comparison.metric}, final",
        ">best",
    )
    table = columns("mode", *figures, is_boxed=True)
    peaks = [row.peak_bytes for row in comparison.rows]
    for row in comparison.rows:
        table.add_row(
            row.group.label,
            f"{show_bytes(row.peak_bytes, peaks)}\n{show_ratio(row.peak_ratio)}",
            f"{show_seconds(row.step_seconds, 2)}\n{show_ratio(row.step_ratio)}",
            f"{show_figure(row.samples_per_second)}\n{show_ratio(row.throughput_ratio)}",
            str(row.skipped),
            f"{show_spread(row.final.mean, row.final.deviation)}\n{show_ratio(row.final_ratio)}",
            f"{show_figure(row.best.mean)}\n{show_ratio(row.best_ratio)}",
        )
    console.print(table)
    if len(comparison.seeds) > 1:
        label = comparison.baseline.group.label
        said = (
            f"Ratios are of the figures shown to those of {label}; of memory, step and "
            "samples/s: medians over seeds."
        )
        console.print(said)
    for row in comparison.rows:
        for phase, (first, lowest, last) in row.scales.items():
            scales = f"first {show_figure(first)}, lowest {show_figure(lowest)}, last {show_figure(last)}"
            console.print(f"loss scale, {row.group.label} {phase}: {scales}")
    for row in comparison.rows:
        if row.verdict is not None:
            console.print(say_verdict(row, comparison))
    console.print(say_spread(comparison))
    for note in comparison.notes:
        console.print(f"note: {note}")
    console.print(f"wrote {os.path.join(folder, 'comparison.html')} (and .md, .json, .png)")
