"""Where else a run's lines and pictures go: TensorBoard, Weights & Biases, MLflow. One small seam for all of them.

The run's own files stay the record. A board gets the same numbers under `outer/inner` names and the preview pictures;
one that fails (a server that is gone, a full quota) is left out from then on, with a warning, and never stops a
training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mpt.errors import ConfigError
from mpt.run.records.layout import RunDirectory

TITLES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases", "mlflow": "MLflow"}


class Board:
    """One place that numbers go to. The names of numbers have slashes."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of a step."""

    def picture(self, step: int, path: Path) -> None:
        """Take a preview, a PNG file of the run."""

    def close(self) -> None:
        """Write out what is pending."""


def check_installed(names: Sequence[str]) -> None:
    """Raise ConfigError for a board whose package is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"train.boards: {TITLES[name]} is not installed: `pip install {name}`, or leave {name} out"
            )


def open_board(name: str, run: RunDirectory, settings: Mapping[str, Any]) -> Board:
    """Return a board of a run, whose package is imported by now only."""
    board: Board = import_module(f"mpt.run.boards.{name}_board").open_board(run, settings)
    return board


class Boards:
    """The boards of a run. Call `check_installed` first."""

    def __init__(self, names: Sequence[str], run: RunDirectory, settings: Mapping[str, Any]) -> None:
        """`settings` is the configuration, nested, for those that show it."""
        self.problems: list[str] = []
        """What failed since the last look."""
        self.open: dict[str, Board] = {}
        for name in names:
            self.attempt(name, partial(self.add, name, run, settings))

    def add(self, name: str, run: RunDirectory, settings: Mapping[str, Any]) -> None:
        """Open one more board."""
        self.open[name] = open_board(name, run, settings)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Give the numbers of a mapping, nested or not, to all boards; what is no number is left out."""
        if self.open:
            numbers = dict(flat_numbers(values))
            self.all(lambda board: board.write(step, numbers))

    def picture(self, step: int, path: Path) -> None:
        """Give a preview to all boards."""
        self.all(lambda board: board.picture(step, path))

    def close(self) -> None:
        """Close all boards."""
        self.all(lambda board: board.close())
        self.open = {}

    def all(self, work: Callable[[Board], None]) -> None:
        """Do something with each board."""
        for name, board in list(self.open.items()):
            self.attempt(name, partial(work, board))

    def attempt(self, name: str, work: Callable[[], None]) -> None:
        """Do something of a board's; whatever it raises ends that board alone."""
        try:
            work()
        except Exception as error:  # its own errors are of many kinds, a server's among them
            self.open.pop(name, None)
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.problems.append(f"{TITLES[name]} gets nothing more of this run: {first}")

    def take_problems(self) -> list[str]:
        """Return what failed since the last call."""
        found, self.problems = self.problems, []
        return found


def flat_numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a nested mapping under `outer/inner` names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)
