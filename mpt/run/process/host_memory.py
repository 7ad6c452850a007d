"""How much memory this process may still take from the host, as Linux reports it."""

from __future__ import annotations

import contextlib
from pathlib import Path

MEMORY = Path("/proc/meminfo")
OWN_GROUP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Return the free memory of the machine or of this process's control group; None if unknown."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(
            line for line in MEMORY.read_text().splitlines() if line.startswith("MemAvailable:")
        )
        left = int(line.split()[1]) * 1024
        return min([left, *left_to_groups()])
    return None


def left_to_groups() -> list[int]:
    """Return the free memory of each control group (version 2) that holds this process and has a limit."""
    found = []
    with contextlib.suppress(OSError, StopIteration):
        own = next(line for line in OWN_GROUP.read_text().splitlines() if line.startswith("0::"))
        group = GROUPS / own.removeprefix("0::").strip("/")
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError, StopIteration):
                limit = int((folder / "memory.max").read_text())  # "max" if there is none
                used = int((folder / "memory.current").read_text())
                lines = (folder / "memory.stat").read_text().splitlines()
                cached = next(line for line in lines if line.startswith("inactive_file "))
                found.append(max(0, limit - used + int(cached.split()[1])))
    return found
