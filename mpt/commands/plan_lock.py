"""`mpt plan CONFIG --lock FILE` keeps a plan, and `mpt plan --check FILE` compares with it, as a gate for CI.

A lock holds the words that it was planned with (configuration, changes, patches, card) and what was planned. Both are
planned without calibration, so that every machine finds the same. What may make a plan grow is the configuration, the
code that it names, mpt and torch; the versions of the last two are kept, and named where they differ.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from mpt import __version__
from mpt.commands.arguments import PlanArguments
from mpt.commands.command_line import given
from mpt.config.load import load_config
from mpt.errors import ConfigError, GateError, InputOutputError
from mpt.planner.budget import describe_bytes
from mpt.planner.calibration import Calibration
from mpt.planner.gpus import DEFAULT, find_gpu
from mpt.planner.session import Session
from mpt.report.units import show_seconds
from mpt.run.files import write_atomically

FORMAT = 1
TOLERANCE = "1%"
CLASHES = (
    "vram",
    "desktop",
    "output",
    "nproc",
    "strategy",
    "network",
    "scaling",
    "largest",
    "gate",
    "infer",
    "presets",
)
LARGEST_BYTES = 1 << 24
SMALL = 100 * 2**20
"""Bytes below which whole MiB would hide a change of some percent."""
NAMED = 3
"""So many kinds and modules are named that grew most..."""
WORTH_NAMING = 2**20
"""... by so many bytes at least, the first of them aside."""


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
        return shlex.join(["mpt", "plan", self.config, *self.overrides, *patches, "--gpu", self.gpu, "--lock"])


def keep_plan(arguments: PlanArguments, path: Path) -> None:
    """Plan a configuration and write its lock."""
    refuse_other_options(arguments, "--lock")
    assert arguments.config is not None
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


def check_plan(arguments: PlanArguments, path: Path) -> None:
    """Plan again what a lock was made of.

    Raises GateError (exit 8) where the peak or its tensors rose, or the step slowed, by more than the tolerance.
    """
    refuse_other_options(arguments, "--check")
    tolerance = parse_tolerance(arguments.tolerance)
    before = read_lock(path)
    if arguments.config is not None:
        before = replace(
            before,
            config=str(arguments.config),
            overrides=tuple(arguments.overrides),
            patches=tuple(str(patch) for patch in arguments.patches),
        )
    if arguments.gpu is not None and arguments.gpu != before.gpu:
        raise ConfigError(f"--gpu: {path} was planned for {before.gpu}; leave it out")
    after = plan_lock(before, arguments.allow)
    grown = describe_growth(before, after, tolerance)
    if arguments.json:
        print(json.dumps({"before": vars(before), "after": vars(after), "grown": grown}, indent=1))
    if grown:
        raise GateError(f"{'; '.join(grown)}{other_versions(before, after)}. To accept it: {before.command} {path}")
    if not arguments.json:
        peak, step = describe_bytes(after.peak_bytes), show_seconds(after.step_seconds)
        print(
            f"{path}: peak {peak} ({change(before.peak_bytes, after.peak_bytes)}), "
            f"step {step} ({change(before.step_seconds, after.step_seconds)}): within {100 * tolerance:.3g} %"
        )


def refuse_other_options(arguments: PlanArguments, own: str) -> None:
    """Raise ConfigError for options that a lock does not keep."""
    for option in given(arguments, CLASHES):
        raise ConfigError(f"{option}: {own} is about the configuration as it stands on one card; leave it out")


def plan_lock(lock: Lock, allow: tuple[str, ...]) -> Lock:
    """Return a lock with what is planned now."""
    config = load_config(lock.config, lock.overrides, allow=allow, patches=[Path(one) for one in lock.patches])
    with Session(find_gpu(lock.gpu), Calibration(), config.granted) as session:
        plan = session.plan([config])[0].get()
    return replace(
        lock,
        versions={"mpt": __version__, "torch": version("torch")},
        peak_bytes=plan["reserved"] + plan["context_bytes"],
        step_seconds=plan["step_seconds"],
        by_category=plan["by_category"],
        by_module=dict(plan["by_module"]),
    )


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
    """Return what grew most, with its bytes: "activations +120 MiB, gradients +3 MiB"."""
    growth = {name: after.get(name, 0) - before.get(name, 0) for name in {*before, *after}}
    largest = sorted((name for name in growth if growth[name] > 0), key=lambda name: (-growth[name], name))[:NAMED]
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


def parse_tolerance(text: str) -> float:
    """Return a share from "1%" or "0.01". Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*(%?)", text.strip())
    if found is None:
        raise ConfigError(f"--tolerance: found {text!r}; write a share such as 1% or 0.01")
    share = float(found[1]) / (100 if found[2] else 1)
    if not found[2] and share > 1:
        raise ConfigError(f"--tolerance: found {text!r}, which is {100 * share:.6g} %; write {share:g}%")
    return share


def read_lock(path: Path) -> Lock:
    """Read a lock. Raises InputOutputError for a file that cannot be read, ConfigError for one that is none."""
    try:
        with path.open("rb") as file:
            values = json.loads(file.read(LARGEST_BYTES))
    except OSError as error:
        raise InputOutputError(f"--check: {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--check: {path} is no lock of mpt plan ({error})") from error
    try:
        if values.pop("format") != FORMAT:
            raise ValueError("another format")
        lock = Lock(**{**values, "overrides": tuple(values["overrides"]), "patches": tuple(values["patches"])})
        if min(lock.peak_bytes, lock.step_seconds) <= 0 or not all(
            isinstance(one, dict) for one in (lock.versions, lock.by_category, lock.by_module)
        ):
            raise ValueError("figures are missing")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--check: {path} is no lock of mpt plan ({error}); write it anew with --lock") from error
    return lock
