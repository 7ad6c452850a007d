"""Which rank of how many is planned, and how they share the work. Never imports torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mpt.errors import ConfigError
from mpt.planner.gpus import Gpu
from mpt.planner.links import Cluster, find_cluster

STRATEGIES = ("ddp", "fsdp")
LARGEST_WORLD = 65536


@dataclass(frozen=True)
class Placement:
    """A world of `nproc` ranks with a card each, `per_machine` in a machine."""

    nproc: int = 1
    strategy: str = "ddp"
    network: str | None = None
    per_machine: int = 8
    rank: int = 0

    def cluster(self, gpu: Gpu) -> Cluster:
        """Return what connects the cards."""
        return find_cluster(gpu, self.network, self.per_machine)

    def as_data(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    @property
    def groups(self) -> int:
        """How many communicators each rank has."""
        return 0 if self.nproc == 1 else 1

    @property
    def words(self) -> str:
        """What it is called in tables."""
        return self.strategy


def check_placement(placement: Placement) -> None:
    """Raise ConfigError for what makes no sense."""
    if placement.strategy not in STRATEGIES:
        raise ConfigError(f"--strategy: found {placement.strategy!r}; allowed: {', '.join(STRATEGIES)}")
    if placement.nproc > LARGEST_WORLD:
        raise ConfigError(f"--nproc: found {placement.nproc}; at most {LARGEST_WORLD}")
