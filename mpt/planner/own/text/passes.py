"""The lines of a script between which its forward passes and losses are, and those of its backward passes and updates.

A forward pass begins where a network is called with gradients for the first time since the last backward pass. Both are
statements of one function, however deep in its calls; those before the backward pass are what autocast goes around.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim import Optimizer

from mpt.planner.answers.edits import INDENT, Edit
from mpt.planner.own.text.places import (
    Standing,
    imported,
    is_alone,
    is_own,
    names_in,
    path_to,
    source_of,
    stack,
    text_of,
    tree_of,
    unused,
)

Pair = tuple[str, int, int]
"""A file, the line of a forward pass and that of its backward pass."""
HUGGING_FACE, LIGHTNING = frozenset({"transformers"}), frozenset({"lightning", "pytorch_lightning"})
MIXED = {"float16": 'precision="16-mixed"', "bfloat16": 'precision="bf16-mixed"'}
ARGUMENTS = {
    "TrainingArguments": (HUGGING_FACE, {"float16": "fp16=True", "bfloat16": "bf16=True"}),
    "Trainer": (LIGHTNING, MIXED),
    "Accelerator": (
        None,
        {"float16": 'mixed_precision="fp16"', "bfloat16": 'mixed_precision="bf16"'},
    ),
    "Fabric": (None, MIXED),
}
"""Endings of classes whose objects say in what precision a library trains, and the libraries that have the loop in that
case; None if it is the script's own."""


AUTOCAST = ("torch.amp", "torch.cuda.amp")
"""Modules of torch's autocast, earlier names of which call the present one."""


class Passes:
    """Notes where forward and backward passes and updates are called from."""

    def __init__(self) -> None:
        self.pairs: dict[tuple[Pair, ...], None] = {}
        """What each backward pass has in common with each of the calls of networks before it."""
        self.steps: dict[tuple[str, int], None] = {}
        """File and line at which an optimizer steps."""
        self.libraries: set[str] = set()
        """Those that call both."""
        self.has_autocast = False
        """An autocast was on."""
        self.switched_off: dict[str, None] = {}
        """Lines of the script at which an autocast was off."""
        self._forwards: dict[tuple[Standing, ...], None] = {}
        self._is_inside = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note calls of networks inside the block; `backward` and `step` are told of the others."""
        call = nn.Module.__call__

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            is_outer = not self._is_inside and torch.is_grad_enabled()
            if not is_outer or torch._C._current_autograd_node() is not None:
                return call(module, *args, **kwargs)
            self._forwards[stack()] = None
            self._is_inside = True
            try:
                return call(module, *args, **kwargs)
            finally:
                self._is_inside = False

        enter: Any = torch.autocast.__enter__

        def begin(autocast: Any) -> Any:
            self.has_autocast |= autocast._enabled
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_globals.get("__name__", "").startswith(AUTOCAST):
                frame = frame.f_back
            # not one of torch's own, which recomputes a block with what was on in its forward
            if not autocast._enabled and frame is not None and is_own(frame.f_code.co_filename):
                self.switched_off[f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"] = None
            return enter(autocast)

        with (
            mock.patch.object(nn.Module, "__call__", forward),
            mock.patch.object(torch.autocast, "__enter__", begin),
        ):
            yield

    @property
    def note(self) -> str:
        """What is to be known of its autocasts; empty if one is on, or there is none."""
        if self.has_autocast or not self.switched_off:
            return ""
        return f"its autocast is off at {', '.join(self.switched_off)}; with it on the plan may need less"

    def backward(self) -> None:
        """Note a backward pass, which is about to begin."""
        here = stack()[::-1]
        shared = [_shared(one[::-1], here) for one in self._forwards]
        self._forwards.clear()
        self.libraries |= {
            one[0].module.partition(".")[0]
            for one in shared
            if one is not None and not one[0].is_own
        }
        own = (one for one in shared if one is not None and one[0].is_own)
        pairs = tuple(dict.fromkeys((a.file, a.line, b.line) for a, b in own))
        if pairs or not self.libraries:
            self.pairs[pairs] = None

    def step(self, optimizer: Optimizer) -> None:
        """Note an update, which is about to begin."""
        own = [one for one in stack() if one.is_own]
        if own:
            self.steps[own[0].file, own[0].line] = None


def _shared(
    forward: Sequence[Standing], backward: Sequence[Standing]
) -> tuple[Standing, Standing] | None:
    """Return where the innermost function stood that two calls have in common, both given from the outermost on."""
    shared = None
    for one, other in zip(forward, backward, strict=False):
        if one.frame != other.frame or one.code is not other.code:
            break
        shared = one, other
        if one.line != other.line:
            break
    return shared


def autocast_edits(passes: Passes, dtype: str, files: Iterable[str]) -> tuple[Edit, ...]:
    """Return what puts autocast around forward passes and losses; nothing if there are no lines that do.

    `files`: those of the script.
    """
    is_inside = bool(passes.libraries) and not passes.pairs
    words = {
        end: each[dtype]
        for end, (libraries, each) in ARGUMENTS.items()
        if libraries is None or (is_inside and libraries & passes.libraries)
    }
    told = tuple(as_argument("autocast", words, files))
    if told or passes.libraries or () in passes.pairs:
        return told
    found: dict[Edit, None] = {}
    files = dict.fromkeys(file for pairs in passes.pairs for file, _, _ in pairs)
    scaler = ""
    if dtype == "float16":
        taken = set().union(*(names_in(tree_of(file)) for file in files))
        scaler = unused(("scaler", "grad_scaler", "loss_scaler"), taken)
        updates = list(_updates(passes, scaler))
        if not updates:
            return ()
        found |= dict.fromkeys(updates)
    for pairs in passes.pairs:
        edits = _around(pairs, dtype, scaler)
        if not edits:
            return ()
        found |= dict.fromkeys(edits)
    spans = sorted((one.file, one.first, one.last) for one in found if one.how != "before")
    if any(a[0] == b[0] and b[1] <= a[2] for a, b in pairwise(spans)):
        return ()
    made = [f'{scaler} = torch.amp.GradScaler("cuda")'] if scaler else []
    for file in files:
        is_wanted = made or "torch" not in imported(file)
        lines = ["import torch", *made] if is_wanted else made
        if lines:
            found[Edit("autocast", file, "top", 1, 1, tuple(lines))] = None
    return tuple(found)


def _around(pairs: Iterable[Pair], dtype: str, scaler: str) -> list[Edit]:
    """Return the edits of one backward pass and of what leads to it.

    It begins at the first call of a network that is before the backward pass in a block of theirs: others are of an
    evaluation after the last.
    """
    regions = [(one[0], region) for one in pairs if (region := _region(*one)) is not None]
    if not regions:
        return []
    file, (block, start, end) = min(regions, key=lambda one: one[1][0][one[1][1]].lineno)
    last = block[end]
    called = _called(last, "backward")
    if not (is_alone(file, block[start]) and is_alone(file, last)):
        return []
    head = f'with torch.autocast("cuda", torch.{dtype}):'
    if start == end:  # `criterion(model(x), y).backward()`
        if called is None:
            return []
        name = unused(("loss", "total_loss", "summed_loss"), names_in(tree_of(file)))
        value = f"{name} = {source_of(file, _owner(called))}".split("\n")
        lines = [head, *(INDENT + line for line in value)]
        return [_instead(file, last, (*lines, _scaled(file, called, scaler, name)))]
    first, before = block[start], block[end - 1]
    ends = before.end_lineno or before.lineno
    found = [Edit("autocast", file, "around", first.lineno, ends, (head,))]
    if scaler and called is None:
        return []
    if scaler and called is not None:
        found.append(_instead(file, last, (_scaled(file, called, scaler),)))
    return found


def _region(file: str, forward: int, backward: int) -> tuple[list[ast.stmt], int, int] | None:
    """Return the innermost block that two lines are in, and their statements' places, if they are in this order."""
    tree = tree_of(file)
    ends = {id(block): place for block, place in path_to(tree, backward)}
    begins = [step for step in path_to(tree, forward) if id(step[0]) in ends]
    if not begins:
        return None
    block, start = begins[-1]
    end = ends[id(block)]
    return (block, start, end) if start <= end else None


