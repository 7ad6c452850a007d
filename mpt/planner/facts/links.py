"""Links between cards, and the time of a collective on them.

A collective costs a latency per step of its algorithm and the time of its bytes on the slowest link of its ring:

- ring all-reduce: 2 (n-1) steps, 2 (n-1)/n of the bytes; all-gather and reduce-scatter: half of each
  (Thakur, Rabenseifner & Gropp, "Optimization of Collective Communication Operations in MPICH", 2005);
- tree all-reduce: 2 log2(machines) steps between machines, about twice the bytes. NCCL takes the faster of the two.

Latencies are those of NCCL's own model (`src/graph/tuning.cc`, `baseLat` and `hwLat`, protocol Simple). Between
machines every card drives its own network card, so a ring gets the sum of a machine's network cards, and never more
than the links inside give. Links inside are those of `mpt.planner.facts.gpus`: NVLink and Infinity Fabric, else PCI
Express. GeForce cards since the RTX 40 series have no NVLink, and consumer cards reach each other through the host's
memory, which halves the rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mpt.errors import ConfigError
from mpt.planner.facts.gpus import Gpu

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]

NETWORKS: Mapping[str, tuple[float, str]] = {
    "ethernet-10": (1.25, "10 Gbit/s Ethernet"),
    "ethernet-25": (3.125, "25 Gbit/s Ethernet"),
    "ethernet-100": (12.5, "100 Gbit/s Ethernet"),
    "infiniband-hdr": (200.0, "InfiniBand HDR, 200 Gbit/s for each card (DGX A100)"),
    "infiniband-ndr": (400.0, "InfiniBand NDR, 400 Gbit/s for each card (DGX H100)"),
}
"""Name -> GB/s of a machine with eight cards, in one direction."""
LINK_SHARE = 0.8
"""The share of a link that collectives reach: nccl-tests on 8 A100 give 230 to 240 of 300 GB/s."""
NETWORK_SHARE = 0.9
BASE_SECONDS = 8.4e-6
STEP_SECONDS = {"NVLink": 3.4e-6, "PCI Express": 5.7e-6, "network": 14.0e-6}
CHANNELS = {"NVLink": 16, "PCI Express": 2}
"""Rings in parallel: NCCL's choice differs by topology and version; `NCCL_DEBUG=INFO` prints it."""
CHANNEL_BYTES = 4 * 2**20 + 8 * 512 * 8 * 16 + 8 * 120 * 640 * 8
"""A channel's FIFOs for one connection: Simple 4 MiB, LL 0.5 MiB, LL128 4.7 MiB (`src/init.cc`, `computeBuffSizes`)."""
CONNECTIONS = 2
"""A ring's and a tree's."""


@dataclass(frozen=True)
class Cluster:
    """Cards and the links between them; rates in bytes per second."""

    link: str
    link_rate: float
    network: str
    network_rate: float
    per_machine: int

    def communicator_bytes(self, size: int) -> int:
        """Return the bytes of one NCCL communicator on the card, outside torch's allocator."""
        return 0 if size == 1 else CHANNELS[self.link] * CHANNEL_BYTES * CONNECTIONS

    def seconds(self, kind: Kind, count: int, size: int, stride: int = 1) -> float:
        """Return the time of a collective of `count` bytes (the whole tensor's) over `size` ranks.

        `stride`: distance between neighbours; a group of one rank per machine has the machine's number of cards.
        """
        if size == 1:
            return 0.0
        machines = (
            size if stride >= self.per_machine else math.ceil(size * stride / self.per_machine)
        )
        rate = self.link_rate * LINK_SHARE
        if machines > 1:
            # Groups that cross machines side by side share the machine's network cards.
            rate = min(rate, self.network_rate * NETWORK_SHARE / min(stride, self.per_machine))
        rounds = 2 if kind == "all_reduce" else 1
        slow = min(size, machines) if machines > 1 else 0
        ring = rounds * (
            (size - 1 - slow) * STEP_SECONDS[self.link] + slow * STEP_SECONDS["network"]
        )
        on_wire = rounds * count * (size - 1) / size / rate
        if kind != "all_reduce":
            return BASE_SECONDS + max(0.0, ring) + on_wire
        inside = min(size, self.per_machine) - 1
        tree = 2 * (
            inside * STEP_SECONDS[self.link] + math.log2(machines) * STEP_SECONDS["network"]
        )
        return BASE_SECONDS + min(max(0.0, ring) + on_wire, tree + 2 * count / rate)


def find_cluster(gpu: Gpu, network: str | None, per_machine: int) -> Cluster:
    """Return the link between cards of this kind. Raises ConfigError for a network that is not known."""
    if network is None:
        network = "infiniband-ndr" if gpu.name in ("h100", "h200", "mi300x") else "ethernet-25"
        network = "infiniband-hdr" if gpu.name in ("a100", "a100-80gb", "mi250") else network
    if network not in NETWORKS:
        raise ConfigError(f"--network: there is no {network!r}; known: {', '.join(NETWORKS)}")
    rate = NETWORKS[network][0] * 1e9
    if network.startswith("infiniband"):
        rate *= per_machine / 8
    if gpu.peer_link:
        return Cluster("NVLink", gpu.peer_link * 1e9, network, rate, per_machine)
    through_host = 0.5 if gpu.name.startswith(("gtx", "rtx")) else 1.0
    return Cluster("PCI Express", gpu.host_link * 1e9 * through_host, network, rate, per_machine)
