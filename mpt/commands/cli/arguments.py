"""Arguments and options that several commands have. No torch.

A command's arguments are declared in its own file, `class Command` in `commands/NAME.py`, by mpt and by part
packages alike. A field is an option named after it, with the text below it as help; one whose type is annotated with
`typer.Argument` is positional, and `typer.Option` adds facts that name and type cannot show.
`mpt.commands.cli.command_line` makes the command of it, and the command gets an instance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mpt.commands.cli.completion import (
    complete_config,
    complete_override,
    complete_planned,
    complete_run,
)


def config_argument(complete: Callable[..., list[str]]) -> Any:
    """Return the declaration of a configuration, which the shell completes by a function."""
    said = "A YAML file, @NAME of mpt list configs, or - for the standard input."
    return typer.Argument(metavar="CONFIG", help=said, show_default=False, autocompletion=complete)


ConfigFile = Annotated[Path, config_argument(complete_config)]
PlannedFile = Annotated[Path, config_argument(complete_planned)]
NewestRun = Annotated[
    str | None,
    typer.Argument(metavar="RUN", show_default="the newest run", autocompletion=complete_run),
]
Overrides = Annotated[
    tuple[str, ...],
    typer.Argument(
        metavar="KEY=VALUE",
        help="Changes, such as optimizer.lr=3e-4.",
        show_default=False,
        autocompletion=complete_override,
    ),
]
Patches = Annotated[
    tuple[Path, ...],
    typer.Option(
        "--with",
        metavar="FILE",
        help="A YAML file whose settings replace CONFIG's, such as plan.yaml.",
    ),
]
Allow = Annotated[
    tuple[str, ...],
    typer.Option(
        "--allow", metavar="PACKAGE", help="A Python package that CONFIG may take a model from."
    ),
]
Runs = Annotated[str, typer.Option("--runs", metavar="DIR", help="The folder of the runs.")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1 or mps.")]
Best = Annotated[
    bool,
    typer.Option(
        "--best", help="The run's best checkpoint by its metric; the default if it was evaluated."
    ),
]
Newest = Annotated[bool, typer.Option("--newest", help="The run's newest checkpoint.")]
StepOfCheckpoint = Annotated[
    int | None, typer.Option("--step", min=0, help="The run's checkpoint of this step.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print warnings and errors only.")]
Output = Annotated[str | None, typer.Option("--output", "-o", metavar="PATH")]
Card = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help="A card to plan for, such as rtx2060, or auto."),
]
Desktop = Annotated[
    str | None,
    typer.Option(
        "--desktop",
        metavar="SIZE",
        help="What the desktop takes of the card, such as 600MiB; wddm: what Windows keeps, about a fifth.",
    ),
]
AllowLossy = Annotated[
    bool,
    typer.Option(
        "--allow-lossy",
        help="Propose what changes the learnt result too: bfloat16 weights without masters, 8-bit optimizer states.",
    ),
]
Strategy = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        metavar="NAME",
        help="How cards share the work: ddp or fsdp; else as in CONFIG.",
    ),
]
Network = Annotated[
    str | None,
    typer.Option(
        "--network",
        metavar="NAME",
        help="Between machines: ethernet-10, -25, -100, infiniband-hdr or -ndr; else what is usual for the card.",
    ),
]
PerMachine = Annotated[
    int | None,
    typer.Option("--per-machine", min=1, metavar="N", help="Cards in a machine; else 8."),
]


@dataclass(frozen=True)
class PlannedConfig:
    """Arguments of every plan of a configuration."""

    config: ConfigFile
    overrides: Overrides = ()
    patches: Patches = ()
    allow: Allow = ()
    json: Json = False
