"""`mpt plan presets CONFIG`: a patch for each usual size of card, and a table of their cost.

One set of traces serves all sizes: they differ in the budget alone. Kernels and times are those of an RTX 2060 unless
--gpu names another card: what it runs, later cards run too, in no more memory. A size's budget is what programs can
have of such a card (`mpt.planner.facts.gpus`).
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mpt.commands.cli.arguments import AllowLossy, PlannedConfig
from mpt.commands.cli.console import open_console
from mpt.commands.planning.plan_config import common_words, load_planned
from mpt.commands.planning.plan_progress import progress
from mpt.commands.planning.plan_tables import columns
from mpt.config.patch_origin import describe_origin
from mpt.config.schema import Config
from mpt.config.sizes import describe_bytes
from mpt.config.yaml_text import write_text
from mpt.errors import ConfigError, InputOutputError, MemoryBudgetError
from mpt.planner.client.processes import count_workers
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import load_calibration
from mpt.planner.facts.gpus import Gpu, find_gpu
from mpt.planner.recipes.planned import needs_search
from mpt.planner.recipes.recipe import Recipe, describe_cost, describe_patch
from mpt.planner.recipes.search import search
from mpt.report.units import show_seconds


@dataclass(frozen=True)
class Command(PlannedConfig):
    """Write a patch for each usual size of card, 6 to 24 GB, and print a table."""

    gpu: Annotated[str | None, typer.Option(metavar="NAME")] = None
    """The card whose kernels and times are planned, by default an RTX 2060."""
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="FOLDER")] = None
    """The folder to write into, by default presets/."""
    allow_lossy: AllowLossy = False


SIZES = (6, 8, 10, 12, 16, 24)
"""GB that cards are sold with."""
REFERENCE = "rtx2060"


@dataclass(frozen=True)
class Preset:
    """The recipe for a size of card; None if nothing fits."""

    size_gb: int
    budget_bytes: int
    recipe: Recipe | None
    path: Path | None = None


def run(arguments: Command) -> None:
    """Search a recipe for every size, write those that there are, and print them as a table.

    Raises MemoryBudgetError if nothing fits even the largest size.
    """
    config = load_planned(arguments)
    stem, folder = Path(str(arguments.config).removeprefix("@")).stem, Path(arguments.output or "presets")
    taken = [path for size in SIZES if (path := folder / f"{stem}_{size}gb.yaml").exists()]
    if taken:
        raise ConfigError(f"mpt plan presets: {taken[0]} exists; remove it first, or name another folder with --output")
    gpu = find_gpu(arguments.gpu or REFERENCE)
    presets = find_presets(config, arguments, gpu)
    command = ["mpt", "train", *common_words(arguments, arguments.overrides)]
    written = [write_preset(one, folder / f"{stem}_{one.size_gb}gb.yaml", config, gpu, command) for one in presets]
    if arguments.json:
        print(json.dumps({"gpu": asdict(gpu), "presets": [as_data(one) for one in written]}, indent=1))
    else:
        print_presets(open_console(), config, gpu, written)
    if all(one.recipe is None for one in written):
        raise MemoryBudgetError(f"nothing fits even {SIZES[-1]} GB; use a smaller train.batch_size or image")


def usable_bytes(gpu: Gpu, size_gb: int) -> int:
    """Return the usable memory of a card of this size."""
    return replace(gpu, name="", memory_gib=size_gb, is_installed=False).usable_bytes


def find_presets(config: Config, arguments: Command, gpu: Gpu) -> list[Preset]:
    """Return the first recipe for every size."""
    budgets = {size: usable_bytes(gpu, size) for size in SIZES}
    calibration, found = load_calibration(gpu.name), []
    with (
        Session(gpu, calibration, config.granted, count_workers(), budgets=tuple(budgets.values())) as session,
        progress() as told,
    ):
        for size, budget in reversed(budgets.items()):
            recipes: Sequence[Recipe] = ()
            with contextlib.suppress(MemoryBudgetError):  # the weights alone are too much
                recipes = search(
                    session,
                    config,
                    gpu,
                    budget,
                    allow_lossy=arguments.allow_lossy,
                    goes_on=partial(needs_search, budget),
                    on_answer=told,
                ).recipes
            found.append(Preset(size, budget, next((one for one in recipes if one.fits), None)))
    return found[::-1]


def write_preset(preset: Preset, path: Path, config: Config, gpu: Gpu, command: Sequence[str]) -> Preset:
    """Write a preset's patch and return it with its path; nothing is written if nothing fits or is to be changed."""
    recipe = preset.recipe
    if recipe is None or not recipe.patch:
        return preset
    lines = [
        shlex.join([*command, "--with", str(path)]),
        f"{describe_patch(recipe.patch)} ({describe_cost(recipe)}): {describe_bytes(recipe.total)} of the "
        f"{describe_bytes(preset.budget_bytes)} that a card of {preset.size_gb} GB gives to programs, "
        f"{show_seconds(recipe.plan.step_seconds)} a step on an {gpu.name}",
    ]
    body = write_text(recipe.patch)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        comments = "".join(f"# {line}\n" for line in lines)
        path.write_text(f"{comments}{describe_origin(config, gpu.name, preset.budget_bytes)}\n{body}", "utf-8")
    except OSError as error:
        raise InputOutputError(f"{path}: cannot be written: {error}") from error
    return replace(preset, path=path)


def print_presets(console: Console, config: Config, gpu: Gpu, presets: Sequence[Preset]) -> None:
    """Print the table."""
    console.print(
        f"{config.heading}, batch {config.train.batch_size}: presets by size of card, with kernels and times of an "
        f"{gpu.name}",
        style="bold",
        markup=False,
    )
    table = columns(">card", "recipe", ">memory", ">of", ">step", "cost", "file")
    for one in presets:
        budget, card = describe_bytes(one.budget_bytes), f"{one.size_gb} GB"
        if one.recipe is None:
            table.add_row(card, "nothing fits", "", budget, "", "", "")
            continue
        seconds = show_seconds(one.recipe.plan.step_seconds)
        words, cost = describe_patch(one.recipe.patch), describe_cost(one.recipe)
        table.add_row(card, words, describe_bytes(one.recipe.total), budget, seconds, cost, str(one.path or ""))
    console.print(table)


def as_data(preset: Preset) -> dict[str, object]:
    """Return a preset as JSON has it."""
    common: dict[str, object] = {"size_gb": preset.size_gb, "budget_bytes": preset.budget_bytes}
    if preset.recipe is None:
        return {**common, "patch": None, "path": None}
    plan = preset.recipe.plan
    return {
        **common,
        "patch": preset.recipe.patch,
        "total_bytes": preset.recipe.total,
        "step_seconds": plan.step_seconds,
        "cost": describe_cost(preset.recipe),
        "path": None if preset.path is None else str(preset.path),
    }
