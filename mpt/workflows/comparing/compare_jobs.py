"""The number of runs of a comparison at a time, and their cards.

On processors the runs of the first seed are trained one by one: the step times of a comparison are theirs, because runs
side by side share caches and memory bandwidth. The others are for the metric alone, which has the same bits whatever
runs alongside, as many at a time as there are free cores. On several cards each run has one for itself, so
all are side by side and all are timed. On one card runs would share the device that is timed: one at a time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mpt.config.schema import Config
from mpt.report.units import counted
from mpt.run.process.launch import SIDE_BY_SIDE
from mpt.run.process.operating_system import usable_cores

CARDS = "CUDA_VISIBLE_DEVICES"
CARD_FILES = ("nvidia[0-9]*", "kfd", "dxg")
"""Files in /dev on Linux if there may be a card."""
LOOK_SECONDS = 0.3
"""How long the processors are watched for other work."""
COUNT = "import torch; print(torch.cuda.device_count())"


@dataclass(frozen=True)
class Jobs:
    """How many runs at a time, why, and for each the card that it alone sees (none: all see the same devices)."""

    count: int
    reason: str
    cards: tuple[str, ...] = ()

    @property
    def times_alone(self) -> bool:
        """Whether the first seed's runs have to be alone for their times."""
        return self.count > 1 and len(self.cards) < self.count

    def environment(self, slot: int, *, beside: bool) -> dict[str, str]:
        """Return the variables of a run in one of `count` slots, `beside` others or alone."""
        found = {CARDS: self.cards[slot % len(self.cards)]} if self.cards else {}
        if beside and self.times_alone:
            found[SIDE_BY_SIDE] = str(self.count)
        return found

    def turns(self, runs: int, first: int) -> int:
        """Return how many runs' time `runs` runs take, `first` of which are of the first seed."""
        alone = first if self.times_alone else 0
        return alone + -(-(runs - alone) // self.count)

    def describe(self, first: int) -> str:
        """Say how many at a time and why. `first` is the number of the first seed's runs."""
        if self.count == 1:
            return f"one run at a time ({self.reason})"
        before = (
            f"; before them the {first} of the first seed one by one, for the step times"
            * self.times_alone
        )
        return f"{self.count} runs at a time ({self.reason}){before}"


def choose_jobs(configs: Sequence[Config], seeds: int, wanted: int | None = None) -> Jobs:
    """Return how many runs of these configurations, with up to `seeds` seeds each, are trained at a time."""
    devices = {config.train.device for config in configs}
    if wanted == 1 or (wanted is None and seeds == 1):
        return Jobs(
            1, "as --jobs says" if wanted else "with one seed every run is for its step time too"
        )
    if devices == {"cpu"}:
        return on_cores(configs, wanted)
    named = sorted(device for device in devices if device not in ("auto", "cuda"))
    if named or len(devices) > 1:
        return Jobs(
            wanted or 1,
            "as --jobs says" if wanted else f"train.device is {', '.join(sorted(devices))}",
        )
    cards = visible_cards()
    if not cards and is_built_for_intel():
        return Jobs(wanted or 1, "as --jobs says" if wanted else "runs would share an Intel GPU")
    if not cards:
        return on_cores(configs, wanted)
    if wanted is not None:
        return Jobs(wanted, f"as --jobs says, {len(cards)} cards", cards)
    return Jobs(
        len(cards), f"a card each of {len(cards)}" if len(cards) > 1 else "there is one card", cards
    )


def on_cores(configs: Sequence[Config], wanted: int | None) -> Jobs:
    """Return the number of runs at a time on processors."""
    if wanted is not None:
        return Jobs(wanted, "as --jobs says")
    cores = usable_cores()
    each = max(cores_of(config, cores) for config in configs)
    room = f"{counted(cores, 'core')}, {each} for each run"
    if cores < 2 * each:
        return Jobs(1, room)
    busy = busy_cores()
    free = min(cores, round((os.cpu_count() or cores) - busy))
    others = (
        f", and other programs keep {busy:.1f} busy; --jobs says otherwise" if free < cores else ""
    )
    return Jobs(max(1, free // each), room + others)


def cores_of(config: Config, cores: int) -> int:
    """Return how many cores a run keeps busy: its threads, torch's choice of them if none are set, and workers."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    threads = config.train.threads or (int(asked) if asked.isdigit() and int(asked) else cores)
    return int(threads + config.dataset.settings.workers)


def busy_cores(seconds: float = LOOK_SECONDS, file: Path = Path("/proc/stat")) -> float:
    """Return how many cores other programs keep busy just now, without those that give way; 0 if it is not known."""

    def spent() -> float:
        user, _, system = file.read_text().split("\n", 1)[0].split()[1:4]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    try:
        before = spent()
        time.sleep(seconds)
        return (spent() - before) / seconds
    except (OSError, ValueError, AttributeError):
        return 0.0


def visible_cards() -> tuple[str, ...]:
    """Return the name of each card that torch sees, from a process of its own, and only if necessary."""
    given = os.environ.get(CARDS)
    if (
        given is None
        and sys.platform == "linux"
        and not any(True for kind in CARD_FILES for _ in devices(kind))
    ):
        return ()
    try:
        asked = subprocess.run(
            [sys.executable, "-c", COUNT], capture_output=True, text=True, timeout=120
        )
        count = int(asked.stdout or 0)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ()
    names = [word.strip() for word in given.split(",")] if given else list(map(str, range(count)))
    return tuple(names[:count])


def is_built_for_intel() -> bool:
    """Return whether the installed torch is a build for Intel's GPUs, which `auto` then takes, without importing it."""
    try:
        return version("torch").endswith("+xpu")
    except PackageNotFoundError:
        return False


def devices(pattern: str) -> Sequence[Path]:
    """Return the devices of /dev whose name fits a pattern."""
    return list(Path("/dev").glob(pattern))
