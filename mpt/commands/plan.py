"""`mpt plan`: what a configuration needs on a GPU that need not be there, and the fastest recipe that fits a budget.

Torch is not imported here: plans are made in processes of their own (`mpt.planner.session`).
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from mpt.commands.arguments import PlanArguments
from mpt.commands.command_line import given
from mpt.commands.plan_calibrate import calibrate
from mpt.commands.plan_cheapest import show_cheapest
from mpt.commands.plan_inference import refuse_inference_options, show_inference
from mpt.commands.plan_lock import check_plan, keep_plan
from mpt.commands.plan_presets import show_presets
from mpt.commands.plan_progress import progress
from mpt.commands.plan_tables import (
    as_data,
    as_torch_statements,
    describe_largest,
    headline,
    moments_that_do_not_fit,
    print_plan,
    print_scaling,
    print_search,
    worth_showing,
)
from mpt.commands.plan_tune import refuse_planned, show_tuning
from mpt.config.load import load_config
from mpt.config.patch_origin import describe_origin, find_other_cards, find_strange_patches
from mpt.config.schema import Config
from mpt.config.yaml_text import write_text
from mpt.errors import ConfigError, InputOutputError, MayFitError, MemoryBudgetError
from mpt.planner import scaling
from mpt.planner.budget import describe_bytes
from mpt.planner.calibration import load_calibration
from mpt.planner.capacity import find_capacity
from mpt.planner.gpus import Gpu
from mpt.planner.placement import Placement, check_placement
from mpt.planner.planned import choose_gpu, find_placement, make_plan
from mpt.planner.processes import count_workers
from mpt.planner.recipe import EXPLANATIONS, Recipe, describe_cost, describe_patch, total_bytes, without_conflicts
from mpt.planner.releases import parse_release
from mpt.planner.session import Session
from mpt.planner.timeline import write_timeline
from mpt.planner.verdict import judge
from mpt.report.units import show_seconds

PICTURED = 3
OTHER_PLANS = ("calibrate", "check", "lock", "cards", "presets", "infer", "scaling")
"""Options that ask for something else than one plan of CONFIG's training."""


def run(arguments: PlanArguments) -> None:
    """Print a plan, search a recipe where there is a budget, or learn from a run.

    Raises MemoryBudgetError (exit 7) when nothing fits, ConfigError for an unknown GPU, budget or configuration.
    """
    if arguments.tune:
        tune(arguments)
        return
    if arguments.torch is not None:
        refuse_beside_torch(arguments)
    if arguments.times_from is not None:
        refuse_beside_times_from(arguments)
    if arguments.calibrate is not None:
        calibrate(arguments, arguments.calibrate)
        return
    if arguments.check is not None:
        check_plan(arguments, Path(arguments.check))
        return
    if arguments.config is None:
        raise ConfigError("mpt plan: CONFIG is missing; name a YAML file, or --calibrate RUN")
    if arguments.lock is not None:
        keep_plan(arguments, Path(arguments.lock))
        return
    if arguments.cards:
        show_cheapest(load_planned(arguments), arguments)
        return
    if arguments.presets:
        show_presets(load_planned(arguments), arguments)
        return
    if arguments.output is not None and arguments.vram is None:
        raise ConfigError("--output: a recipe is searched and written with a budget only; add --vram, such as 6GiB")
    if arguments.gate and not (arguments.vram or arguments.gpu):
        raise ConfigError("--gate: there is nothing to fit into; add --gpu or --vram")
    path = choose_output(arguments)
    config = load_planned(arguments)
    if arguments.infer:
        gpu = choose_gpu(arguments.gpu)
        show_inference(
            config, arguments, gpu, find_capacity(gpu, arguments.gpu is not None, arguments.vram, arguments.desktop)
        )
        return
    refuse_inference_options(arguments)
    if arguments.scaling is not None:
        show_scaling(config, arguments)
        return
    placement = find_placement(config, arguments.nproc, arguments.strategy, arguments.network, arguments.per_machine)
    with progress() as told:
        planned = make_plan(
            config,
            vram=arguments.vram,
            gpu=arguments.gpu,
            desktop=arguments.desktop,
            torch=arguments.torch,
            times_from=arguments.times_from,
            placement=placement,
            largest=arguments.largest,
            allow_lossy=arguments.allow_lossy,
            on_answer=told,
        )
    gpu, calibration, capacity = planned.gpu, planned.calibration, planned.capacity
    budget = capacity.budget_bytes if arguments.vram else None
    plan, found, best = planned.plan, planned.found, planned.best
    recipes = found.recipes
    if arguments.gpu is not None and capacity.budget_bytes is not None:
        for warning in find_other_cards(arguments.patches, gpu.name, capacity.budget_bytes):
            print(f"warning: {warning}", file=sys.stderr)
    written: list[str] = []
    if best is not None and best.patch:
        assert budget is not None
        written = write_results(path, arguments, config, gpu, plan, recipes, budget)
    if arguments.json:
        print(json.dumps(as_data(gpu, calibration, plan, found, written), indent=1))
    else:
        console = Console(highlight=False)
        console.print(headline(config, gpu, plan, recipes), style="bold", markup=False)
        for statement in (*capacity.statements, *as_torch_statements(plan)):
            console.print(statement, markup=False)
        for name in moments_that_do_not_fit(plan):
            beyond = describe_bytes(plan["moments"][name]["reserved"] + plan["context_bytes"])
            console.print(
                f"its {name} does not fit beside that: {beyond}; use a smaller train.batch_size", markup=False
            )
        if arguments.verbose or budget is None:
            print_plan(console, config, gpu, calibration, plan, arguments.verbose)
        if recipes and (best is None or best.patch):
            print_search(console, found, plan)
        if best is not None and best.plan["largest_batch"] is not None and best.patch:
            console.print(f"largest batch of the first recipe: {' '.join(describe_largest(best.plan))}", markup=False)
        if written:
            console.print(f"wrote {' and '.join(written)}; train the first recipe with", markup=False)
            console.print(f"  {train_command(arguments, path, recipes[0])}", markup=False, soft_wrap=True)
    if budget is not None and best is None:
        raise MemoryBudgetError(nothing_fits(recipes, budget, arguments.allow_lossy))
    if arguments.gate:
        pass_gate(plan if best is None else best.plan)


