"""`mpt plan presets CONFIG`: a patch for each usual size of card, and a table of their cost.

Kernels and times are those of an RTX 2060 unless --gpu names another card: kernels that it runs, later cards run too,
in no more memory.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mpt.commands.cli.arguments import AllowLossy, PlannedConfig
from mpt.commands.cli.console import columns, open_console
from mpt.commands.planning.plan_config import common_words, load_planned, progress, write_patch
from mpt.config.schema import Config
from mpt.config.sizes import describe_bytes
from mpt.errors import ConfigError, MemoryBudgetError
from mpt.planner.facts.gpus import Gpu, find_gpu
from mpt.planner.recipes.patch_origin import describe_origin
from mpt.planner.recipes.presets import REFERENCE, SIZES, Preset, find_presets, preset_as_data
from mpt.planner.recipes.recipe import describe_cost, describe_patch
from mpt.report.units import counted, show_seconds
from mpt.run.process.files import failures_explained


@dataclass(frozen=True)
class Command(PlannedConfig):
    """Write a patch for each usual size of card, 6 to 24 GB, and print a table.

    Examples:
      mpt plan presets mine.yaml --output presets
    """

    gpu: Annotated[str | None, typer.Option(metavar="NAME")] = None
    """The card whose kernels and times are planned, by default an RTX 2060."""
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="FOLDER")] = None
    """The folder to write into, by default presets/."""
    allow_lossy: AllowLossy = False


def run(arguments: Command) -> None:
    """Search a recipe for every size, write those that there are, and print them as a table.

    Raises MemoryBudgetError if nothing fits even the largest size.
    """
    config = load_planned(arguments)
    stem, folder = (
        Path(str(arguments.config).removeprefix("@")).stem,
        Path(arguments.output or "presets"),
    )
    taken = [path for size in SIZES if (path := folder / f"{stem}_{size}gb.yaml").exists()]
    if taken:
        raise ConfigError(
            f"mpt plan presets: {taken[0]} exists; remove it first, or name another folder with --output"
        )
    gpu = find_gpu(arguments.gpu or REFERENCE)
    with progress() as told:
        presets = find_presets(config, gpu, allow_lossy=arguments.allow_lossy, on_answer=told)
    command = ["mpt", "train", *common_words(arguments, arguments.overrides)]
    written = [
        write_preset(one, folder / f"{stem}_{one.size_gb}gb.yaml", config, gpu, command)
        for one in presets
    ]
    if arguments.json:
        print(
            json.dumps(
                {"gpu": asdict(gpu), "presets": [preset_as_data(one) for one in written]}, indent=1
            )
        )
    else:
        print_presets(open_console(), config, gpu, written)
    if all(one.recipe is None for one in written):
        raise MemoryBudgetError(
            f"nothing fits even {SIZES[-1]} GB; use a smaller train.batch_size or image"
        )


def write_preset(
    preset: Preset, path: Path, config: Config, gpu: Gpu, command: Sequence[str]
) -> Preset:
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
    with failures_explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_patch(path, recipe.patch, lines, describe_origin(config, gpu.name, preset.budget_bytes))
    return replace(preset, path=path)


def print_presets(console: Console, config: Config, gpu: Gpu, presets: Sequence[Preset]) -> None:
    console.print(
        f"{config.heading}, batch {config.train.batch_size}: presets by size of card, with kernels and times of an "
        f"{gpu.name}",
        style="bold",
    )
    table = columns(">card", "recipe", ">memory", ">of", ">step", "cost")
    for one in presets:
        budget, card = describe_bytes(one.budget_bytes), f"{one.size_gb} GB"
        if one.recipe is None:
            table.add_row(card, "nothing fits", "", budget, "", "")
            continue
        seconds = show_seconds(one.recipe.plan.step_seconds)
        words, cost = describe_patch(one.recipe.patch), describe_cost(one.recipe)
        table.add_row(card, words, describe_bytes(one.recipe.total), budget, seconds, cost)
    console.print(table)
    written = [one.path for one in presets if one.path is not None]
    if written:
        names = ", ".join(path.name for path in written)
        console.print(f"wrote {counted(len(written), 'file')} into {written[0].parent}: {names}")
