"""Places in a script's text at which lines can be written, found from where it stands while it is planned."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType

from mpt.planner.own.text import notebooks
from mpt.planner.trace.cannot_plan import is_installed, is_outside

LOOPS = (ast.For, ast.AsyncFor, ast.While)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Position = tuple[int | None, int | None, int | None, int | None]


@dataclass(frozen=True)
class Standing:
    """Where a function stands: its call that is being executed."""

    file: str
    line: int
    position: Position
    """Lines and columns of the expression: first line, last line, first column, last column."""
    frame: int
    """Identity of the frame."""
    code: CodeType
    module: str
    """The function's module."""
    is_own: bool
    """It is the script's, and not a library's."""


def standing(frame: FrameType) -> Standing:
    """Return where a frame stands."""
    code, path = frame.f_code, frame.f_code.co_filename
    place = max(frame.f_lasti, 0) // 2
    position = next(islice(code.co_positions(), place, None), (None,) * 4)
    return Standing(
        path,
        frame.f_lineno,
        position,
        id(frame),
        code,
        frame.f_globals.get("__name__", ""),
        is_own(path),
    )


def is_own(path: str) -> bool:
    """Return whether a file is the script's own: not torch's, no installed library's, and one that can be read."""
    return is_outside(path) and not is_installed(path) and has_text(path)


@functools.cache
def has_text(file: str) -> bool:
    """Return whether a file's syntax can be read: code may be generated under the name of a file that is not there."""
    try:
        tree_of(file)
    except (OSError, SyntaxError, ValueError):
        return False
    return True


def stack(depth: int = 1) -> tuple[Standing, ...]:
    """Return the functions that are being executed, the innermost first, without torch's and the planner's."""
    frame: FrameType | None = sys._getframe(depth + 1)
    found = []
    while frame is not None:
        if is_outside(frame.f_code.co_filename):
            found.append(standing(frame))
        frame = frame.f_back
    return tuple(found)


@functools.lru_cache(32)
def tree_of(file: str) -> ast.Module:
    """Return a file's syntax. Raises OSError and SyntaxError."""
    return ast.parse(text_of(file))


@functools.lru_cache(32)
def text_of(file: str) -> str:
    """Return a file's text."""
    return notebooks.text_of(file)


Step = tuple[list[ast.stmt], int]
"""A block of statements, and the place of one of them."""


def path_to(tree: ast.Module, line: int) -> list[Step]:
    """Return the statements that a line is in, from the body of its innermost function on."""
    found: list[Step] = []
    block: list[ast.stmt] | None = tree.body
    while block is not None:
        place = next((n for n, one in enumerate(block) if _lines(one, line)), None)
        if place is None:
            break
        statement = block[place]
        found.append((block, place))
        block = next((inner for inner in _blocks(statement) if _holds(inner, line)), None)
        if block is not None and isinstance(statement, SCOPES):
            found.clear()
    return found


def _lines(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or statement.lineno)


def _holds(block: Sequence[ast.stmt], line: int) -> bool:
    return any(_lines(one, line) for one in block)


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if isinstance(block, list) and block:
            yield block
    for name in ("handlers", "cases"):
        for one in getattr(statement, name, ()):
            yield one.body


def before_loop(tree: ast.Module, line: int, name: str) -> int | None:
    """Return the line before which lines about a variable can be written, of a function that stands at `line`.

    It is that of the outermost loop which does not bind the variable, since the lines are to be executed once. None if
    a loop around it gives the variable the same values again and again.
    `name`: the variable, or an attribute of one (`self.model`).
    """
    steps = path_to(tree, line)
    for block, place in steps:
        loop = block[place]
        if not isinstance(loop, LOOPS):
            continue
        if not binds(loop, name):
            return loop.lineno
        goes_through = not isinstance(loop, ast.While) and binds(loop.target, name)
        if not goes_through and name.partition(".")[0] in renamed_in(loop):
            return None
    return steps[-1][0][steps[-1][1]].lineno if steps else None


def renamed(file: str, line: int) -> set[str]:
    """Return the variables that loops around a line let be one and another of values that there are already."""
    loops = [block[place] for block, place in path_to(tree_of(file), line)]
    return {name for loop in loops if isinstance(loop, LOOPS) for name in renamed_in(loop)}


