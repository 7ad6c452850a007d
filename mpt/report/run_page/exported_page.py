"""The page of an exported file: the metric before and after, and the nodes that compute in float32, with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from mpt.report.run_page.page import environment
from mpt.report.units import show_bytes, show_figure
from mpt.run.process.files import write_atomically


class Judged(Protocol):
    """The quality of an export (`mpt.workflows.exporting.export_gate.Judged`)."""

    metric: str
    before: Mapping[str, float]
    after: Mapping[str, float]
    samples: int
    nodes: int
    kept: dict[str, str]
    worst: dict[str, float]

    @property
    def within(self) -> bool: ...
    def sentence(self) -> str: ...


def write_page(path: Path, name: str, kind: str, run: str, judged: Judged, size_bytes: int) -> None:
    """Write the page. Raises InputOutputError."""
    names = [
        judged.metric,
        *(one for one in judged.before if one != judged.metric and one in judged.after),
    ]
    rows: list[list[Any]] = [
        [
            one,
            show_figure(judged.before[one]),
            show_figure(judged.after[one]),
            f"{judged.after[one] - judged.before[one]:+.3g}",
        ]
        for one in names
    ]
    page = environment().get_template("exported.html.j2")
    text = page.render(
        name=name, kind=kind, run=run, judged=judged, rows=rows, size=show_bytes(size_bytes)
    )
    write_atomically(path, text)
