"""The batch size of a script: where its number is written, and the script with another one.

It is looked for among the script's words, then in its text: the default of an option of `argparse` or click, else the
first variable, argument, default or key of that name that has a number.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_OPTION = (
    r"(?:train[-_]|device[-_]|per[-_](?:device|gpu)[-_](?:train[-_])?)?(?:batch[-_]?[sS]ize|batch|bs)"
    r"(?:[-_]per[-_](?:device|gpu))?"
)
OPTION = re.compile(rf"(?:--?(?:\w+\.)*{_OPTION}|-b)(?:=(\d+))?|(?:\w+\.)*{_OPTION}=(\d+)")
"""The words of a batch size: `--batch-size 32`, `--batch_size=32`, `--per_device_train_batch_size 32`, `-b 32`,
`--data.batch_size 32`, and hydra's `data.batch_size=32`."""
NAME = re.compile(
    r"(?:train_|device_|per_(?:device|gpu)_(?:train_)?)?(?:batch_?size|bs)(?:_train|_per_(?:device|gpu))?",
    re.IGNORECASE,
)
"""Names of a batch size in a text: `batch_size`, `BATCH_SIZE`, `per_device_train_batch_size`."""


DECLARING = ("add_argument", "option")
"""Methods that declare an option: of a parser of `argparse`, and of click."""
OF_EVALUATION = re.compile(r"(?:.*_)?(?:test|val|valid|validation|eval|evaluation)[a-z]*(?:_.*)?")
"""Names of what is made for an evaluation, whose batch size is another one: `test_loader`, `valset`."""


@dataclass(frozen=True)
class BatchSize:
    """A batch size and its place: a word, an option that is not given, or a number in a text."""

    size: int
    word: int = -1
    """Place among the words."""
    option: str = ""
    file: str = ""
    line: int = 0

    def words(self, words: tuple[str, ...], size: int) -> tuple[str, ...]:
        """Return a script's words with another batch size."""
        if self.option:
            return (*words, self.option, str(size)) if size != self.size else words
        if self.word < 0:
            return words
        changed = re.sub(r"\d+$", str(size), words[self.word])
        return (*words[: self.word], changed, *words[self.word + 1 :])

    def text(self, file: str, text: str, size: int) -> str:
        """Return a script's text, or a part of it, with another batch size; its lines stay where they are."""
        number = first_number(text) if file == self.file and size != self.size else None
        if number is None:
            return text
        lines = text.splitlines(keepends=True)
        line = lines[number.lineno - 1].encode()
        start, end = number.col_offset, number.end_col_offset
        lines[number.lineno - 1] = (line[:start] + str(size).encode() + line[end:]).decode()
        return "".join(lines)

    @property
    def note(self) -> str:
        """Where its number was found, if not among the words."""
        if self.option:
            return f"its batch size is {self.size}, the default of {self.option}"
        place = f"{Path(self.file).name}:{self.line}"
        return f"its batch size is the {self.size} of {place}" if self.file else ""


def find_batch_size(words: tuple[str, ...], parts: Mapping[str, str]) -> BatchSize | None:
    """Return a script's batch size, `parts`: its text by file; None if there is none."""
    for place, word in enumerate(words):
        found = OPTION.fullmatch(word)
        if found is None:
            continue
        spoken = found[1] or found[2]
        number = place if spoken else place + 1
        value = spoken or "".join(words[number : number + 1])
        return BatchSize(int(value), word=number) if value.isdecimal() else None
    trees = {file: tree for file, text in parts.items() if (tree := parsed(text)) is not None}
    for tree in trees.values():
        for option, size in options_of(tree):
            return BatchSize(size, option=option)
    for file, tree in trees.items():
        for written in numbers_of(tree):
            return BatchSize(ast.literal_eval(written), file=file, line=written.lineno)
    return None


def parsed(text: str) -> ast.Module | None:
    """Return a text's syntax; None of one that has none, which is said when it is executed."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def first_number(text: str) -> ast.Constant | None:
    """Return the first number of a text that is a batch size."""
    tree = parsed(text)
    return None if tree is None else next(numbers_of(tree), None)


def options_of(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the options of `argparse` or click for a batch size, each with its default."""
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        if call.func.attr not in DECLARING:
            continue
        spoken = [one.value for one in call.args if isinstance(one, ast.Constant)]
        options = [one for one in spoken if isinstance(one, str) and OPTION.fullmatch(one)]
        defaults = [one.value for one in call.keywords if one.arg == "default"]
        if options and defaults and is_size(defaults[0]):
            yield max(options, key=len), ast.literal_eval(defaults[0])


def numbers_of(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the numbers that a name of a batch size has, in the order of the text."""
    others = {id(one) for made in made_for_evaluation(tree) for one in ast.walk(made)}
    found = [
        value
        for name, value in named_values(tree)
        if NAME.fullmatch(name)
        and isinstance(value, ast.Constant)
        and is_size(value)
        and id(value) not in others
    ]
    yield from sorted(found, key=lambda one: (one.lineno, one.col_offset))


def made_for_evaluation(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield what is assigned to variables of an evaluation."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets = (one for one in node.targets if isinstance(one, ast.Name | ast.Attribute))
            if any(OF_EVALUATION.fullmatch(name_of(one)) for one in targets):
                yield node.value


def named_values(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield names with what is assigned to them: variables, arguments of calls, defaults, keys of mappings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name | ast.Attribute):
                    yield name_of(target), node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            if isinstance(node.target, ast.Name | ast.Attribute):
                yield name_of(node.target), node.value
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg, node.value
        elif isinstance(node, ast.arguments):
            placed = [*node.posonlyargs, *node.args]
            for argument, default in zip(placed[::-1], node.defaults[::-1], strict=False):
                yield argument.arg, default
            for argument, default_or_none in zip(node.kwonlyargs, node.kw_defaults, strict=True):
                if default_or_none is not None:
                    yield argument.arg, default_or_none
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, value


def name_of(target: ast.Name | ast.Attribute) -> str:
    """Return a variable's name, or an attribute's."""
    return target.id if isinstance(target, ast.Name) else target.attr


def is_size(value: ast.expr) -> bool:
    """Return whether an expression is the number of a batch size."""
    return isinstance(value, ast.Constant) and type(value.value) is int and value.value > 0
