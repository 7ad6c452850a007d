"""Further places for a run's lines and pictures: TensorBoard, Weights & Biases, MLflow. One small seam for all of them.

The run's own files stay the record. A board gets the same numbers under `outer/inner` names, the preview pictures, and
drawings of evaluations and curves. One that fails or hangs (a server that is gone, a full quota) is left out from then
on, with a warning, and never stops a training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from mpt.boards.feed import Board, Feed, Pictures
from mpt.errors import ConfigError
from mpt.run.records.layout import RunDirectory
from mpt.run.records.temporary import temporary_folder

TITLES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases", "mlflow": "MLflow"}
PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow.tracking"}


def check_installed(names: Sequence[str]) -> None:
    """Raise ConfigError for a board whose package is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"train.boards: {TITLES[name]} is not installed: `pip install {name}`, or leave {name} out"
            )


def open_board(name: str, run: RunDirectory, settings: Mapping[str, Any]) -> Board:
    """Return a board of a run, whose package is imported by now only."""
    board: Board = import_module(f"mpt.boards.{name}_board").open_board(run, settings)
    return board


class Artist(Protocol):
    """Draws a run below a folder."""

    def draw_evaluation(self, details: Mapping[str, Any], folder: Path, /) -> Pictures:
        """Draw the details of an evaluation."""

    def draw_plots(self, run_path: Path, folder: Path, /) -> Pictures:
        """Draw a run's curves."""


class Boards:
    """The boards of a run, each behind its queue. Call `check_installed` first."""

    def __init__(
        self, names: Sequence[str], run: RunDirectory, settings: Mapping[str, Any]
    ) -> None:
        """`settings` is the configuration, nested, for those that show it."""
        self.problems: list[str] = []
        """Failures since the last look."""
        self.open: dict[str, Feed] = {}
        self.artist: Artist | None = None
        """Draws for boards, on their threads; without it they get no drawings."""
        for name in names:
            try:
                # here: two threads that import at once may meet a module half made
                import_module(PACKAGES[name])
            except (Exception, SystemExit) as error:
                self.leave_out(name, str(error) or type(error).__name__)
            else:
                self.open[name] = Feed(partial(open_board, name, run, settings))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Give the numbers of a mapping, nested or not, to all boards; values that are no numbers are left out."""
        if self.open:
            numbers = dict(flat_numbers(values))
            self.all(lambda board: board.write(step, numbers))

    def picture(self, step: int, path: Path) -> None:
        """Give a preview to all boards, if the file is still there when its turn comes."""
        self.all(lambda board: board.picture(step, path) if path.is_file() else None)

    def evaluation(self, step: int, details: Mapping[str, Any]) -> None:
        """Give drawings of an evaluation's details to all boards."""
        if self.artist is not None:
            self.all(partial(take_drawn, step, partial(self.artist.draw_evaluation, details)))

    def plots(self, step: int, run: Path) -> None:
        """Give the plots of a run's report to all boards."""
        if self.artist is not None:
            self.all(partial(take_drawn, step, partial(self.artist.draw_plots, run)))

    def close(self, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Close all boards; `is_hurried` says whether the process is to end soon."""
        for name, feed in self.open.items():
            if (problem := feed.close(is_hurried)) is not None:
                self.leave_out(name, problem)
        self.open = {}

    def all(self, work: Callable[[Board], None]) -> None:
        for feed in self.open.values():
            feed.put(work)

    def leave_out(self, name: str, problem: str) -> None:
        """Note that a board gets nothing more."""
        self.problems.append(
            f"{TITLES[name]} gets nothing more of this run: {problem.splitlines()[0]}"
        )

    def take_problems(self) -> list[str]:
        """Return the failures since the last call."""
        for name, feed in list(self.open.items()):
            if (problem := feed.look()) is not None:
                self.leave_out(name, problem)
                del self.open[name]
        found, self.problems = self.problems, []
        return found


def take_drawn(step: int, draw: Callable[[Path], Pictures], board: Board) -> None:
    """Draw into a temporary folder and give a board the pictures."""
    with temporary_folder("mpt-board-") as folder:
        for name, path in draw(folder).items():
            board.picture(step, path, name)


def flat_numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a nested mapping under `outer/inner` names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)
