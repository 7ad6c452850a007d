"""A run's curves as files: numbers as CSV, plots as SVG and PDF, and what the page says of its parts."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mpt.commands import report
from mpt.commands.report import Command as ReportArguments
from mpt.errors import ConfigError
from mpt.report.drawing import INK
from mpt.report.run_page.figures import as_csv


def test_a_run_s_curves_are_written_as_csv_svg_and_pdf(make_run, tmp_path: Path, capsys) -> None:
    path = make_run()
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for number, line in enumerate(line for line in lines if line["kind"] == "train"):
        line |= {"grad_norm": {"gen": 2.0 + number}, "memory": {"peak_bytes": 1e6 * (1 + number)}}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report.run(ReportArguments(str(path), figures=str(tmp_path / "figures")))
    written = {one.name for one in (tmp_path / "figures").iterdir()}
    assert {"train.csv", "evaluations.csv", "losses.svg", "losses.pdf", "metric.pdf"} <= written
    assert {"gradient_norm.svg", "memory_over_time.pdf"} <= written
    assert str(tmp_path / "figures" / "losses.svg") in capsys.readouterr().out
    svg = (tmp_path / "figures" / "losses.svg").read_text()
    ElementTree.fromstring(svg)
    assert INK not in svg
    assert "currentColor" not in svg
    assert (tmp_path / "figures" / "losses.pdf").read_bytes().startswith(b"%PDF")
    rows = list(csv.DictReader((tmp_path / "figures" / "train.csv").read_text().splitlines()))
    train = [line for line in lines if line["kind"] == "train"]
    assert [int(row["step"]) for row in rows] == [line["step"] for line in train]
    assert float(rows[3]["grad_norm/gen"]) == 5.0
    name = next(iter(train[0]["losses"]))
    assert float(rows[0][f"losses/{name}"]) == train[0]["losses"][name]


def test_lines_with_other_names_share_a_table_and_nan_stays_nan() -> None:
    text = as_csv(
        [{"step": 1, "losses": {"a": 0.5}}, {"step": 2, "losses": {"b": "NaN"}, "kind": "train"}]
    )
    assert text == "step,losses/a,losses/b\n1,0.5,\n2,,nan\n"


def test_figures_are_of_one_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--figures is of one run"):
        report.run(ReportArguments(all=True, figures="x", runs=str(tmp_path)))


def test_the_page_has_the_hashes_of_the_parts_that_were_used(make_run) -> None:
    path = make_run()
    used = [
        {"name": "mine", "folder": "/x", "distribution": None, "files": {"nn/net.py": "ab" * 32}}
    ]
    (path / "parts.json").write_text(json.dumps(used))
    report.run(ReportArguments(str(path)))
    page = (path / "report.html").read_text()
    assert "part mine/nn/net.py" in page
    assert "ab" * 8 in page
