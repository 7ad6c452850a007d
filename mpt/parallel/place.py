"""Which of several processes this one is, as torchrun's variables say. Never imports torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from mpt.errors import ConfigError

NUMBERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


@dataclass
class Place:
    """A rank's place in the world, and its watch's reports to the others."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    has_agent: bool = False
    """Whether torchrun's agent, rather than rank 0, keeps the store that ranks meet at."""
    on_machine: int = 1
    """How many ranks run on this machine."""
    restarts: int = 0
    host: str = field(default_factory=socket.gethostname)
    step: int = 0
    moves: int = 0
    """Counts on whenever this rank has got on."""
    is_waiting: bool = False
    is_ending: bool = False


def check_batch(batch_size: int, size: int) -> None:
    """Raise ConfigError for a batch that has no sample for each of several processes."""
    if batch_size < size:
        raise ConfigError(
            f"train.batch_size: found {batch_size} samples for {size} processes; it is the batch of all of them "
            "together, so give at least one to each"
        )


def read_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return this process's place, or None for a process alone. Raises ConfigError for variables that make no sense."""
    count = environment.get("WORLD_SIZE", "1").strip()
    if not count.isdecimal() or int(count) <= 1:
        return None
    words = {name: environment.get(name, "").strip() for name in NUMBERS}
    missing = [name for name in ("RANK", "MASTER_PORT") if not words[name].isdecimal()]
    address = environment.get("MASTER_ADDR", "").strip()
    if missing or not address:
        raise ConfigError(
            f"WORLD_SIZE={count} says that this is one of several processes, but {(missing or ['MASTER_ADDR'])[0]} is "
            "not set as torchrun sets it. Start with torchrun or `mpt train CONFIG --nproc N`, or unset WORLD_SIZE"
        )
    rank = int(words["RANK"])
    local = environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", words["RANK"])).strip()
    return Place(
        rank=rank,
        size=int(count),
        local_rank=int(local) if local.isdecimal() else rank,
        address=address,
        port=int(words["MASTER_PORT"]),
        has_agent=environment.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
        on_machine=int(words["LOCAL_WORLD_SIZE"])
        if words["LOCAL_WORLD_SIZE"].isdecimal()
        else int(count),
        restarts=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0") or 0),
    )
