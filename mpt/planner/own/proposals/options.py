"""The options of a script's own command line that save memory: its author has provided for them.

They are found where the script reads its words (`mpt.planner.own.text.command_lines`), by their names, and are tried
like other changes. One that is switched on already, or that saves nothing, is not proposed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from typing import Any

from mpt.planner.own.text.command_lines import Parsed

Words = tuple[str, ...]
NAMES = {
    "recompute": re.compile(
        r"(use_|enable_|with_)?((grad|gradient|activation)_checkpoint(s|ing)?|checkpoint(ing)?_activations?)"
        r"|use_checkpoint(ing)?"
    ),
    "autocast": re.compile(
        r"(use_|enable_)?(native_)?(amp|autocast|mixed_precision|half|half_precision|b?fp?16|bfloat16|float16)"
        r"|precision"
    ),
    "optimizer": re.compile(
        r"(use_)?(8_?bit_(adamw?|optim|optimizer)|adamw?_?8_?bit)|optim|opt|optimizer|optimizer_type"
    ),
}
"""A change -> the names of options for it, without their hyphens."""
OF_DTYPE = {
    "bfloat16": re.compile(r".*(bf16|bfloat16)"),
    "float16": re.compile(r".*((?<!b)fp16|(?<!b)float16|half)"),
}
HALVES = {
    "bfloat16": ("bf16-mixed", "bf16", "bfloat16", "amp_bf16", "amp"),
    "float16": ("16-mixed", "fp16", "float16", "amp_fp16", "amp"),
}
"""Values of an option that names a precision, the first of which is taken that there is."""
LOW_BITS = {
    "adamw": ("adamw_bnb_8bit", "adamw_8bit", "adamw8bit"),
    "adam": ("adam_8bit", "adam8bit"),
}
"""The same of one that names an optimizer, by what it is."""
OFF = {"", "0", "no", "none", "off", "false", "fp32", "float32", "32", "32-true"}
"""Values of an option that is not switched on."""


PRECISIONS = ("precision", "mixed_precision")
"""Options that name a precision; where its choices are not known, one is taken that is spelled like its value."""
AS_LIGHTNING = {"bfloat16": "bf16-mixed", "float16": "16-mixed"}
SHORT = {"bfloat16": "bf16", "float16": "fp16"}
SPELLINGS = {
    "32": AS_LIGHTNING,
    "32-true": AS_LIGHTNING,
    "fp32": SHORT,
    "no": SHORT,
    "float32": {"bfloat16": "bfloat16", "float16": "float16"},
}
"""What a precision is called now -> what others are called that way."""


def find_words(parsed: Iterable[Parsed], half: str) -> dict[str, Words]:
    """Return the words by which each change is made; `half`: the dtype of a proposed autocast."""
    found: dict[str, Words] = {}
    for one in parsed:
        for change in NAMES:
            words = _words(change, _named(one, change), half)
            if words:
                found[change] = one.spelled(words)
    return found


def _named(parsed: Parsed, change: str) -> Iterator[tuple[str, argparse.Action, Any]]:
    """Yield the options that are named for a change, with their values."""
    for action in parsed.parser._actions:
        for name in action.option_strings:
            if NAMES[change].fullmatch(plain_name(name)):
                yield name, action, getattr(parsed.values, action.dest, action.default)
                break


def plain_name(option: str) -> str:
    """Return an option's name without hyphens, and without the groups that it is in: `--trainer.precision`."""
    return option.removeprefix("--").rpartition(".")[2].replace("-", "_").lower()


def _words(
    change: str, options: Iterable[tuple[str, argparse.Action, Any]], half: str
) -> Words | None:
    """Return the words that switch one of the options on; None if there is none, or one is on."""
    found: dict[int, Words] = {}
    for name, action, value in options:
        is_choice = bool(action.choices)
        if change == "optimizer" and not _is_switch(action):
            words = _optimizer(name, action, value)
        elif str(getattr(value, "value", value)).lower() not in OFF:  # of an enumeration
            return None
        elif is_choice:
            words = _choice(name, action, HALVES[half]) if change == "autocast" else ()
        elif change == "autocast" and plain_name(name) in PRECISIONS and not _is_switch(action):
            is_choice = True
            spelling = SPELLINGS.get(str(value).lower(), {}).get(half)
            words = (name, spelling) if spelling and action.type is not int else ()
        else:
            words = _switch(name, action)
        rank = _suits(name, half) if change == "autocast" and not is_choice else 0
        if words and rank is not None:
            found.setdefault(rank, words)
    return found[min(found)] if found else None


def _suits(name: str, half: str) -> int | None:
    """Return how well a switch suits the dtype, 0 the best; None if it does not on this card."""
    if OF_DTYPE[half].fullmatch(name):
        return 0
    of_other = half == "float16" and OF_DTYPE["bfloat16"].fullmatch(name)
    return None if of_other else 2 if OF_DTYPE["float16"].fullmatch(name) else 1


def _is_switch(action: argparse.Action) -> bool:
    return action.nargs == 0 or action.const is True or action.default in (False, True)


def _switch(name: str, action: argparse.Action) -> Words:
    """Return the words that switch an option on; nothing for one that is no switch."""
    if action.nargs == 0:
        is_on = action.const is True or isinstance(action, argparse.BooleanOptionalAction)
        return (name,) if is_on else ()
    if action.nargs == "?" and action.const is True:
        return (name,)
    if action.default is False and action.type is not None:
        return (name, "True")
    return (name, "1") if action.type is int and action.default == 0 else ()


def _choice(name: str, action: argparse.Action, wanted: Iterable[str]) -> Words:
    spelled = {str(one).lower(): str(one) for one in action.choices or ()}
    return next(((name, spelled[one]) for one in wanted if one in spelled), ())


def _optimizer(name: str, action: argparse.Action, value: Any) -> Words:
    """Return the words for the 8-bit form of the optimizer that is chosen."""
    chosen = str(getattr(value, "value", value)).lower()
    family = next((one for one in LOW_BITS if re.fullmatch(rf"{one}(_torch.*)?", chosen)), "")
    return _choice(name, action, LOW_BITS[family]) if family else ()
