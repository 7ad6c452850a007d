"""`mpt plan check FILE`: whether the plan that a lock keeps (`mpt.workflows.plan_lock`) has grown since."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.arguments import Allow, Json, Overrides, Patches
from mpt.commands.cli.completion import complete_config
from mpt.config.sizes import describe_bytes
from mpt.errors import ConfigError, GateError
from mpt.report.units import show_seconds
from mpt.workflows.plan_lock import change, describe_growth, other_versions, plan_again, read_lock


@dataclass(frozen=True)
class Command:
    """Exit with 8 if the plan that a lock keeps has grown since.

    Examples:
      mpt plan check plan.lock --tolerance 1%
    """

    lock: Annotated[Path, typer.Argument(metavar="LOCK", show_default=False)]
    """A file of mpt plan lock."""
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", show_default="the lock's", autocompletion=complete_config),
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


def run(arguments: Command) -> None:
    """Plan again the configuration of a lock.

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
    after = plan_again(before, arguments.allow)
    grown = describe_growth(before, after, tolerance)
    if arguments.json:
        print(json.dumps({"before": vars(before), "after": vars(after), "grown": grown}, indent=1))
    if grown:
        raise GateError(
            f"{'; '.join(grown)}{other_versions(before, after)}. To accept it: {before.command(path)}"
        )
    if not arguments.json:
        peak, step = describe_bytes(after.peak_bytes), show_seconds(after.step_seconds)
        print(
            f"{path}: peak {peak} ({change(before.peak_bytes, after.peak_bytes)}), "
            f"step {step} ({change(before.step_seconds, after.step_seconds)}): within {100 * tolerance:.3g} %"
        )


def parse_tolerance(text: str) -> float:
    """Return a share from "1%" or "0.01". Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*(%?)", text.strip())
    if found is None:
        raise ConfigError(f"--tolerance: found {text!r}; write a share such as 1% or 0.01")
    share = float(found[1]) / (100 if found[2] else 1)
    if not found[2] and share > 1:
        raise ConfigError(
            f"--tolerance: found {text!r}, which is {100 * share:.6g} %; write {share:g}%"
        )
    return share
