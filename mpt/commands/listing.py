"""`mpt list`: every name a configuration may use, with one line about each, and the runs of a folder.

Torch is not imported.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.arguments import Json, Runs
from mpt.config.checking.precision_names import ALIASES
from mpt.config.finding.part_source import read_description
from mpt.config.finding.registry import FUNCTIONS, INSTALLED, Part, Registry
from mpt.config.finding.shipped import described
from mpt.config.text.messages import unknown_name
from mpt.errors import ConfigError
from mpt.foreign.text import harmless
from mpt.report.runs.run_rows import RunRow, best_runs, read_rows
from mpt.report.units import show_figure


@dataclass(frozen=True)
class Command:
    """List models, precision modes, configurations and runs.

    Examples:
      mpt list
      mpt list models
      mpt list runs
    """

    what: Annotated[str | None, typer.Argument(metavar="WHAT", show_default=False)] = None
    """models, datasets, precision, memory, optimizers, tasks, metrics, losses, configs or runs."""
    json: Json = False
    runs: Runs = "runs"


HEADINGS = {
    "models": ("nn", "Models (model.name)"),
    "datasets": ("data", "Data sets (dataset.name)"),
    "precision": ("precision", "Precision modes (precision.mode)"),
    "memory": ("memory", "Memory tricks (memory.TRICK)"),
    "optimizers": ("optim", "Optimizers (optimizer.name)"),
    "tasks": ("tasks", "Tasks (task.name; each model has its own by default)"),
    "metrics": ("metrics", "Further metrics of a classifier (task.metrics)"),
    "losses": ("losses", "Losses of a classifier (task.loss)"),
}
"""Word of the command line -> the subpackage and its heading."""
CONFIGS, RUNS = "configs", "runs"
RUN_HEADINGS = ("run", "trained", "steps", "model", "data", "precision", "result(*best)", "given")
OTHER_MODELS = {
    "torchvision:NAME": "A torchvision classifier, such as torchvision:resnet50.",
    "timm:NAME": "A timm model, where timm is installed.",
    "package.module:Name": "A model of any package that --allow grants.",
}


def run(arguments: Command, registry: Registry = INSTALLED) -> None:
    """Print one table or all of them. Raises ConfigError for a table that does not exist."""
    what = arguments.what
    if what == RUNS:
        list_runs(Path(arguments.runs), as_json=arguments.json)
        return
    if what is not None and what not in (*HEADINGS, CONFIGS):
        raise ConfigError(f"mpt list: {unknown_name(what, [*HEADINGS, CONFIGS, RUNS])}")
    chosen = [what] if what else [*HEADINGS, CONFIGS]
    tables = {
        name: described() if name == CONFIGS else describe_subpackage(HEADINGS[name][0], registry)
        for name in chosen
    }
    if arguments.json:
        print(json.dumps(tables, indent=2))
        return
    width = min(shutil.get_terminal_size().columns, 120)
    print("\n\n".join(show_table(heading(name), rows, width) for name, rows in tables.items()))


def heading(name: str) -> str:
    return "Configurations (mpt train @NAME)" if name == CONFIGS else HEADINGS[name][1]


def describe_subpackage(subpackage: str, registry: Registry) -> dict[str, str]:
    """Return name -> one line for everything in a subpackage."""
    if subpackage in FUNCTIONS:
        parts = registry.functions(subpackage)
        return {name: tell(part, read_description(part.path)) for name, part in parts.items()}
    rows: dict[str, str] = {}
    registry.check(subpackage)
    for name in registry.names(subpackage):
        plugin = registry.find(subpackage, name)
        assert plugin
        changed = ", ".join(f"{key} {value}" for key, value in plugin.defaults.items())
        of_file = f"{plugin.description} Here: {changed}." if changed else plugin.description
        rows[name] = tell(plugin, plugin.literals.get("ABOUT", {}).get(name, of_file))
    if subpackage == "nn":
        rows |= OTHER_MODELS
    if subpackage == "precision":
        for alias, (mode, settings) in ALIASES.items():
            rows[alias] = (
                f"Another name of {mode}"
                + "".join(f", {key} {value}" for key, value in settings.items())
                + "."
            )
    return rows


def tell(part: Part, description: str) -> str:
    """Return the line about a part; one from outside of mpt names its package."""
    return f"{description} From {part.package.origin}." if part.package.outside else description


def show_table(heading: str, rows: dict[str, str], width: int) -> str:
    """Return a heading and two columns, the second wrapped; on a narrow terminal it is below the first."""
    left = max((len(name) for name in rows), default=0) + 4
    is_narrow = width - left < 30
    indent = " " * (6 if is_narrow else left)
    lines = [heading]
    for name, description in rows.items():
        wrapped = textwrap.wrap(description.replace("`", ""), max(width - len(indent), 20)) or [""]
        lines.append(f"  {name}" if is_narrow else f"  {name:<{left - 2}}{wrapped.pop(0)}".rstrip())
        lines += [indent + line for line in wrapped if line]
    return "\n".join(lines if rows else [heading, "  (none)"])


def list_runs(runs_dir: Path, *, as_json: bool) -> None:
    """Print a line per run; a star marks the best finished run of its data set and metric.

    Raises CheckpointError if the folder has no run.
    """
    rows = read_rows(runs_dir)
    if as_json:
        print(json.dumps([as_data(row) for row in rows], indent=2))
        return
    best = best_runs(rows)
    lines = [RUN_HEADINGS, *(cells(row, row.path in best) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(RUN_HEADINGS))]
    shown = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else max(map(len, shown))
    for line in shown:
        print(line if len(line) <= room else line[: max(1, room - 1)] + "…")


def cells(row: RunRow, is_best: bool) -> Sequence[str]:
    state = str(row.steps) if row.is_finished else f"{row.state}, unfinished"
    has_better = math.isfinite(row.best) and row.best != row.final
    better = f" (best {show_figure(row.best)})" if has_better else ""
    result = f"{row.metric} {show_figure(row.final)}{better}{' *' if is_best else ''}"
    return tuple(
        map(
            harmless,
            (
                row.name,
                row.trained,
                state,
                row.model,
                row.dataset,
                row.mode,
                result if row.metric else "",
                row.given,
            ),
        )
    )


def as_data(row: RunRow) -> dict[str, object]:
    """Return a run as JSON can hold it: figures that are not there are null."""
    fields = {**dataclasses.asdict(row), "path": str(row.path)}
    figures = {name for name, value in fields.items() if isinstance(value, float)}
    return {
        name: None if name in figures and not math.isfinite(value) else value
        for name, value in fields.items()
    }
