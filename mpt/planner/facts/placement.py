"""Which rank of how many is planned, and how they share the work. Never imports torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mpt.errors import ConfigError
from mpt.planner.facts.gpus import Gpu
from mpt.planner.facts.links import Cluster, find_cluster

STRATEGIES = ("ddp", "fsdp")
LARGEST_WORLD = 65536
ON_MACHINE = 8
"""Cards in a machine, if nothing else is said."""


@dataclass(frozen=True)
class Placement:
    """A world of `nproc` ranks with a card each, `per_machine` in a machine."""

    nproc: int = 1
    strategy: str = "ddp"
    network: str | None = None
    per_machine: int = ON_MACHINE
    rank: int = 0

    def cluster(self, gpu: Gpu) -> Cluster:
        """Return the link between the cards."""
        return find_cluster(gpu, self.network, self.per_machine)

    def as_data(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    def groups(self, shard: str, shard_ranks: int | None) -> list[int]:
        """Return the sizes of the groups that a rank has a communicator for, of more than one rank."""
        sizes = [self.nproc]
        if self.strategy == "fsdp" and shard == "hybrid":
            together = shard_ranks or min(self.nproc, self.per_machine)
            sizes += [together, self.nproc // together]
        return [size for size in sizes if size > 1]

    @property
    def words(self) -> str:
        """Its name in tables."""
        return self.strategy


def check_placement(placement: Placement) -> None:
    """Raise ConfigError for a contradiction."""
    if placement.strategy not in STRATEGIES:
        raise ConfigError(
            f"--strategy: found {placement.strategy!r}; allowed: {', '.join(STRATEGIES)}"
        )
    if placement.nproc > LARGEST_WORLD:
        raise ConfigError(f"--nproc: found {placement.nproc}; at most {LARGEST_WORLD}")
