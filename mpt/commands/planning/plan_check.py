"""`mpt plan check FILE`: whether the plan that a lock keeps (`mpt.commands.planning.plan_lock`) has grown since."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.arguments import Allow, Json, Overrides, Patches
from mpt.commands.cli.completion import complete_config
from mpt.commands.planning.plan_lock import Lock, plan_lock, read_lock
from mpt.config.sizes import describe_bytes
from mpt.errors import ConfigError, GateError
from mpt.report.units import show_seconds


@dataclass(frozen=True)
class Command:
    """Exit with 8 if the plan that a lock keeps has grown since."""

    lock: Annotated[Path, typer.Argument(metavar="LOCK", show_default=False)]
    """A file of mpt plan lock."""
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", show_default="the lock's", autocompletion=complete_config)
    ] = None
    """A YAML file to plan in place of the lock's."""
    overrides: Overrides = ()
    patches: Patches = ()
    tolerance: Annotated[str, typer.Option(metavar="SHARE")] = "1%"
    """By how much the peak may rise and the step slow down."""
    gpu: Annotated[str | None, typer.Option(metavar="NAME")] = None
    """The lock's card; another one is refused."""
    allow: Allow = ()
    json: Json = False


SMALL = 100 * 2**20
"""Bytes below which whole MiB would hide a change of some percent."""
NAMED = 3
"""So many kinds and modules are named that grew most..."""
WORTH_NAMING = 2**20
"""... by that many bytes at least, the first of them aside."""


def run(arguments: Command) -> None:
    """Plan again what a lock was made of.

    Raises GateError (exit 8) if the peak or its tensors rose, or the step slowed, by more than the tolerance.
    """
    tolerance = parse_tolerance(arguments.tolerance)
    path = arguments.lock
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