def refuse_beside_torch(arguments: PlanArguments) -> None:
    """Raise ConfigError for a release of torch that is not known, and for what is planned as the installed one only."""
    parse_release(str(arguments.torch))
    for option in given(arguments, (*OTHER_PLANS, "nproc")):
        raise ConfigError(f"--torch: it is about training CONFIG on one card; leave it or {option} out")


def refuse_beside_times_from(arguments: PlanArguments) -> None:
    """Raise ConfigError for what shows no time of one plan, or must not depend on what this machine has calibrated."""
    for option in given(arguments, OTHER_PLANS):
        raise ConfigError(f"--times-from: it is about the time of a plan of CONFIG; leave it or {option} out")


def load_planned(arguments: PlanArguments) -> Config:
    """Return the configuration that is to be planned, with warnings about patches that were made for another."""
    assert arguments.config is not None
    # first, so that what goes with it alone (parallel.shard, parallel.offload) may be overridden too
    sharded = ("parallel.strategy=fsdp",) if arguments.strategy == "fsdp" else ()
    overrides = (*sharded, *arguments.overrides)
    config = load_config(arguments.config, overrides, allow=arguments.allow, patches=arguments.patches)
    for warning in find_strange_patches(arguments.patches, config):
        print(f"warning: {warning}", file=sys.stderr)
    return config


def pass_gate(plan: dict[str, Any]) -> None:
    """Raise MayFitError (exit 10) or MemoryBudgetError (exit 7) unless a plan fits its budget."""
    found, budget = judge(plan), describe_bytes(plan["budget_bytes"])
    assert found is not None
    if found.kind == "does not fit":
        raise MemoryBudgetError(f"does not fit in {budget}")
    if found.kind == "may fit":
        raise MayFitError(f"may fit in {budget}: {found.likely}{', by emptying the cache' * plan['tight']}")


def show_scaling(config: Config, arguments: PlanArguments) -> None:
    """Plan from one card to many, and print and draw them."""
    gpu = choose_gpu(arguments.gpu)
    capacity = find_capacity(gpu, arguments.gpu is not None, arguments.vram, arguments.desktop)
    base = Placement(arguments.nproc or scaling.LARGEST, network=arguments.network, per_machine=arguments.per_machine)
    check_placement(replace(base, strategy=arguments.strategy or base.strategy))
    cluster = base.cluster(gpu)
    picture = free_name("scaling", ".png")
    with Session(gpu, load_calibration(gpu.name), config.granted, count_workers()) as session:
        found = scaling.plan_scaling(
            session, config, str(arguments.scaling), base, arguments.strategy, capacity.budget_bytes
        )
    title = f"{config.run_name} on {gpu.name}, {arguments.scaling} scaling, {cluster.link} and {cluster.network}"
    scaling.write_picture(picture, found, title, capacity.budget_bytes)
    if arguments.json:
        print(json.dumps({**scaling.as_data(found), "gpu": asdict(gpu), "written": [str(picture)]}, indent=1))
        return
    console = Console(highlight=False)
    for statement in capacity.statements:
        console.print(statement, markup=False)
    print_scaling(console, found, title)
    console.print(f"wrote {picture}", markup=False)


def tune(arguments: PlanArguments) -> None:
    """Measure which kernels are fastest for CONFIG's step on this device."""
    refuse_planned(arguments)
    if arguments.config is None:
        raise ConfigError("--tune: CONFIG is missing; name a YAML file")
    path = choose_output(arguments, "tuned")
    words = ["mpt", "train", *_common_words(arguments, arguments.overrides)]
    show_tuning(load_planned(arguments), arguments, path, words)


