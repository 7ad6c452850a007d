"""`mpt train`: the command line, the number of processes, and the command to type if memory runs out.

The training itself is `mpt.workflows.training.train`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpt.commands.cli.arguments import Allow, Device, Json, Overrides, Patches, Quiet, Runs
from mpt.commands.cli.command_line import WAYS, spell
from mpt.commands.cli.completion import complete_config, complete_run
from mpt.config.checking.layers import write_overrides
from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.config.text.yaml_text import printable
from mpt.engine.building.torch_settings import prepare_rank, prepare_torch
from mpt.errors import ConfigError, Interrupted
from mpt.parallel.place import check_batch, read_place
from mpt.planner.recipes.patch_origin import find_strange_patches
from mpt.run.records.layout import THROWN_AWAY, find_run, list_runs
from mpt.run.records.temporary import temporary_folder
from mpt.run.records.used_parts import missing_parts_explained
from mpt.workflows.training import train as workflow
from mpt.workflows.training.retry import Retry

if TYPE_CHECKING:
    from mpt.parallel.world import World

SMOKE: dict[str, Any] = {
    "epochs": None,
    "log_every": 1,
    "evaluate_every": 0,
    "early_stopping": None,
    "sample_every": 0,
    "checkpoint_every": 0,
    "plan_memory": False,
    "on_end": None,
    "tensorboard": False,
    "boards": [],
}
"""Changes of a smoke run to the settings of `train`, in addition to the number of steps."""


@dataclass(frozen=True)
class Command:
    """Train the model of CONFIG.

    Examples:
      mpt train @classify_digits
      mpt train mine.yaml precision=bf16 optimizer.lr=3e-4 name=second
      mpt train mine.yaml --with plan.yaml
      mpt train mine.yaml name=second --resume
    """

    config: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", show_default=False, autocompletion=complete_config),
    ] = None
    """A YAML file, @NAME of mpt list configs, or - for the standard input; with --resume PATH the run's own if left
    out."""
    overrides: Overrides = ()
    resume: Annotated[
        str | None, typer.Option(metavar="[auto|PATH]", autocompletion=complete_run)
    ] = None
    """Continue the newest run of this name, or the run or checkpoint PATH."""
    name: str | None = None
    """The run's folder below --runs."""
    device: Device = None
    seed: int | None = None
    """The seed of every random number."""
    smoke: Annotated[int | None, typer.Option(min=1, metavar="N")] = None
    """Train N steps, save, resume, evaluate and infer, and keep nothing."""
    dry_run: bool = False
    """Build the run, check it and stop; nothing is written."""
    print_config: bool = False
    """Print the resolved config and stop."""
    json: Json = False
    quiet: Quiet = False
    exact: bool = False
    """Refuse a resume that would not be bit-exact."""
    nproc: Annotated[int | None, typer.Option(min=1, metavar="N")] = None
    """Train in N processes on this machine, a card for each (torchrun for more)."""
    max_restarts: Annotated[int, typer.Option(min=0, metavar="N")] = 0
    """With --nproc: restart at most N times from the last checkpoint if a process is lost."""
    no_report: bool = False
    """Write no report at the end; `mpt report` writes it later."""
    patches: Patches = ()
    allow: Allow = ()
    runs: Runs = "runs"


def run(arguments: Command) -> None:
    """Train as the arguments say. Raises MptError for everything that is the user's to mend."""
    place = read_place()
    arguments = with_config(arguments)
    if arguments.nproc is not None and place is None and not arguments.print_config:
        if code := start_processes(arguments):
            raise SystemExit(code)  # which was explained already
        return
    if place is not None:
        prepare_rank()
    config = read_config(arguments)
    for warning in (
        find_strange_patches(arguments.patches, config) if place is None or place.rank == 0 else ()
    ):
        print(f"warning: {warning}", file=sys.stderr)
    if arguments.print_config:
        sys.stdout.write(config.to_yaml())
        return
    if place is None:
        train_or_try(config, arguments, None)
        return
    if place.restarts and arguments.resume is None:
        arguments = dataclasses.replace(arguments, resume="auto")
    prepare_torch(config)
    from mpt.parallel.start import joined

    with joined(config) as world:
        train_or_try(config, arguments, world)


def with_config(arguments: Command) -> Command:
    """Return the arguments with the configuration of the run that --resume names, if they have none."""
    first = None if arguments.config is None else str(arguments.config)
    if first is not None and ("=" not in first or Path(first).exists()):
        return arguments
    if arguments.resume == "auto":
        runs = list_runs(Path(arguments.runs))
        newest = runs[-1].path if runs else "RUN"
        typed = "".join(f" {word}" for word in (first, *arguments.overrides) if word)
        raise ConfigError(
            "mpt train: --resume auto continues the newest run of a configuration, and none is named: mpt train CONFIG "
            f"--resume{typed}, or mpt train --resume {newest}{typed}"
        )
    if arguments.resume is None:
        if first is None:
            raise ConfigError(f"mpt train: CONFIG is missing: {WAYS['CONFIG']}")
        return arguments
    own, _ = find_run(arguments.resume, Path(arguments.runs))
    settings = (*(() if first is None else (first,)), *arguments.overrides)
    return dataclasses.replace(arguments, config=str(own.config_path), overrides=settings)


