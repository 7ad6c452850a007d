"""The trace of one rank's step: the run's own build and step, with its exchange (ddp) or torch's FSDP2."""

from __future__ import annotations

import torch

from mpt.config.schema import Config
from mpt.parallel.world import share
from mpt.planner.facts.gpus import Gpu
from mpt.planner.facts.placement import Placement
from mpt.planner.step.ranks import PlannedRank
from mpt.planner.step.run_fake import FakeRun, trace_config
from mpt.planner.step.shard_trace import fake_world
from mpt.planner.trace.overlap import OrderedWork
from mpt.planner.trace.unseen import Unseen
from mpt.seams import DataSpec


def trace_rank(
    config: Config,
    data: DataSpec,
    batch_size: int,
    gpu: Gpu,
    unseen: Unseen | None,
    placement: Placement,
    device: torch.device | None = None,
    batch_ahead: bool = True,
) -> FakeRun:
    """Trace one rank's build and two steps; `batch_size` is of all ranks together. Raises CannotPlan."""
    settings = config.parallel.model_copy(update={"strategy": placement.strategy})
    work = OrderedWork(ranks=placement.nproc)
    world = PlannedRank(
        placement.rank, placement.nproc, settings, work, device is None, placement.per_machine
    )
    if settings.strategy == "fsdp" and settings.shard == "hybrid":
        together = settings.shard_ranks or world.on_machine
        work.ranks, work.stride = placement.nproc // together, together
    with fake_world(placement.rank, placement.nproc):
        return trace_config(config, data, batch_size, gpu, unseen, device, batch_ahead, world, work)


def share_of(placement: Placement, batch_size: int) -> int:
    """Return how many samples this rank has."""
    start, stop = share(batch_size, placement.rank, placement.nproc)
    return stop - start
