"""The same samples for each update in smaller batches, by a script's own options for its batch and its accumulation.

`--batch-size 64 --accumulation 1` becomes `--batch-size 16 --accumulation 4`. Some scripts divide the batch among the
accumulated parts by themselves: with these words they would train with fewer samples, which their time tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from mpt.planner.own.proposals.options import Words, plain_name
from mpt.planner.own.text.batch_size import OPTION
from mpt.planner.own.text.command_lines import Parsed

STEPS = re.compile(
    r"(num_)?(grad(ient)?s?_)?accum(ulat(e|ion))?(_grad(ient)?s?)?(_(steps?|iters?|batches|freq|every|num))?"
    r"|grad_acc(_steps?)?|update_freq(uency)?|(iters|steps)_to_accumulate"
)
"""Names of how many batches are accumulated, without their hyphens."""
FACTORS = (2, 4, 8, 16)
"""By which batches are divided."""


@dataclass(frozen=True)
class Option:
    """An option that is a number."""

    parsed: Parsed
    name: str
    value: int

    def words(self, value: int) -> Words:
        """Return it with another value."""
        return self.parsed.spelled((self.name, str(value)))


@dataclass(frozen=True)
class Accumulation:
    """A script's options for its batch size and for how many batches it accumulates."""

    batch: Option
    steps: Option

    def words(self, factor: int) -> Words | None:
        """Return the words for batches divided by a factor; None if there is no such batch."""
        if self.batch.value % factor:
            return None
        smaller = self.batch.words(self.batch.value // factor)
        return (*smaller, *self.steps.words(self.steps.value * factor))


def find_accumulation(parsed: Iterable[Parsed], given: Iterable[str]) -> Accumulation | None:
    """Return the options of a command line, those that are `given` before others; None if it lacks one."""
    said = {one.partition("=")[0] for one in given}
    batches: list[tuple[bool, Option]] = []
    steps: list[tuple[bool, Option]] = []
    for one in parsed:
        for action in one.parser._actions:
            names = sorted(action.option_strings, key=len)
            spoken = [name for name in names if name.removeprefix("--" * one.is_joined) in said]
            value = getattr(one.values, action.dest, action.default)
            if not names or (value is not None and type(value) is not int):
                continue
            name, is_default = [*names, *spoken][-1], not spoken
            if any(map(OPTION.fullmatch, names)) and value and value > 1:
                batches.append((is_default, Option(one, name, value)))
            elif any(STEPS.fullmatch(plain_name(spelled)) for spelled in names):
                steps.append((is_default, Option(one, name, max(1, value or 1))))
    if not (batches and steps):
        return None
    (_, batch), (_, step) = (min(found, key=lambda one: one[0]) for found in (batches, steps))
    return Accumulation(batch, step)
