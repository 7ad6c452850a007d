"""A notebook as a script: its cells of code one after the other, each under a name of its own.

The cell that `Run All` numbers 3 is `my.ipynb[3]`, in places and in errors. What only IPython understands is left out:
commands for the shell, most magics, and cells that are written in another language.
"""

from __future__ import annotations

import ast
import json
import linecache
import re
import tokenize
from pathlib import Path
from typing import Any

from mpt.errors import ConfigError

SUFFIX = ".ipynb"
CELL = re.compile(r"(?P<notebook>.+\.ipynb)\[(?P<number>\d+)\]", re.DOTALL)
MAGIC = re.compile(r"(?P<margin>\s*)(?:[%!?]|[\w.]+\?{1,2}\s*$)")
RUNNING = re.compile(r"(?P<margin>\s*)%(?:time|timeit|prun)\s+(?P<statement>[^-\s].*)")
"""Magics that execute the statement behind them."""
FOLDER = re.compile(r"(?P<margin>\s*)%cd\s+(?P<path>\S.*?)\s*")
STARTED = re.compile(
    r"^\s*(?:!|%run\s)\s*(?:(?:python[\d.]*|torchrun|accelerate)\b.*?\s)?(?P<script>[^\s=]+\.py)\b(?P<words>.*)",
    re.MULTILINE,
)
"""A script that a notebook starts in a process of its own."""
VARIABLE = re.compile(r"(?P<margin>\s*)%env\s+(?P<name>\w+)[=\s]\s*(?P<value>.*\S)\s*")
RUNNING_CELLS = ("time", "timeit", "prun", "capture")
"""Magics of a cell that execute it."""


def is_notebook(path: str) -> bool:
    """Return whether a file is a notebook by its name."""
    return path.endswith(SUFFIX)


def parts_of(path: str) -> dict[str, str]:
    """Return the texts that are executed for a script, by name: a notebook's cells, or the script's own.

    Raises ConfigError for a file that is no notebook of Python, and OSError.
    """
    if not is_notebook(path):
        return {path: text_of(path)}
    written = [text for text in cells_of(path) if text.strip()]
    return {f"{path}[{number}]": as_python(text) for number, text in enumerate(written, 1)}


def cells_of(path: str) -> list[str]:
    """Return a notebook's cells of code as they are written. Raises as `parts_of`."""
    try:
        data: Any = json.loads(Path(path).read_text("utf-8"))
        language = data["metadata"].get("kernelspec", {}).get("language", "python")
        cells = ["".join(cell["source"]) for cell in data["cells"] if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{path}: no notebook in the format of Jupyter 4 or later (`jupyter nbconvert --to notebook` converts it)"
        ) from None
    if language != "python":
        raise ConfigError(f"{path}: a notebook in {language}; mpt plans Python")
    return cells


def started_by(path: str) -> str:
    """Return which script a notebook starts in a process of its own, in words; empty if there is none."""
    cells = cells_of(path) if is_notebook(path) else []
    found = next((one for cell in cells if (one := STARTED.search(cell))), None)
    if found is None:
        return ""
    words = found["words"].strip()
    return f"It starts a script, to be planned by itself: mpt plan {found['script']}{f' -- {words}' if words else ''}"


def text_of(file: str) -> str:
    """Return the text of a file, or of a notebook's cell. Raises OSError for one that is not there."""
    cell = CELL.fullmatch(file)
    if cell is None:
        with tokenize.open(file) as opened:
            return opened.read()
    try:
        return parts_of(cell["notebook"])[file]
    except (KeyError, ConfigError) as error:
        raise OSError(f"{file}: there is no such cell") from error


def before(file: str) -> list[str]:
    """Return a cell and those that are executed before it; of another file, itself."""
    cell = CELL.fullmatch(file)
    if cell is None:
        return [file]
    return [f"{cell['notebook']}[{number}]" for number in range(1, int(cell["number"]) + 1)]


def as_python(text: str) -> str:
    """Return a cell's text as Python with the same lines; what is neither stays, to be refused as it is executed."""
    if text.startswith("%%"):
        first, _, rest = text.partition("\n")
        word = first.removeprefix("%%").split(maxsplit=1)[:1]
        text = "\n" + rest if word and word[0] in RUNNING_CELLS else "\n" * text.count("\n")
    lines = text.split("\n")
    for _ in range(len(lines)):
        wrong = line_that_is_not_python("\n".join(lines))
        if wrong is None or not MAGIC.match(lines[wrong]):
            break
        while lines[wrong].rstrip().endswith("\\") and wrong + 1 < len(lines):
            lines[wrong] = ""  # a command of several lines
            wrong += 1
            lines[wrong] = f"!{lines[wrong]}"
        lines[wrong] = without_magic(lines[wrong])
    return "\n".join(lines)


def line_that_is_not_python(text: str) -> int | None:
    """Return the place of the first line that is none of Python's, from 0 on; None if there is none."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        return min(error.lineno or 1, text.count("\n") + 1) - 1
    return None


def without_magic(line: str) -> str:
    """Return the statement that a line of IPython's stands for: `pass` for what a plan does not need."""
    if running := RUNNING.fullmatch(line):
        return f"{running['margin']}{running['statement']}"
    if variable := VARIABLE.fullmatch(line):
        return f"{variable['margin']}__import__('os').environ[{variable['name']!r}] = {variable['value']!r}"
    if folder := FOLDER.fullmatch(line):
        path = folder["path"].strip("\"'")
        return f"{folder['margin']}__import__('os').path.isdir({path!r}) and __import__('os').chdir({path!r})"
    margin = line[: len(line) - len(line.lstrip())]
    return f"{margin}pass"


class Shell:
    """What `get_ipython()` returns in a notebook: it takes every request and does nothing."""

    def __getattr__(self, name: str) -> Any:
        """Return something that takes anything."""
        return lambda *args, **kwargs: None


def names_in_notebooks() -> dict[str, Any]:
    """Return what a notebook has without an import."""
    return {"get_ipython": Shell, "display": lambda *args, **kwargs: None}


def let_find(name: str, text: str) -> None:
    """Let tracebacks and `inspect` find the text of a cell, which has no file."""
    if CELL.fullmatch(name):
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
