"""`mpt plan`: what a configuration needs on a GPU that need not be there, and the fastest recipe that fits a budget.

Torch is not imported here: plans are made in processes of their own (`mpt.plan.session`).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mpt.commands.arguments import PlanArguments
from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.config.yaml_text import write_text
from mpt.errors import ConfigError, InputOutputError, MemoryBudgetError
from mpt.plan.budget import describe_bytes, parse_budget
from mpt.plan.calibration import Calibration, learn, load_calibration, read_measurement, save_calibration
from mpt.plan.gpus import DEFAULT, Gpu, find_gpu, installed_gpu
from mpt.plan.search import Recipe, describe_cost, describe_patch, search
from mpt.plan.session import Session
from mpt.plan.timeline import write_timeline
from mpt.run.layout import find_run

WORKERS = 2
SHOWN = 6
PICTURED = 3


def run(arguments: PlanArguments) -> None:
    """Print a plan, search a recipe where there is a budget, or learn from a run.

    Raises MemoryBudgetError (exit 7) when nothing fits, ConfigError for an unknown GPU, budget or configuration.
    """
    if arguments.calibrate is not None:
        calibrate(arguments, arguments.calibrate)
        return
    assert arguments.config is not None
    config = load_config(arguments.config, arguments.overrides, allow=arguments.allow, patches=arguments.patches)
    gpu = choose_gpu(arguments.gpu)
    calibration = load_calibration(gpu.name)
    budget = parse_budget(arguments.vram) if arguments.vram else None
    limit = budget if budget is not None else int(gpu.memory_gib * 2**30) if arguments.gpu else None
    with Session(gpu, calibration, arguments.allow, WORKERS if budget else 1) as session:
        answer = session.plan([config], budget_bytes=limit, largest_batch=limit is not None, timeline=True)[0]
        plan = answer.get()
        if budget is not None:
            refuse_hopeless(plan, budget)
        recipes, refused = search(session, config, gpu, budget) if budget is not None else ([], 0)
    best = next((recipe for recipe in recipes if recipe.fits), None)
    written: list[str] = []
    if best is not None:
        written = write_results(Path(arguments.output or "plan.yaml"), arguments, plan, recipes, budget)
    if arguments.json:
        print(json.dumps(as_data(gpu, calibration, plan, recipes, refused, written), indent=1))
    else:
        console = Console(highlight=False)
        print_plan(console, config, gpu, calibration, plan)
        if recipes:
            print_recipes(console, recipes, refused, written, plan["time_band"])
    if budget is not None and best is None:
        raise MemoryBudgetError(nothing_fits(recipes, budget))


def choose_gpu(name: str | None) -> Gpu:
    """Return the GPU to plan for: by name, the installed one for `auto`, a common one for None."""
    if name is None:
        return find_gpu(DEFAULT)
    if name != "auto":
        return find_gpu(name)
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("--gpu auto: torch sees no CUDA device here; name a card such as rtx2060")
    properties = torch.cuda.get_device_properties(0)
    return installed_gpu(properties.name, properties.total_memory, (properties.major, properties.minor))


def refuse_hopeless(plan: dict[str, Any], budget: int) -> None:
    """Stop before searching where half of the weights alone are too much: no recipe makes them smaller than that."""
    weights = plan["by_category"].get("parameters", 0) // 2
    if plan["context_bytes"] + weights > budget:
        raise MemoryBudgetError(
            f"--vram: {describe_bytes(budget)} is less than the CUDA context "
            f"({describe_bytes(plan['context_bytes'])}) and the weights in half precision "
            f"({describe_bytes(weights)}) need; use a smaller model or a larger card"
        )


def nothing_fits(recipes: list[Recipe], budget: int) -> str:
    """Return the message of exit 7."""
    if not recipes:
        return f"nothing fits {describe_bytes(budget)}: no recipe could be planned"
    smallest = min(recipes, key=lambda recipe: recipe.total)
    return (
        f"nothing fits {describe_bytes(budget)}: the smallest of {len(recipes)} recipes found needs "
        f"{describe_bytes(smallest.total)} ({describe_patch(smallest.patch)}); use a smaller train.batch_size or image"
    )


def write_results(
    path: Path, arguments: PlanArguments, plan: dict[str, Any], recipes: list[Recipe], budget: int | None
) -> list[str]:
    """Write the fastest recipe that fits as a patch, and a picture of the best few beside it; return their paths."""
    best = recipes[0]
    heading = [
        f"# mpt train {arguments.config} --with {path}",
        f"# {describe_patch(best.patch)}: {describe_bytes(best.total)} of {describe_bytes(budget or 0)}, "
        f"{describe_cost(best)}",
    ]
    body = write_text(best.patch) if best.patch else "{}\n"
    try:
        path.write_text("\n".join(heading) + "\n" + body, "utf-8")
    except OSError as error:
        raise InputOutputError(f"{path}: cannot be written: {error}") from error
    panels = [("as it stands", plan["timeline"])]
    panels += [(describe_patch(r.patch), r.plan["timeline"]) for r in recipes[:PICTURED] if r.patch]
    picture = path.with_suffix(".png")
    write_timeline(picture, panels, None if budget is None else budget - plan["context_bytes"])
    return [str(path), str(picture)]


def print_plan(console: Console, config: Config, gpu: Gpu, calibration: Calibration, plan: dict[str, Any]) -> None:
    """Print the configuration as it stands."""
    console.print(f"{config.run_name} on {gpu.name}, batch {plan['batch_size']}, as it stands", style="bold")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("allocated", describe_bytes(plan["allocated"]), "tensors and scratch at the peak")
    table.add_row("reserved", describe_bytes(plan["reserved"]), "by the caching allocator")
    source = f"calibrated by {calibration.source}" if calibration.source else "typical"
    table.add_row("context", describe_bytes(plan["context_bytes"]), source)
    total = plan["reserved"] + plan["context_bytes"]
    table.add_row("in all", describe_bytes(total), verdict(plan))
    table.add_row("peak", "", plan["moment"])
    if plan["largest_batch"] is not None:
        bound = "at least " if plan["largest_is_bound"] else ""
        table.add_row("largest batch", f"{bound}{plan['largest_batch']}", "that fits")
    band = plan["step_seconds"] * plan["time_band"]
    table.add_row("step", f"{plan['step_seconds'] * 1e3:.0f} ms", f"give or take {band * 1e3:.0f} ms")
    console.print(table)
    held = Table("held at the peak", "MiB", box=None, pad_edge=False)
    for name, amount in plan["by_category"].items():
        held.add_row(name, f"{amount / 2**20:,.1f}")
    modules = Table("modules that hold most", "MiB", box=None, pad_edge=False)
    for name, amount in plan["by_module"]:
        modules.add_row(name, f"{amount / 2**20:,.1f}")
    sides = Table.grid(padding=(0, 4))
    sides.add_row(held, modules)
    console.print(sides)
    for note in plan["notes"]:
        console.print(f"note: {note}", markup=False)


def verdict(plan: dict[str, Any]) -> str:
    """Return whether the configuration fits, in words."""
    if plan["fits"] is None:
        return "no budget given (--vram or --gpu)"
    budget = describe_bytes(plan["budget_bytes"])
    if not plan["fits"]:
        return f"does not fit in {budget}"
    return f"fits in {budget}, but only by emptying the cache within a step" if plan["tight"] else f"fits in {budget}"


def print_recipes(console: Console, recipes: list[Recipe], refused: int, written: list[str], band: float) -> None:
    """Print the best few recipes and where the first was written."""
    shown = [recipe for recipe in recipes if recipe.fits][:SHOWN] or recipes[:SHOWN]
    table = Table("recipe", "memory", "step", "fits", "cost", box=None, pad_edge=False)
    for recipe in shown:
        seconds = recipe.plan["step_seconds"]
        table.add_row(
            describe_patch(recipe.patch),
            describe_bytes(recipe.total),
            f"{seconds * 1e3:.0f} ms ± {band:.0%}",
            "yes" if recipe.fits else "no",
            describe_cost(recipe),
        )
    console.print()
    console.print(table)
    fitting = sum(recipe.fits for recipe in recipes)
    console.print(f"{len(recipes)} recipes planned, {fitting} fit, {refused} refused by the configuration")
    for path in written:
        console.print(path, markup=False)


def as_data(
    gpu: Gpu, calibration: Calibration, plan: dict[str, Any], recipes: list[Recipe], refused: int, written: list[str]
) -> dict[str, Any]:
    """Return everything as JSON can hold it, pictures' curves aside."""

    def without_curves(values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name != "timeline"}

    return {
        "gpu": asdict(gpu),
        "calibration": asdict(calibration),
        "plan": without_curves(plan),
        "recipes": [
            {"patch": r.patch, "cost": describe_cost(r), "total_bytes": r.total, **without_curves(r.plan)}
            for r in recipes
        ],
        "refused": refused,
        "written": written,
    }


def calibrate(arguments: PlanArguments, wanted: str) -> None:
    """Learn the unseen parts of a card from a finished run on it."""
    directory, _ = find_run(wanted, Path(arguments.runs))
    measured = read_measurement(directory.path)
    config = load_config(directory.config_path, allow=arguments.allow)
    gpu = choose_gpu(measured.gpu_name)

    with Session(gpu, Calibration(), arguments.allow) as session:
        without = session.plan([config])[0].get()
        session.calibration = Calibration(cudnn_share=1.0)
        scratch = session.plan([config])[0].get()
    found = learn(measured, without["allocated"], scratch["allocated"], without["step_seconds"], str(directory.path))
    path = save_calibration(gpu.name, found)
    error = without["allocated"] / measured.allocated - 1
    planned, seen = describe_bytes(without["allocated"]), describe_bytes(measured.allocated)
    print(f"{gpu.name}: planned {planned}, measured {seen} ({error:+.1%})")
    print(f"context {describe_bytes(found.context_bytes)}, cuDNN share {found.cudnn_share}, time x{found.time_factor}")
    print(path)
