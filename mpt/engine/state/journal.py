"""The output of a training: log lines, evaluations, events and warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpt.boards.boards import Boards
from mpt.boards.console import Console
from mpt.engine.state.progress import Progress
from mpt.run.records.recorder import Recorder, read_lines


@dataclass
class Journal:
    """Writes at the step that the progress is at."""

    recorder: Recorder
    console: Console
    progress: Progress
    boards: Boards

    def row(self, values: Mapping[str, Any]) -> None:
        self.console.row(self.recorder.write_metrics(self.progress.step, values))
        self._to_boards(values)

    def evaluation(self, figures: Mapping[str, float], about: Mapping[str, Any]) -> None:
        """Write and show the figures of an evaluation on the test set, with notes about both."""
        values = {"seconds": self.progress.seconds, **about}
        self.console.row(self.recorder.write_evaluation(self.progress.step, figures, values))
        self._to_boards({"evaluate": figures})

    def picture(self, path: Path) -> None:
        """Show a preview, a PNG file of the run, if pictures are shown alongside it."""
        self.boards.picture(self.progress.step, path)
        self._tell_problems()

    def event(self, kind: str, message: str, **details: Any) -> None:
        self.recorder.write_event(self.progress.step, kind, {"message": message, **details})

    def warn(self, message: str, kind: str = "warning", **details: Any) -> None:
        """Record something that happened, and show it as a warning."""
        self.event(kind, message, **details)
        self.console.warning(message)

    def say(self, message: str) -> None:
        """Show a message that is not recorded."""
        self.console.message(message)

    def evaluation_spans(self) -> dict[str, dict[str, float]]:
        """Return the first, lowest, highest and last value of each figure over all evaluations."""
        values: dict[str, list[float]] = {}
        for _, metrics in self.recorder.evaluations:
            for name, value in metrics.items():
                values.setdefault(name, []).append(float(value))
        return {
            name: {
                "first": found[0],
                "lowest": min(found),
                "highest": max(found),
                "last": found[-1],
            }
            for name, found in values.items()
        }

    def event_counts(self) -> dict[str, int]:
        """Return how many events of each kind the run has had."""
        return dict(
            Counter(str(line.get("kind")) for line in read_lines(self.recorder.run.events_path))
        )

    def close(self, is_hurried: Callable[[], bool]) -> None:
        """Close the boards, soon if the process is to end; the recorder belongs to whoever opened it."""
        self.boards.close(is_hurried)
        self._tell_problems()

    def _to_boards(self, values: Mapping[str, Any]) -> None:
        self.boards.write(self.progress.step, values)
        self._tell_problems()

    def _tell_problems(self) -> None:
        for problem in self.boards.take_problems():
            self.warn(problem, "board")
