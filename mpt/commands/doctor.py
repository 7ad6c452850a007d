"""`mpt doctor`: the machine, the data, the numerics of a model and its speed, each with the remedy.

A configuration is examined as it begins; a run at several points, with the weights of its checkpoints. The cure of a
numerical fault is written as a patch for `mpt train CONFIG --with FILE` after it was tried.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpt.commands.cli.arguments import Allow, Device, Json, Output, Overrides, Patches, Runs
from mpt.commands.cli.completion import complete_run
from mpt.config.checking.layers import write_overrides
from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.config.text.yaml_text import write_text
from mpt.errors import ConfigError, NonFiniteError
from mpt.planner.recipes.own_step import arguments_of, find_source, is_own
from mpt.report.units import counted
from mpt.run.process.files import write_atomically
from mpt.run.records.layout import RunDirectory, find_run
from mpt.workflows.comparing.sides import is_config
from mpt.workflows.examining.examination import (
    BEGINNING,
    PARTS,
    Point,
    Wish,
    check_parts,
    choose_points,
    examine_parts,
)
from mpt.workflows.examining.own_examination import OwnWish, examine_own

if TYPE_CHECKING:
    from mpt.doctor.findings import Section


@dataclass(frozen=True)
class Command:
    """Examine the machine, the data, the numerics and the speed.

    Examples:
      mpt doctor
      mpt doctor mine.yaml --page doctor.html
      mpt doctor RUN --only numerics
      mpt doctor train.py -- --batch-size 8
    """

    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="[CONFIG|RUN|SCRIPT.py|FILE.py:FUNCTION]",
            show_default="this machine",
            autocompletion=complete_run,
        ),
    ] = None
    """A YAML file, a run, a checkpoint, or a training of your own as `mpt plan` takes it: a script, its own options
    after --, or a function that builds a step, its arguments as NAME=VALUE."""
    overrides: Overrides = ()
    only: Annotated[tuple[str, ...], typer.Option("--only", metavar="PART")] = ()
    """environment, data, numerics or speed; may be given several times. device checks a GPU for some minutes and writes
    device.json, or the file of -o, which helps others when it is sent (docs/how-to/help.md)."""
    dtype: str | None = None
    """float16 or bfloat16: the dtype in which a mode that may choose is examined; on a CPU float16, as on most GPUs."""
    batch_size: Annotated[int | None, typer.Option(min=1)] = None
    """Samples of the step whose numerics are examined."""
    points: Annotated[int, typer.Option(min=1)] = 4
    """Of a run's training, the beginning and the newest checkpoint among them, whose numerics are examined."""
    output: Output = None
    """The file of the cure, by default doctor.yaml; with --only device of its findings, by default device.json."""
    page: Annotated[str | None, typer.Option(metavar="FILE")] = None
    """Write an HTML page too."""
    device: Device = None
    json: Json = False
    patches: Patches = ()
    allow: Allow = ()
    runs: Runs = "runs"


CURE_FILE = "doctor.yaml"
MARKS = {"ok": "ok", "note": "note", "warning": "WARN", "fault": "FAULT"}


def run(arguments: Command) -> None:
    """Examine what is asked for. Raises NonFiniteError (exit 6) when a fault was found."""
    if arguments.subject is not None and is_own(arguments.subject):
        conclude(arguments, arguments.subject, examine_own(read_own(arguments), arguments.only), [])
        return
    has_subject = arguments.subject is not None
    wanted = check_parts(
        arguments.only or (PARTS if has_subject else ("environment",)), has_subject=has_subject
    )
    config, directory, points, subject = read_subject(arguments)
    device = arguments.device or (config.train.device if config is not None else "auto")
    file = Path(arguments.output or "device.json")
    wish = Wish(
        str(arguments.subject),
        arguments.dtype,
        arguments.batch_size,
        Path(arguments.runs),
        device,
        file,
    )
    sections = examine_parts(wanted, wish, config, points)
    written = write_cure(arguments, sections)
    if directory is not None and "numerics" in wanted:
        record = {"sections": [one.to_record() for one in sections]}
        write_atomically(directory.doctor_path, json.dumps(record) + "\n")
    conclude(arguments, subject, sections, written)


