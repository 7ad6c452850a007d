"""`mpt plan` and its sub-commands: words that name no sub-command are a plan of a configuration.

Former options of `mpt plan` are answered with the present command.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from typer.core import TyperGroup

from mpt.commands.cli.command_line import OverridableCommand, check_script_options
from mpt.errors import ConfigError
from mpt.planner.recipes.own_step import is_own

STEP = "step"

COMMAND_OF = {
    "--infer": "infer",
    "--presets": "presets",
    "--tune": "tune",
    "--calibrate": "calibrate",
    "--lock": "lock",
    "--check": "check",
    "--scaling": "cluster",
    "--cards": "cluster",
    "--half": "infer",
    "--dtype": "infer",
    "--frame": "infer",
    "--tolerance": "check",
}
"""Earlier option -> the sub-command that has it now; if several are given the first of these counts."""
NAMES_COMMAND = ("--infer", "--presets", "--tune")
"""Those that had no value and are the sub-command's name now."""
FIRST = ("--calibrate", "--check")
"""Those whose value is the sub-command's first word now."""
RENAMED = {"--lock": "--output"}


class PlanGroup(TyperGroup):
    """A command with sub-commands: words that begin with none of these are the command's own."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Return the context of a sub-command, or of the command that is called like the group."""
        own = self.commands.get(str(self.name))
        names = set(self.commands) - {str(self.name)}
        if args[:1] and is_own(args[0]):
            check_script_options("mpt plan", self.commands[STEP], args)
            args = [STEP, *args]
        if own is None or (args[:1] and args[0] in names):
            return super().make_context(info_name, args, parent, **extra)
        near = get_close_matches("".join(args[:1]), names - {STEP}, n=1, cutoff=0.7)
        if near and not (args[0].startswith("-") or Path(args[0]).exists()):
            meant = shlex.join(["mpt", "plan", *near, *args[1:]])
            raise ConfigError(
                f"mpt plan: no sub-command {args[0]!r} and no such file; did you mean {meant}?"
            )
        return own.make_context(info_name, args, parent, **extra)


class PlanCommand(OverridableCommand):
    """The plan of a configuration, which answers former options with the sub-command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as any command does. Raises ConfigError for an option of before, with the command in its place."""
        for option in COMMAND_OF:
            if option in (word.partition("=")[0] for word in args):
                raise ConfigError(
                    f"mpt plan: {option} belongs to a sub-command now: {spell_anew(option, args)}"
                )
        return super().parse_args(ctx, args)


def spell_anew(option: str, words: Sequence[str]) -> str:
    """Return the command in place of `mpt plan WORDS` with an option of before."""
    first: list[str] = []
    rest: list[str] = []
    left = iter(separate_values(words))
    for word in left:
        if word in FIRST:
            first.append(next(left, ""))
        elif word not in NAMES_COMMAND:
            rest.append(RENAMED.get(word, word))
    return shlex.join(["mpt", "plan", COMMAND_OF[option], *filter(None, first), *rest])


def separate_values(words: Sequence[str]) -> list[str]:
    """Return words with `--option=value` of an earlier option as two."""
    found: list[str] = []
    for word in words:
        option, sign, value = word.partition("=")
        found += [option, value] if sign and option in COMMAND_OF else [word]
    return found
