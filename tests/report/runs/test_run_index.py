"""A table of many runs reads again only what has changed, and never believes an index that is none."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mpt.report.runs import run_rows
from mpt.report.runs.run_index import INDEX, as_entry, signature, write_index
from mpt.report.runs.run_rows import read_rows


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read: list[str] = []
    honest = run_rows.read_outline

    def read_outline(path: Path) -> Any:
        read.append(path.name)
        return honest(path)

    monkeypatch.setattr(run_rows, "read_outline", read_outline)
    return read


def test_a_run_that_did_not_change_is_not_read_again(
    make_run: Any, tmp_path: Path, counted: list[str]
) -> None:
    make_run("a")
    make_run("b", finished=False)
    first = read_rows(tmp_path)
    assert sorted(counted) == ["a", "b"]
    counted.clear()
    assert repr(read_rows(tmp_path)) == repr(first)
    assert counted == []
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"kind":"train","step":5000}\n')
    (tmp_path / "a").rename(tmp_path / "c")
    rows = {row.name: row for row in read_rows(tmp_path)}
    assert sorted(counted) == ["b", "c"]
    assert rows["b"].steps == 5000


def test_a_checkpoint_that_comes_or_goes_changes_the_run(
    make_run: Any, tmp_path: Path, counted: list[str]
) -> None:
    run = make_run("a")
    (run / "checkpoints").mkdir(exist_ok=True)
    read_rows(tmp_path)
    counted.clear()
    (run / "checkpoints" / "step-00000009").mkdir()
    os.utime(run / "checkpoints", (2e9, 2e9))
    read_rows(tmp_path)
    assert counted == ["a"]


def test_an_index_of_another_version_is_not_believed(
    make_run: Any, tmp_path: Path, counted: list[str]
) -> None:
    make_run("a")
    read_rows(tmp_path)
    counted.clear()
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / INDEX).write_text(json.dumps({**index, "version": "0.0.1"}))
    read_rows(tmp_path)
    assert counted == ["a"]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"version": "0", "runs": {}}', '{"runs": {"a": {"row": {}}}}', "[" * 100_000],
)
def test_a_damaged_index_costs_time_alone(
    make_run: Any, tmp_path: Path, counted: list[str], content: str
) -> None:
    make_run("a")
    expected = repr(read_rows(tmp_path))
    (tmp_path / INDEX).write_text(content)
    assert repr(read_rows(tmp_path)) == expected
    assert counted == ["a", "a"]
    assert json.loads((tmp_path / INDEX).read_text())["runs"]["a"]


def test_an_entry_with_fields_of_other_types_is_not_believed(
    make_run: Any, tmp_path: Path, counted: list[str]
) -> None:
    make_run("a")
    expected = repr(read_rows(tmp_path))
    index = json.loads((tmp_path / INDEX).read_text())
    for name in index["runs"]["a"]["row"]:
        damaged = json.loads(json.dumps(index))
        damaged["runs"]["a"]["row"][name] = {"x": 1}
        (tmp_path / INDEX).write_text(json.dumps(damaged))
        assert repr(read_rows(tmp_path)) == expected
    (tmp_path / INDEX).unlink()
    os.mkfifo(tmp_path / INDEX)
    assert repr(read_rows(tmp_path)) == expected


def test_of_many_runs_that_did_not_change_none_is_read_again(
    make_run: Any, tmp_path: Path, counted: list[str]
) -> None:
    original = make_run("run-0", steps=5)
    files = {path.name: path.read_bytes() for path in original.iterdir() if path.is_file()}
    for number in range(1, 200):
        run = tmp_path / f"run-{number}"
        run.mkdir()
        for name in ("config.yaml", "metrics.jsonl", "summary.json"):
            (run / name).write_bytes(files[name])
    row = run_rows.describe(run_rows.read_outline(original))
    runs = {path.name: path for path in tmp_path.iterdir()}
    entries = {
        name: as_entry(dataclasses.replace(row, name=name), signature(path))
        for name, path in runs.items()
    }
    write_index(tmp_path, entries)
    counted.clear()
    assert len(read_rows(tmp_path)) == 200
    assert counted == []
