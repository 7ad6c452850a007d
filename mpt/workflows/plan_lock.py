"""A plan kept in a file, and whether a later plan of the same has grown: a gate for CI.

A lock holds the words that it was planned with (a configuration with changes and patches, or a script or function with
its arguments; the card) and the plan. Both are planned without calibration, so that every machine finds the same. What
may make a plan grow is the configuration, the code that it names, mpt and torch; the versions of the last two are
kept, and named if they differ.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from mpt.config.load import load_config
from mpt.config.sizes import describe_bytes
from mpt.errors import ConfigError, InputOutputError
from mpt.foreign.files import read_json
from mpt.planner.answers.plan import Plan
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.recipes.own_step import SCRIPT, arguments_of, is_own, plan_own_step
from mpt.report.units import show_seconds
from mpt.run.process.files import write_atomically
from mpt.version import VERSION

FORMAT = 1
LARGEST_BYTES = 1 << 24
SMALL = 100 * 2**20
"""Bytes below which whole MiB would hide a change of some percent."""
NAMED = 3
"""So many kinds and modules are named that grew most..."""
WORTH_NAMING = 2**20
"""... by that many bytes at least, the first of them aside."""


@dataclass(frozen=True)
class Lock:
    """A plan that was kept, and what it was made of."""

    config: str
    overrides: tuple[str, ...]
    patches: tuple[str, ...]
    gpu: str
    versions: Mapping[str, str] = field(default_factory=dict)
    peak_bytes: int = 0
    """The allocator's peak and the CUDA context; 0 before it is planned."""
    step_seconds: float = 0.0
    by_category: Mapping[str, int] = field(default_factory=dict)
    by_module: Mapping[str, int] = field(default_factory=dict)

    @property
    def tensor_bytes(self) -> int:
        """What of the peak is tensors: a small network's drown in the context and the allocator's segments."""
        return sum(self.by_category.values())

    def command(self, path: Path) -> str:
        """Return the command that keeps this plan anew in a file."""
        patches = (word for patch in self.patches for word in ("--with", patch))
        options = [*patches, "--gpu", self.gpu, "--output", str(path)]
        follow = ["--", *self.overrides] if SCRIPT.fullmatch(self.config) else []
        first = [] if follow else self.overrides
        return shlex.join(["mpt", "plan", "lock", self.config, *first, *options, *follow])


def plan_again(lock: Lock, allow: tuple[str, ...]) -> Lock:
    """Return a lock with what is planned now for what it was made of."""
    plan = plan_script(lock, allow) if is_own(lock.config) else plan_configuration(lock, allow)
    return replace(
        lock,
        versions={"mpt": VERSION, "torch": version("torch")},
        peak_bytes=plan.with_room,
        step_seconds=plan.step_seconds,
        by_category=plan.by_category,
        by_module=dict(plan.by_module),
    )


def plan_configuration(lock: Lock, allow: tuple[str, ...]) -> Plan:
    """Plan the configuration of a lock."""
    config = load_config(
        lock.config, lock.overrides, allow=allow, patches=[Path(one) for one in lock.patches]
    )
    with Session(find_gpu(lock.gpu), Calibration(), config.granted) as session:
        return session.plan([config])[0].get()


def plan_script(lock: Lock, allow: tuple[str, ...]) -> Plan:
    """Plan the script or function of a lock."""
    if lock.patches:
        raise ConfigError(f"--with: {lock.config} is no configuration, which patches are laid over")
    return plan_own_step(
        lock.config,
        **arguments_of(lock.config, lock.overrides),
        allow=allow,
        gpu=lock.gpu,
        calibration=Calibration(),
        with_changes=False,
    ).plan


def write_lock(lock: Lock, path: Path) -> None:
    """Write a lock. Raises InputOutputError."""
    write_atomically(path, json.dumps({"format": FORMAT, **vars(lock)}, indent=1) + "\n")


def read_lock(path: Path) -> Lock:
    """Read a lock. Raises InputOutputError for a file that cannot be read, ConfigError for one that is none."""
    try:
        values = read_json(path, LARGEST_BYTES)
    except OSError as error:
        raise InputOutputError(
            f"mpt plan check: {path} cannot be read: {error.strerror}"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"mpt plan check: {path} is no lock of mpt plan; write it anew with mpt plan lock"
        ) from error
    try:
        if values.pop("format") != FORMAT:
            raise ValueError("another format")
        lock = Lock(
            **{
                **values,
                "overrides": tuple(values["overrides"]),
                "patches": tuple(values["patches"]),
            }
        )
        if min(lock.peak_bytes, lock.step_seconds) <= 0 or not all(
            isinstance(one, dict) for one in (lock.versions, lock.by_category, lock.by_module)
        ):
            raise ValueError("figures are missing")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"mpt plan check: {path} is no lock of mpt plan ({error}); write it anew with mpt plan lock"
        ) from error
    return lock


def describe_growth(before: Lock, after: Lock, tolerance: float) -> list[str]:
    """Return a sentence for the peak and one for the step, of those that grew by more than the tolerance."""
    grown = []
    peaks = {
        "the peak": (before.peak_bytes, after.peak_bytes),
        "what tensors take of the peak": (before.tensor_bytes, after.tensor_bytes),
    }
    for name, (old, new) in peaks.items():
        if new > old * (1 + tolerance):
            kinds = largest_growth(before.by_category, after.by_category)
            modules = largest_growth(before.by_module, after.by_module)
            grown.append(
                f"{name} rose from {show_memory(old)} to {show_memory(new)} ({change(old, new)})"
                + (f": {kinds}" if kinds else "")
                + (f", in {modules}" if modules else "")
            )
            break
    if after.step_seconds > before.step_seconds * (1 + tolerance):
        grown.append(
            f"the step slowed from {show_seconds(before.step_seconds)} to {show_seconds(after.step_seconds)} "
            f"({change(before.step_seconds, after.step_seconds)})"
        )
    return grown


def largest_growth(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Return the largest increases, with their bytes: "activations +120 MiB, gradients +3 MiB"."""
    growth = {name: after.get(name, 0) - before.get(name, 0) for name in {*before, *after}}
    largest = sorted(
        (name for name in growth if growth[name] > 0), key=lambda name: (-growth[name], name)
    )[:NAMED]
    largest = [name for name in largest if name == largest[0] or growth[name] >= WORTH_NAMING]
    return ", ".join(f"{name} +{show_memory(growth[name])}" for name in largest)


def show_memory(size: int) -> str:
    """Return an amount of memory of which a change of some percent is seen: "7.2 MiB", "532 MiB"."""
    return describe_bytes(size) if size >= SMALL else f"{size / 2**20:.3g} MiB"


def other_versions(before: Lock, after: Lock) -> str:
    """Return in words which versions differ."""
    changed = [
        f"{name} is {after.versions[name]} and was {old}"
        for name, old in before.versions.items()
        if after.versions.get(name, old) != old
    ]
    return f" ({', '.join(changed)})" if changed else ""


def change(before: float, after: float) -> str:
    """Return a change in percent."""
    return f"{after / before - 1:+.1%}"