def choose_output(arguments: PlanArguments, stem: str = "plan") -> Path:
    """Return where the patch goes: never over a file that is there.

    Raises ConfigError where that was asked for, and InputOutputError where nothing can be written, before anything is
    planned or measured.
    """
    given = {Path(patch).resolve() for patch in arguments.patches}
    if arguments.output is None:
        path = free_name(stem, ".yaml")
    else:
        path = Path(arguments.output)
        if path.resolve() in given:
            raise ConfigError(f"--output: {path} is given with --with, and the recipe builds on it: name another file")
        if os.path.lexists(path) and not path.is_dir():
            raise ConfigError(f"--output: {path} exists; name another file, or remove it first")
    is_written = arguments.vram or arguments.tune
    if is_written and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        raise InputOutputError(f"{path}: cannot be written: it is a folder, or its folder is missing or read-only")
    return path


def free_name(stem: str, suffix: str) -> Path:
    """Return a name in this folder that is not there yet."""
    numbered = (Path(f"{stem}-{number}{suffix}") for number in itertools.count(2))
    return next(name for name in itertools.chain([Path(f"{stem}{suffix}")], numbered) if not os.path.lexists(name))


def nothing_fits(recipes: list[Recipe], budget: int, tried_lossy: bool) -> str:
    """Return the message of exit 7."""
    if not recipes:
        return f"nothing fits {describe_bytes(budget)}: no recipe could be planned"
    smallest = min(recipes, key=lambda recipe: recipe.total)
    return (
        f"nothing fits {describe_bytes(budget)}: the smallest of {len(recipes)} recipes found needs "
        f"{describe_bytes(smallest.total)} ({describe_patch(smallest.patch)}); use a smaller train.batch_size or image"
        f"{'' if tried_lossy else ', or --allow-lossy, which also tries what changes the learnt result'}"
    )


def write_results(
    path: Path,
    arguments: PlanArguments,
    config: Config,
    gpu: Gpu,
    plan: dict[str, Any],
    recipes: list[Recipe],
    budget: int,
) -> list[str]:
    """Write the first recipe as a patch, and a picture of the first few beside it; return their paths."""
    best = recipes[0]
    heading = [
        train_command(arguments, path, best),
        "",
        f"{described(best)}: {describe_bytes(best.total)} of {describe_bytes(budget)},",
        f"{show_seconds(best.plan['step_seconds'])} a step give or take {plan['time_band']:.0%}, predicted by",
        plan_command(arguments),
        *([f"lossy: {EXPLANATIONS['lossy']}"] if best.is_lossy else []),
    ]
    body = write_text(best.patch) if best.patch else "{}\n"
    try:
        comments = "".join(f"# {line}".rstrip() + "\n" for line in heading)
        path.write_text(f"{comments}{describe_origin(config, gpu.name, budget)}\n{body}", "utf-8")
    except OSError as error:
        raise InputOutputError(f"{path}: cannot be written: {error}") from error
    panels = [(f"as it stands: {describe_bytes(total_bytes(plan))}", plan["timeline"])]
    shown = [one for one in worth_showing(recipes)[:PICTURED] if one.patch]
    panels += [(f"{described(one)}: {describe_bytes(one.total)}", one.plan["timeline"]) for one in shown]
    picture = path.with_suffix(".png")
    title = f"{config.run_name}, batch {plan['batch_size']}, on {gpu.name} with {describe_bytes(budget)}"
    write_timeline(picture, panels, budget - plan["context_bytes"], title)
    return [str(path), str(picture)]


def described(recipe: Recipe) -> str:
    """Return a recipe and what it costs, as the patch and the picture name it."""
    return f"{describe_patch(recipe.patch)} ({describe_cost(recipe)})"


def train_command(arguments: PlanArguments, path: Path, best: Recipe) -> str:
    """Return the command that trains a recipe whose patch is at `path`."""
    overrides = without_conflicts(arguments.overrides, best.patch)
    return shlex.join(["mpt", "train", *_common_words(arguments, overrides), "--with", str(path)])


def plan_command(arguments: PlanArguments) -> str:
    """Return the command that was given."""
    words = ["mpt", "plan", *_common_words(arguments, arguments.overrides), "--vram", str(arguments.vram)]
    words += ["--gpu", arguments.gpu] if arguments.gpu else []
    words += ["--desktop", arguments.desktop] if arguments.desktop else []
    words += ["--allow-lossy"] if arguments.allow_lossy else []
    words += ["--torch", arguments.torch] if arguments.torch else []
    words += ["--times-from", arguments.times_from] if arguments.times_from else []
    words += ["--nproc", str(arguments.nproc)] if arguments.nproc else []
    words += ["--strategy", arguments.strategy] if arguments.strategy else []
    words += ["--network", arguments.network] if arguments.network else []
    words += ["--output", arguments.output] if arguments.output else []
    return shlex.join(words)


def _common_words(arguments: PlanArguments, overrides: Sequence[str]) -> list[str]:
    words = [str(arguments.config), *overrides]
    words += [word for package in arguments.allow for word in ("--allow", package)]
    return words + [word for given in arguments.patches for word in ("--with", str(given))]