def read_own(arguments: Command) -> OwnWish:
    """Read the options for a training step of the user's own. Raises ConfigError."""
    assert arguments.subject is not None
    for option, value in (("--with", arguments.patches), ("--batch-size", arguments.batch_size)):
        if value:
            raise ConfigError(
                f"{option} is of a configuration; {arguments.subject} takes its arguments as NAME=VALUE, and a script "
                "its own options after --"
            )
    given = arguments_of(arguments.subject, arguments.overrides)
    return OwnWish(
        arguments.subject,
        find_source(arguments.subject, arguments.allow, given.get("words", ())),
        given["arguments"],
        arguments.dtype,
        arguments.device or "auto",
        Path(arguments.runs),
        say_on_terminal(arguments),
    )


def say_on_terminal(arguments: Command) -> Callable[[str], None]:
    """Return a function that prints on standard error, if somebody watches it, what takes a while, and since when."""
    begun = time.monotonic()

    def say(doing: str) -> None:
        print(f"{time.monotonic() - begun:5.0f} s  {doing}", file=sys.stderr, flush=True)

    return say if sys.stderr.isatty() and not arguments.json else lambda doing: None


def conclude(
    arguments: Command, subject: str, sections: Sequence[Section], written: Sequence[str]
) -> None:
    """Print the findings and write the page. Raises NonFiniteError (exit 6) when a fault was found."""
    from mpt.doctor.findings import worst_of
    from mpt.doctor.page import write_page

    if arguments.json:
        print(
            json.dumps(
                {
                    "subject": subject,
                    "sections": [one.to_record() for one in sections],
                    "written": written,
                }
            )
        )
    else:
        for section in sections:
            print_section(section)
        for path in written:
            print(f"wrote {path}: the cure, tried; train with --with {path}")
        looked = any(one.name == "numerics" for one in sections) and not arguments.patches
        if looked and not written and arguments.output is None and Path(CURE_FILE).is_file():
            print(f"{CURE_FILE} here is from before; this time nothing was found to cure")
    if arguments.page:
        write_page(Path(arguments.page), subject, sections)
        print(f"wrote {arguments.page}", file=sys.stderr if arguments.json else sys.stdout)
    if worst_of(sections) == "fault":
        faults = [one for section in sections for one in section.findings if one.level == "fault"]
        count = counted(len(faults), "fault")
        raise NonFiniteError(f"doctor: {count}, first {faults[0].about}: {faults[0].text}")


def read_subject(
    arguments: Command,
) -> tuple[Config | None, RunDirectory | None, Sequence[Point], str]:
    """Return the configuration, the run, the points of its training to examine, and the subject in words."""
    if arguments.subject is None:
        return None, None, [], "this machine"
    path = Path(arguments.subject)
    overrides = [*arguments.overrides, *write_overrides({"train.device": arguments.device})]
    if is_config(arguments.subject):
        config = load_config(path, overrides, allow=arguments.allow, patches=arguments.patches)
        return config, None, [BEGINNING], str(path)
    directory, chosen = find_run(arguments.subject, Path(arguments.runs))
    config = load_config(
        directory.config_path, overrides, allow=arguments.allow, patches=arguments.patches
    )
    points = choose_points(directory, chosen, arguments.points)
    return (
        config,
        directory,
        points,
        f"{directory.path} at step {', '.join(str(point.step) for point in points)}",
    )


def write_cure(arguments: Command, sections: Sequence[Section]) -> list[str]:
    """Write the patch that a section offers."""
    for section in sections:
        for row in section.tables.get("cure", ()):
            path = Path(arguments.output or CURE_FILE)
            text = f"# {row['cure']}\n# found by mpt doctor {arguments.subject}\n{write_text(row['patch'])}"
            write_atomically(path, text)
            return [str(path)]
    return []


def print_section(section: Section) -> None:
    """Print a section's findings, those that matter with the remedy."""
    print(f"{section.name} ({section.seconds:.1f} s)")
    for one in section.findings:
        print(f"  {MARKS[one.level]:5s} {one.about}: {one.text}")
        if one.advice:
            print(f"        {one.advice}")