def _scaled(file: str, call: ast.Call, scaler: str, loss: str = "") -> str:
    """Return the line of a backward pass of a scaled loss."""
    loss = loss or source_of(file, _owner(call))
    given = ", ".join(source_of(file, one) for one in (*call.args, *call.keywords))
    return f"{scaler}.scale({loss}).backward({given})" if scaler else f"{loss}.backward({given})"


def _updates(passes: Passes, scaler: str) -> Iterator[Edit]:
    """Yield the updates of a scaled step; nothing if they are not statements of one block."""
    steps = [(file, path_to(tree_of(file), line)[-1]) for file, line in passes.steps]
    if len({(file, id(block)) for file, (block, _) in steps}) != 1:
        return
    file, (block, _) = steps[0]
    places = [place for _, (_, place) in steps]
    for place in places:
        called = _called(block[place], "step")
        if called is None or not is_alone(file, block[place]):
            return
    for before, place in pairwise([-1, *sorted(places)]):
        called = _called(block[place], "step")
        assert called is not None
        name = source_of(file, _owner(called))
        update = [f"{scaler}.update()"] * (place == max(places))
        yield _instead(file, block[place], (f"{scaler}.step({name})", *update))
        for statement in block[before + 1 : place]:
            if "clip_grad" in ast.unparse(statement):
                line = statement.lineno
                yield Edit("autocast", file, "before", line, line, (f"{scaler}.unscale_({name})",))


def as_argument(change: str, words: Mapping[str, str], files: Iterable[str]) -> Iterator[Edit]:
    """Yield the edit that gives a library one more setting, at the first object of its settings.

    `words`: the end of a class's name -> the argument.
    """
    for file in files:
        for call in ast.walk(tree_of(file)):
            if not isinstance(call, ast.Call):
                continue
            name = ast.unparse(call.func)
            said = next((each for end, each in words.items() if name.endswith(end)), None)
            given = {one.arg for one in call.keywords}
            if said is None or said.partition("=")[0] in given:
                continue
            line, column = call.func.end_lineno or call.lineno, call.func.end_col_offset or 0
            text = text_of(file).splitlines()[line - 1].encode()
            place = len(text[: text.index(b"(", column) + 1].decode())
            more = ", " if call.args or call.keywords else ""
            yield Edit(change, file, "argument", line, line, (said + more,), place)
            return


def _called(statement: ast.stmt, name: str) -> ast.Call | None:
    """Return the call of a method that a statement is."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    is_method = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
    return call if is_method and call.func.attr == name else None  # type: ignore[union-attr, return-value]


def _owner(call: ast.Call) -> ast.expr:
    """Return the expression whose method is called."""
    assert isinstance(call.func, ast.Attribute)
    return call.func.value


def _instead(file: str, statement: ast.stmt, lines: tuple[str, ...]) -> Edit:
    last = statement.end_lineno or statement.lineno
    return Edit("autocast", file, "instead", statement.lineno, last, lines)
