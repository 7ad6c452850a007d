"""`mpt plan infer CONFIG`: memory and time of inference on a GPU that need not be there, and the batch or tile that
fits.

`mpt infer --vram` asks the same planner for its batch.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console

from mpt.commands.cli.arguments import Card, Desktop, PlannedConfig
from mpt.commands.cli.console import open_console
from mpt.commands.planning.plan_config import load_planned
from mpt.commands.planning.plan_tables import describe_range, held_tables, memory_table
from mpt.config.schema import Config
from mpt.config.sizes import describe_bytes
from mpt.errors import ConfigError, MemoryBudgetError
from mpt.planner.answers.plan import InferencePlan
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import load_calibration
from mpt.planner.facts.capacity import Capacity, find_capacity
from mpt.planner.facts.gpus import Gpu
from mpt.planner.recipes.planned import choose_gpu
from mpt.planner.recipes.words import inference_headline
from mpt.report.units import show_seconds


@dataclass(frozen=True)
class Command(PlannedConfig):
    """Plan inference: its needs, and the largest batch or tile that fits.

    Examples:
      mpt plan infer mine.yaml --vram 4GiB --half
      mpt plan infer @dain_vimeo --frame 1920x1080 --vram 2GiB
    """

    vram: Annotated[str | None, typer.Option(metavar="SIZE")] = None
    """The memory to fit into, such as 4GiB."""
    gpu: Card = None
    desktop: Desktop = None
    half: bool = False
    """Weights in half, as mpt infer --half stores them."""
    dtype: str | None = None
    """float32, float16 or bfloat16, as for mpt infer."""
    frame: Annotated[str | None, typer.Option(metavar="WxH")] = None
    """The size of frames that are cut into tiles, such as 1920x1080; the tile is chosen to fit."""


def run(arguments: Command) -> None:
    """Plan a configuration's inference and print it.

    Raises MemoryBudgetError if not even one sample, or the smallest tile, fits.
    """
    config, gpu = load_planned(arguments), choose_gpu(arguments.gpu)
    capacity = find_capacity(gpu, arguments.gpu is not None, arguments.vram, arguments.desktop)
    calibration = load_calibration(gpu.name)
    frame = parse_frame(arguments.frame)
    if frame is not None and capacity.budget_bytes is None:
        raise ConfigError("--frame: tiles are chosen for a budget; add --gpu or --vram")
    with Session(gpu, calibration, config.granted) as session:
        plan = session.infer(
            config,
            batch_size=config.train.batch_size if frame is None else 1,
            half=arguments.half,
            dtype=arguments.dtype,
            budget_bytes=capacity.budget_bytes,
            frame=frame,
        ).get()
    if arguments.json:
        print(
            json.dumps(
                {
                    "gpu": asdict(gpu),
                    "calibration": asdict(calibration),
                    "inference": plan.as_data(),
                },
                indent=1,
            )
        )
    else:
        print_inference(open_console(), config, gpu, capacity, plan, frame)
    if frame is not None and plan.tile is None:
        raise MemoryBudgetError(
            f"not even the smallest tile of a frame fits in {describe_bytes(plan.budget)}"
        )
    if plan.largest_batch == 0:
        raise MemoryBudgetError(f"not even one sample fits in {describe_bytes(plan.budget)}")


def parse_frame(text: str | None) -> tuple[int, int] | None:
    """Return height and width of "1920x1080". Raises ConfigError."""
    if text is None:
        return None
    found = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text)
    if found is None:
        raise ConfigError(f"--frame: found {text!r}; write width and height, 1920x1080")
    return int(found[2]), int(found[1])


def print_inference(
    console: Console,
    config: Config,
    gpu: Gpu,
    capacity: Capacity,
    plan: InferencePlan,
    frame: tuple[int, int] | None,
) -> None:
    console.print(inference_headline(config, gpu, plan, frame), style="bold")
    for statement in capacity.statements:
        console.print(statement)
    if frame is None:
        table = memory_table(plan)
        table.add_row("context", describe_bytes(plan.context_bytes), "")
        table.add_row("weights", describe_bytes(plan.weight_bytes), "of all networks")
        table.add_row(
            "batch",
            show_seconds(plan.batch_seconds),
            describe_range(plan.batch_seconds, plan.time_band),
        )
        console.print(table)
        console.print()
        console.print(held_tables(plan))
    for note in plan.notes:
        console.print(f"note: {note}")