def train_or_try(config: Config, arguments: Command, world: World | None) -> None:
    """Train, or run a few steps of everything."""
    prepare_torch(config)
    from mpt.optim.shared.without_compiler import leave_out_compiler

    leave_out_compiler()
    if arguments.smoke and not arguments.dry_run:
        try_everything(config, arguments, arguments.smoke, world)
    else:
        train(config, arguments, world=world)


def try_everything(config: Config, arguments: Command, steps: int, world: World | None) -> None:
    """Run N steps of everything a run does, in a folder that is thrown away, and say so on the first rank.

    Trains in two halves with a resume between them, then infers. Raises the errors of a real run.
    """
    from mpt.commands import infer

    short = dataclasses.replace(
        config, train=config.train.model_copy(update={"steps": steps, **SMOKE})
    )
    is_first = world is None or world.is_first
    with temporary_folder(THROWN_AWAY) as own:
        folder = str(own) if world is None else world.tell(str(own))
        begin, go_on = (
            dataclasses.replace(arguments, runs=folder, resume=resume) for resume in (None, "auto")
        )
        try:
            if steps > 1:
                train(short, begin, steps // 2, world)
            path = train(short, go_on if steps > 1 else begin, None, world)
        except Interrupted as stop:  # the run was saved in the folder that goes now
            raise Interrupted(
                "smoke: interrupted; nothing of it is kept", stop.exit_code - 128
            ) from stop
        if is_first:
            output = str(Path(folder) / "out")
            with contextlib.redirect_stdout(io.StringIO()):
                infer.run(
                    infer.Command(
                        run=str(path), output=output, runs=folder, device=arguments.device
                    )
                )
    if is_first and not (arguments.quiet or arguments.json):
        done = (
            f"{steps} steps trained, saved, resumed, evaluated"
            if steps > 1
            else "1 step trained, saved, evaluated"
        )
        print(f"smoke: {done} and inferred; nothing of it is kept")


def start_processes(arguments: Command) -> int:
    """Train in several processes of this machine and return the exit code. Mistakes are reported once, before."""
    from mpt.parallel.launch import launch

    assert arguments.nproc is not None
    check_batch(read_config(arguments).train.batch_size, arguments.nproc)
    return launch(write_words(arguments), arguments.nproc, arguments.max_restarts)


def write_words(arguments: Command) -> list[str]:
    """Return the command line of one of several processes."""
    return spell(dataclasses.replace(arguments, nproc=None, max_restarts=0, print_config=False))


def read_config(arguments: Command) -> Config:
    """Read the file, its overrides and the options that represent overrides."""
    given = {"name": arguments.name, "seed": arguments.seed, "train.device": arguments.device}
    overrides = [*arguments.overrides, *write_overrides(given)]
    file = Path(str(arguments.config))
    with missing_parts_explained(file.parent):
        config = load_config(file, overrides, allow=arguments.allow, patches=arguments.patches)
    refuse_foreign_command(config, arguments)
    return config


def refuse_foreign_command(config: Config, arguments: Command) -> None:
    """Raise ConfigError for a command or an address that is in a file: the file may be another's."""
    typed = any(override.startswith("train.on_end=") for override in arguments.overrides)
    if config.train.on_end is not None and not typed and "on_end" not in arguments.allow:
        raise ConfigError(
            f"train.on_end: the file asks for {printable(config.train.on_end)!r} at the end; if you trust it, add "
            "--allow on_end"
        )


def train(
    config: Config, arguments: Command, stop_after: int | None = None, world: World | None = None
) -> Path | None:
    """Train as the arguments say. Return the run's folder, or None after a dry run."""
    return workflow.train(
        config,
        runs=Path(arguments.runs),
        resume_from=arguments.resume,
        exact=arguments.exact,
        style="json" if arguments.json else "quiet" if arguments.quiet else "auto",
        reports=not arguments.no_report,
        dry_run=arguments.dry_run,
        stop_after=stop_after,
        retry=Retry(
            lambda run, config, patch, resumes: repeat(arguments, patch, resumes), arguments.patches
        ),
        world=world,
    )


def repeat(arguments: Command, patch: Path, resumes: bool) -> str:
    """Return the command that was given, with a patch; it may be the file of one that was given, rewritten."""
    words = [
        "mpt",
        "train",
        *spell(arguments, ("config", "overrides", "name", "device", "seed", "allow", "runs")),
    ]
    others = [given for given in arguments.patches if given.resolve() != patch.resolve()]
    words += [word for given in [*others, patch] for word in ("--with", str(given))]
    return shlex.join([*words, *(["--resume"] if resumes else [])])
