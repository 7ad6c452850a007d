"""`mpt verify-resume CONFIG`: does a training that was stopped and resumed end as one that was not, bit for bit?

The check itself is `mpt.workflows.examining.resume_check`.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.arguments import Allow, Device, Json, Output, Overrides, Runs
from mpt.commands.cli.completion import complete_run
from mpt.config.checking.layers import write_overrides
from mpt.errors import GateError
from mpt.workflows.comparing.sides import read_side
from mpt.workflows.examining.resume_check import Check, verify_resume


@dataclass(frozen=True)
class Command:
    """Check that a resumed training ends bit for bit the same.

    Exit code 0 if it does, 8 if it does not.

    Examples:
      mpt verify-resume mine.yaml
      mpt verify-resume mine.yaml --steps 50 --kill
    """

    config: Annotated[
        str, typer.Argument(metavar="CONFIG|RUN", show_default=False, autocompletion=complete_run)
    ]
    """A YAML file, or a run whose configuration is taken."""
    overrides: Overrides = ()
    steps: Annotated[int, typer.Option(min=2)] = 20
    """Total number of steps; the run is stopped halfway."""
    kill: bool = False
    """Kill the process three times without warning, at moments that are not chosen, instead of stopping it."""
    output: Output = None
    """The folder in which both runs are kept, by default a temporary one."""
    device: Device = None
    json: Json = False
    allow: Allow = ()
    runs: Runs = "runs"


def run(arguments: Command) -> None:
    """Train with and without a stop and compare. Raises GateError (exit 8) if they differ."""
    overrides = [*arguments.overrides, *write_overrides({"train.device": arguments.device})]
    config = read_side(arguments.config, overrides, Path(arguments.runs), arguments.allow).config

    def tell(text: str) -> None:
        if not arguments.json:
            print(text, flush=True)

    with tempfile.TemporaryDirectory(prefix="mpt-verify-resume-") as temporary:
        folder = Path(arguments.output or temporary)
        found = verify_resume(
            config, folder, Check(arguments.steps, arguments.kill, arguments.allow, tell)
        )
    if arguments.json:
        print(json.dumps(found.to_record()))
    elif found.same:
        print(found.text)
    if not found.same:
        raise GateError(f"verify-resume: {found.text}")
