"""`mpt validate`: refuse settings that `mpt train` would refuse. Torch is not imported in this process.

Mistakes in the text come first, all at once. Mistakes that only the built run shows (a size that a network cannot make,
a precision mode that a model does not have) are found by building it and stepping it on fake tensors, as `mpt plan`
does, in a process of its own: one set of rules, those of the parts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from mpt.commands.cli.arguments import Allow, ConfigFile, Overrides, Patches, Quiet
from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.errors import ConfigError
from mpt.planner.answers.plan import Plan
from mpt.planner.client.session import Answer, Session
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import find_gpu


@dataclass(frozen=True)
class Command:
    """Check CONFIG and say every mistake at once.

    The text is checked first; then the run is built and stepped on fake tensors, so that a valid one trains.

    Examples:
      mpt validate mine.yaml
      mpt validate mine.yaml train.batch_size=64 --quick
    """

    config: ConfigFile
    overrides: Overrides = ()
    patches: Patches = ()
    allow: Allow = ()
    quick: bool = False
    """Check only the text, in a fraction of a second; a size that the network refuses is not found."""
    quiet: Quiet = False


CARD = "h100"
"""The fake card to build for: one that computes in every dtype, since the card is not a setting."""
CANNOT_PLAN = "cannot plan: "
"""First words of the planner's refusals. Training may have one."""
NOT_HERE = "the data set is not here"
"""First words of its note on a run that was built with an assumed layout of its data."""


def run(arguments: Command) -> None:
    """Check a configuration. Raises ConfigError with one line per mistake."""
    config = arguments.config
    read = load_config(
        config, arguments.overrides, allow=arguments.allow, patches=arguments.patches
    )
    untried = None if arguments.quick else try_build(read)
    if arguments.quiet:
        return
    length = f"{read.train.steps} steps" if read.train.steps else f"{read.train.epochs:g} epochs"
    tricks = f", {', '.join(read.memory.tricks)}" if read.memory.tricks else ""
    print(
        f"{config}: valid: {read.model.name} on {read.dataset.name}, {read.precision.mode}{tricks}, {length}"
    )
    if untried:
        print(untried, file=sys.stderr)


def try_build(config: Config) -> str | None:
    """Build the run and step it on fake tensors; return what was not tried. Raises ConfigError as `refuse`."""
    with Session(find_gpu(CARD), Calibration(), config.granted) as session:
        return refuse(session.plan([config], whole_run=True, draws=True)[0])


def refuse(answer: Answer[Plan]) -> str | None:
    """Return what was not tried and why: the data if they are not here, or all if the planner has no answer.

    Raises ConfigError if a part refused a setting.
    """
    if not answer.error:
        return next((note for note in answer.get().notes if note.startswith(NOT_HERE)), None)
    if answer.lacks_data or answer.error.startswith(CANNOT_PLAN):
        return f"only its text was checked: {answer.error.removeprefix(CANNOT_PLAN)}"
    raise ConfigError(answer.error)
