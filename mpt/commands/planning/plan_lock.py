"""`mpt plan lock CONFIG` keeps a plan in a file, with which `mpt plan check FILE` compares, as a gate for CI.

A lock holds the words that it was planned with (configuration, changes, patches, card) and the plan. Both are
planned without calibration, so that every machine finds the same. What may make a plan grow is the configuration, the
code that it names, mpt and torch; the versions of the last two are kept, and named if they differ.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.arguments import Card, PlannedConfig
from mpt.config.load import load_config
from mpt.config.sizes import describe_bytes
from mpt.errors import ConfigError, InputOutputError
from mpt.foreign.files import read_json
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import DEFAULT, find_gpu
from mpt.report.units import show_seconds
from mpt.run.process.files import write_atomically
from mpt.version import VERSION


@dataclass(frozen=True)
class Command(PlannedConfig):
    """Keep the plan of CONFIG unchanged in a file for mpt plan check."""

    gpu: Card = None
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE")] = "plan.lock"
    """The file to write."""


FORMAT = 1
LARGEST_BYTES = 1 << 24


@dataclass(frozen=True)
class Lock:
    """A plan that was kept, and what it was made of."""

    config: str
    overrides: tuple[str, ...]
    patches: tuple[str, ...]
    gpu: str
    versions: Mapping[str, str]
    peak_bytes: int
    """The allocator's peak and the CUDA context."""
    step_seconds: float
    by_category: Mapping[str, int]
    by_module: Mapping[str, int]

    @property
    def tensor_bytes(self) -> int:
        """What of the peak is tensors: a small network's drown in the context and the allocator's segments."""
        return sum(self.by_category.values())

    @property
    def command(self) -> str:
        """The command that keeps this configuration's plan anew, but for the file."""
        patches = (word for patch in self.patches for word in ("--with", patch))
        return shlex.join(
            ["mpt", "plan", "lock", self.config, *self.overrides, *patches, "--gpu", self.gpu, "--output"]
        )


def run(arguments: Command) -> None:
    """Plan a configuration and write its lock."""
    path = Path(arguments.output)
    lock = plan_lock(
        Lock(
            config=str(arguments.config),
            overrides=tuple(arguments.overrides),
            patches=tuple(str(patch) for patch in arguments.patches),
            gpu=arguments.gpu or DEFAULT,
            versions={},
            peak_bytes=0,
            step_seconds=0.0,
            by_category={},
            by_module={},
        ),
        arguments.allow,
    )
    write_atomically(path, json.dumps({"format": FORMAT, **vars(lock)}, indent=1) + "\n")
    print(f"{path}: peak {describe_bytes(lock.peak_bytes)}, step {show_seconds(lock.step_seconds)} on {lock.gpu}")


def plan_lock(lock: Lock, allow: tuple[str, ...]) -> Lock:
    """Return a lock with what is planned now."""
    config = load_config(lock.config, lock.overrides, allow=allow, patches=[Path(one) for one in lock.patches])
    with Session(find_gpu(lock.gpu), Calibration(), config.granted) as session:
        plan = session.plan([config])[0].get()
    return replace(
        lock,
        versions={"mpt": VERSION, "torch": version("torch")},
        peak_bytes=plan.with_room,
        step_seconds=plan.step_seconds,
        by_category=plan.by_category,
        by_module=dict(plan.by_module),
    )


def read_lock(path: Path) -> Lock:
    """Read a lock. Raises InputOutputError for a file that cannot be read, ConfigError for one that is none."""
    try:
        values = read_json(path, LARGEST_BYTES)
    except OSError as error:
        raise InputOutputError(f"mpt plan check: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"mpt plan check: {path} is no lock of mpt plan ({error})") from error
    try:
        if values.pop("format") != FORMAT:
            raise ValueError("another format")
        lock = Lock(**{**values, "overrides": tuple(values["overrides"]), "patches": tuple(values["patches"])})
        if min(lock.peak_bytes, lock.step_seconds) <= 0 or not all(
            isinstance(one, dict) for one in (lock.versions, lock.by_category, lock.by_module)
        ):
            raise ValueError("figures are missing")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"mpt plan check: {path} is no lock of mpt plan ({error}); write it anew with mpt plan lock"
        ) from error
    return lock