def renamed_in(loop: ast.stmt) -> Iterator[str]:
    """Yield the variables of a loop that are given something else than what a call makes."""
    for one in ast.walk(loop):
        targets: list[ast.expr] = []
        if isinstance(one, ast.For | ast.AsyncFor):
            targets = [one.target]
        elif isinstance(one, ast.Assign) and not isinstance(one.value, ast.Call | ast.Await):
            targets = one.targets
        for target in targets:
            yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))


def binds(statement: ast.AST, name: str) -> bool:
    """Return whether a statement, or the target of a loop, binds a variable, or an attribute of one."""
    return any(
        isinstance(one, ast.Name | ast.Attribute)
        and isinstance(one.ctx, ast.Store)
        and (written := ast.unparse(one)) in (name, name.partition(".")[0])
        and written
        for one in ast.walk(statement)
    )


def scope_of(tree: ast.Module, line: int) -> ast.AST:
    """Return the innermost function or class that a line is in, or the module."""
    around = (one for one in ast.walk(tree) if isinstance(one, SCOPES) and _lines(one, line))
    return max(around, key=lambda one: one.lineno, default=tree)


def names_in(tree: ast.AST) -> set[str]:
    """Return the variables of a file, or of a function."""
    return {one.id for one in ast.walk(tree) if isinstance(one, ast.Name)} | {
        one.arg for one in ast.walk(tree) if isinstance(one, ast.arg)
    }


def imported(file: str) -> set[str]:
    """Return the names that a file imports at its top, or a notebook up to a cell."""
    return {
        (one.asname or one.name).partition(".")[0]
        for part in notebooks.before(file)
        for statement in tree_of(part).body
        if isinstance(statement, ast.Import)
        for one in statement.names
    }


def assigned_by(places: Sequence[Standing]) -> tuple[Standing, ast.stmt, str, bool] | None:
    """Return the statement that assigns what a call makes to one variable, that variable, and whether a library's
    functions returned it; None if there is none.

    `places`: where the functions stand that call each other, the innermost first.
    """
    through_library = False
    for one in places:
        if not one.is_own:
            through_library = True
            continue
        steps = path_to(tree_of(one.file), one.line)
        if not steps:
            return None
        block, place = steps[-1]
        statement = block[place]
        value = getattr(statement, "value", None)
        if value is None or _position(value) != one.position:
            return None
        if isinstance(statement, ast.Return):
            continue
        targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
        is_plain = isinstance(targets[0], ast.Name | ast.Attribute | ast.Subscript)
        if (
            not isinstance(statement, ast.Assign | ast.AnnAssign)
            or len(targets) > 1
            or not is_plain
        ):
            return None
        return one, statement, ast.unparse(targets[0]), through_library
    return None


def made_at(places: Sequence[Standing]) -> tuple[str, ast.stmt, ast.Call] | None:
    """Return the file, the statement and the call in it by which a script makes an object; None if a library does."""
    one = next(iter(places), None)
    steps = path_to(tree_of(one.file), one.line) if one is not None and one.is_own else []
    if one is None or not steps:
        return None
    block, place = steps[-1]
    calls = (node for node in ast.walk(block[place]) if isinstance(node, ast.Call))
    call = next((node for node in calls if _position(node) == one.position), None)
    return None if call is None else (one.file, block[place], call)


def _position(node: ast.expr) -> Position:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def is_alone(file: str, statement: ast.stmt) -> bool:
    """Return whether nothing else is on the lines of a statement."""
    lines = text_of(file).splitlines()
    end = lines[(statement.end_lineno or statement.lineno) - 1].encode()
    after = end[statement.end_col_offset or 0 :].strip()
    before = lines[statement.lineno - 1].encode()[: statement.col_offset]
    return not before.strip() and (not after or after.startswith(b"#"))


def source_of(file: str, node: ast.AST) -> str:
    """Return the text of an expression."""
    return ast.get_source_segment(text_of(file), node) or ast.unparse(node)


def unused(names: Sequence[str], taken: Container[str]) -> str:
    """Return the first name that a file does not use; the last of them if it uses all."""
    return next((one for one in names if one not in taken), names[-1])
