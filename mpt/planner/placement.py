"""Which rank of how many is planned, and how they share the work. Never imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpt.errors import ConfigError
from mpt.planner.gpus import Gpu
from mpt.planner.links import Cluster, find_cluster

STRATEGIES = ("ddp",)
SHARDS = ("full", "grad", "hybrid")
LARGEST_WORLD = 65536


@dataclass(frozen=True)
class Placement:
    """A world of `nproc` ranks with a card each, `per_machine` in a machine."""

    nproc: int = 1
    strategy: str = "ddp"
    shard: str = "full"
    """With fsdp. full: weights, gradients and optimizer state are shared out, and weights are gathered for each use;
    grad: gathered weights stay until backward is done with them; hybrid: full within a machine, copies between."""
    network: str | None = None
    per_machine: int = 8
    rank: int = 0

    def cluster(self, gpu: Gpu) -> Cluster:
        """Return what connects the cards."""
        return find_cluster(gpu, self.network, self.per_machine)

    @property
    def groups(self) -> int:
        """How many communicators each rank has."""
        if self.nproc == 1:
            return 0
        return 2 if self.strategy == "fsdp" and self.shard == "hybrid" and self.nproc > self.per_machine else 1

    @property
    def words(self) -> str:
        """What it is called in tables."""
        return self.strategy if self.strategy == "ddp" else f"fsdp {self.shard}"


def read_placement(values: Mapping[str, Any]) -> Placement:
    """Return a placement from plain data."""
    return Placement(**values)


def check_placement(placement: Placement) -> None:
    """Raise ConfigError for what makes no sense."""
    if placement.strategy not in STRATEGIES:
        raise ConfigError(f"--strategy: found {placement.strategy!r}; allowed: {', '.join(STRATEGIES)}")
    if placement.shard not in SHARDS:
        raise ConfigError(f"--shard: found {placement.shard!r}; allowed: {', '.join(SHARDS)}")
    if placement.nproc > LARGEST_WORLD:
        raise ConfigError(f"--nproc: found {placement.nproc}; at most {LARGEST_WORLD}")
    is_partly_filled = placement.nproc > placement.per_machine and placement.nproc % placement.per_machine > 0
    if placement.shard == "hybrid" and is_partly_filled:
        raise ConfigError(
            f"--shard hybrid: {placement.nproc} processes do not fill machines of {placement.per_machine} cards; "
            "change --nproc or --per-machine"
        )
