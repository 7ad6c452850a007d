"""The page of `mpt evaluate`: the figures first, then the task's findings, then how it was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mpt.report.run_page.classification import read_classification
from mpt.report.run_page.evaluation_section import read_section
from mpt.report.run_page.page import environment
from mpt.report.units import counted, show_figure, show_seconds
from mpt.run.process.files import write_atomically


class Figures(Protocol):
    """The figures in one precision (`mpt.inference.evaluating.Measured`)."""

    @property
    def precision(self) -> str: ...
    @property
    def figures(self) -> Mapping[str, float]: ...
    @property
    def refused(self) -> Mapping[str, str]: ...
    @property
    def details(self) -> Mapping[str, Any]: ...
    @property
    def test_set(self) -> str: ...


@dataclass(frozen=True)
class Evaluated:
    """An evaluation and its subject."""

    name: str
    step: int
    data: str
    samples: int
    device: str
    seconds: float
    metric: str
    measured: Sequence[Figures]
    saved: float | None
    """Figures of the training at this step on the run's own test set."""
    saved_test_set: str = ""
    """A hash of the samples that it measured on; empty if it is not known, or another set was named."""
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """Bad files of the data -> the reasons; they are not among the samples."""

    @property
    def headings(self) -> list[str]:
        """The table's headings: the precisions, and the difference of two."""
        return [
            *(one.precision for one in self.measured),
            *(["difference"] if len(self.measured) > 1 else []),
        ]

    @property
    def has_other_samples(self) -> bool:
        """Whether training measured on other samples."""
        return self.saved_test_set not in ("", self.measured[0].test_set)

    def sentences(self) -> list[str]:
        """Return remarks on the figures, a sentence each."""
        said = []
        if self.saved is not None and self.metric in self.measured[0].figures:
            now = self.measured[0].figures[self.metric]
            same = (
                "the same"
                if now == self.saved
                else f"now {show_figure(now)}, {now - self.saved:+.3g}"
            )
            if self.has_other_samples:
                same = "on other samples: the test set's files have changed since, and the figures cannot be compared"
            said.append(
                f"Training measured {self.metric} {show_figure(self.saved)} at this step: {same}."
            )
        refused = self.measured[0].refused
        for why in dict.fromkeys(refused.values()):
            names = [name for name, reason in refused.items() if reason == why]
            said.append(
                f"{', '.join(names)} {'was' if len(names) == 1 else 'were'} not measured: {why}"
            )
        if self.passed_over:
            path, why = next(iter(self.passed_over.items()))
            files = f"{counted(len(self.passed_over), 'bad file')} {'was' if len(self.passed_over) == 1 else 'were'}"
            said.append(f"{files} passed over; the first: {path}: {why}.")
        return said

    def to_record(self) -> dict[str, Any]:
        """Return the figures as plain data; values that are not finite become null."""

        def finite(value: float | None) -> float | None:
            return value if value is not None and math.isfinite(value) else None

        return {
            "evaluated": self.name,
            "step": self.step,
            "data": self.data,
            "tested": self.samples,
            "passed_over": len(self.passed_over),
            "device": self.device,
            "seconds": self.seconds,
            "metric": self.metric,
            "figures": {
                one.precision: {name: finite(value) for name, value in one.figures.items()}
                for one in self.measured
            },
            "saved_figure": finite(self.saved),
            "saved_on_other_samples": self.has_other_samples,
        }


def figure_rows(found: Evaluated) -> list[list[str]]:
    """Return the table's rows: a metric's name, its figure in each precision, and the difference of two."""
    rows = []
    for name in ordered(found):
        values = [one.figures[name] for one in found.measured]
        cells = [show_figure(value) for value in values]
        rows.append([name, *cells, *([f"{values[1] - values[0]:+.3g}"] if len(values) > 1 else [])])
    return rows


def ordered(found: Evaluated) -> list[str]:
    """Return the names of the figures, that of the task's own metric first."""
    names = list(found.measured[0].figures)
    return [name for name in names if name == found.metric] + [
        name for name in names if name != found.metric
    ]


def write_page(folder: Path, found: Evaluated) -> None:
    """Write `evaluation.html` next to the `evaluation.json` in a folder. Raises InputOutputError."""
    page = (
        environment()
        .get_template("evaluated.html.j2")
        .render(
            found=found,
            rows=figure_rows(found),
            seconds=show_seconds(found.seconds),
            classification=read_classification(folder),
            evaluation=read_section(folder),
        )
    )
    write_atomically(folder / "evaluation.html", page)
