"""A configuration's plan on a GPU that need not be here, and the recipes that fit a budget: the output of `mpt plan`.

Torch is not imported here but for `auto`, the GPU that is: plans are made in processes of their own
(`mpt.planner.client.session`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from mpt.config.schema import Config
from mpt.config.sizes import describe_bytes
from mpt.errors import ConfigError, MemoryBudgetError
from mpt.planner.answers.plan import Plan
from mpt.planner.client.processes import count_workers
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import Calibration, Measurement, learn, load_calibration
from mpt.planner.facts.capacity import Capacity, find_capacity
from mpt.planner.facts.gpus import DEFAULT, Gpu, find_gpu, installed_gpu
from mpt.planner.facts.placement import ON_MACHINE, Placement, check_placement
from mpt.planner.facts.verdict import fits_surely
from mpt.planner.recipes.beside import MadeRoom, make_room
from mpt.planner.recipes.recipe import Recipe
from mpt.planner.recipes.search import Search, search
from mpt.run.process.files import refuse_unwritable


@dataclass(frozen=True)
class Planned:
    """A configuration's plan on a GPU, and the recipes that were searched if there is a budget."""

    config: Config
    gpu: Gpu
    calibration: Calibration
    capacity: Capacity
    plan: Plan
    """The configuration's own plan."""
    found: Search
    room: MadeRoom | None = None
    """Changes that make room for moments outside the steps that do not fit."""

    @property
    def budget(self) -> int:
        """The bytes to fit into, if a card or a budget is named."""
        assert self.capacity.budget_bytes is not None
        return self.capacity.budget_bytes

    @property
    def best(self) -> Recipe | None:
        """The fastest recipe that fits; None if none does, and without a budget."""
        return next((recipe for recipe in self.found.recipes if recipe.fits), None)


def make_plan(
    config: Config,
    *,
    vram: str | None = None,
    gpu: str | None = None,
    desktop: str | None = None,
    times_from: str | None = None,
    placement: Placement | None = None,
    largest: bool = False,
    allow_lossy: bool = False,
    snapshot: Path | None = None,
    on_answer: Callable[[int, int], None] = lambda planned, fitting: None,
) -> Planned:
    """Plan a configuration, and search recipes if a budget is given. The caller judges whether one fits.

    `times_from` is another card whose calibrated times are taken, `snapshot` a file for the timeline of CONFIG as it
    stands (`mpt.planner.trace.snapshot`).
    `largest` looks for the largest batch too; `on_answer` gets the numbers of planned and of fitting recipes. Raises
    ConfigError for an unknown GPU or budget, and MemoryBudgetError for a budget that the weights exceed.
    """
    if snapshot is not None:
        refuse_unwritable(snapshot)
    card = choose_gpu(gpu)
    calibration = load_calibration(card.name, times_from)
    capacity = find_capacity(card, gpu is not None, vram, desktop)
    limit = capacity.budget_bytes
    budget = limit if vram else None
    if largest and limit is None:
        raise ConfigError("--largest: a batch is the largest within a budget; add --gpu or --vram")
    if largest and placement is not None:
        raise ConfigError("--largest: it is looked for on one card only; leave out --nproc")
    workers = count_workers() if budget else 1
    with Session(card, calibration, config.granted, workers, placement) as session:
        if budget is None:
            kept = {"snapshot": str(snapshot.absolute())} if snapshot is not None else {}
            plan = session.plan(
                [config], budget_bytes=limit, largest_batch=largest, whole_run=True, **kept
            )[0].get()
            found = Search([], [], [])
        else:
            found = search(
                session,
                config,
                card,
                budget,
                largest_batch=largest,
                allow_lossy=allow_lossy,
                goes_on=partial(needs_search, budget),
                on_answer=on_answer,
            )
            plan = next(one.plan for one in found.recipes if not one.patch)
            if snapshot is not None:
                session.plan([config], budget_bytes=limit, snapshot=str(snapshot.absolute()))[
                    0
                ].get()
        room = make_room(session, config, plan, limit)
        if placement is not None and config.train.batch_size % placement.nproc:
            of_last = replace(placement, rank=placement.nproc - 1)
            last = session.plan([config], budget_bytes=limit, placement=asdict(of_last))[0].get()
            assert plan.ranks is not None
            assert last.ranks is not None
            plan = replace(
                plan,
                ranks=replace(plan.ranks, last_samples=last.ranks.samples, last_total=last.total),
            )
    return Planned(config, card, calibration, capacity, plan, found, room)


def plan_measured(config: Config, measured: Measurement, source: str) -> tuple[Plan, Calibration]:
    """Plan the measurements on a GPU; return the plan, and the calibration that would have made it right."""
    with Session(measured.gpu, Calibration(), config.granted) as session:
        without = session.plan([config])[0].get()
        session.calibration = Calibration(cudnn_share=1.0)
        scratch = session.plan([config])[0].get()
    found = learn(measured, without.allocated, scratch.allocated, without.step_seconds, source)
    return without, found


def find_placement(
    config: Config,
    nproc: int | None,
    strategy: str | None,
    network: str | None,
    per_machine: int | None,
) -> Placement | None:
    """Return the world to plan for, or None for a process alone. Raises ConfigError for one that cannot be."""
    if nproc is None:
        options = {"strategy": strategy, "network": network, "per-machine": per_machine}
        for name, value in options.items():
            if value is not None:
                raise ConfigError(f"--{name}: it is about several processes; add --nproc N")
        return None
    placement = Placement(
        nproc, strategy or config.parallel.strategy, network, per_machine or ON_MACHINE
    )
    check_placement(placement)
    # refuses a network that is not known, before anything is planned
    placement.cluster(find_gpu(DEFAULT))
    if config.train.batch_size < placement.nproc:
        raise ConfigError(
            f"--nproc: train.batch_size is the batch of all processes together, and {config.train.batch_size} samples "
            f"are too few for {placement.nproc}"
        )
    return placement


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
    return installed_gpu(
        properties.name, properties.total_memory, (properties.major, properties.minor)
    )


def needs_search(budget: int, plan: Plan) -> bool:
    """Return whether a configuration needs a recipe: not if it fits with room to spare.

    Raises MemoryBudgetError if the context alone is too much.
    """
    if plan.context_bytes > budget:
        raise MemoryBudgetError(
            f"--vram: {describe_bytes(budget)} is less than the CUDA context needs "
            f"({describe_bytes(plan.context_bytes)}); use a larger card"
        )
    return not fits_surely(plan)
