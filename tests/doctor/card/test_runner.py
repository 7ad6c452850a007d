"""Checks in processes of their own: kept, tried once more, and named if time was too short."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from mpt.doctor.card.runner import as_markdown, faults, left_over, run_checks


def command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def says(**row: Any) -> list[str]:
    return command(f"print('noise'); print({json.dumps(json.dumps(row))})")


def test_a_check_that_failed_is_tried_once_more_behind_the_others_and_what_is_there_is_kept() -> (
    None
):
    checks = {
        "breaks": command("raise ValueError('no bus')"),
        "right": says(said="equal"),
        "wrong": says(said="done", wrong="a|b apart"),
        "skips": says(skipped="no card"),
    }
    saved: list[list[str]] = []
    rows = run_checks(
        checks,
        60,
        (),
        lambda rows: saved.append([row["name"] for row in rows if "error" not in row]),
    )
    assert saved[-1] == ["right", "wrong", "skips"]
    assert faults(rows) == ["breaks: ValueError: no bus", "wrong: a|b apart"]
    assert left_over(rows) == ["breaks"]
    again: list[str] = []
    rows = run_checks(
        {**checks, "new": says(said="late")}, 60, rows, lambda rows: again.append("one more")
    )
    assert len(again) == 2  # the new one and the one that failed
    assert left_over(rows) == []
    text = "\n".join(as_markdown("Checks", rows))
    assert "| wrong | done; WRONG: a/b apart |" in text
    assert "| skips | skipped: no card |" in text


def test_what_time_did_not_reach_is_no_fault_and_is_left() -> None:
    rows = run_checks({"one": says(said="x"), "two": command("import time; time.sleep(60)")}, 6)
    assert [row.get("said") for row in rows] == ["x", None]
    assert faults(rows) == []
    assert left_over(rows) == ["two"]
    assert as_markdown("Checks", rows)[4:] == ["| one | x |", "", "Not done in time: two.", ""]


def test_checks_side_by_side_keep_their_order_and_wait_for_each_other_no_longer() -> None:
    meet = "import sys, time; from pathlib import Path; me, other = map(Path, sys.argv[1:]); me.touch()\n"
    meet += 'while not other.exists(): time.sleep(0.01)\nprint(\'{"said": "met"}\')'
    with TemporaryDirectory() as folder:
        one, other = Path(folder) / "one", Path(folder) / "other"
        checks = {"one": [*command(meet), one, other], "other": [*command(meet), other, one]}
        rows = run_checks(checks, 30, at_once=2)
    assert [(row["name"], row["said"]) for row in rows] == [("one", "met"), ("other", "met")]


@pytest.mark.parametrize("at_once", [1, 2])
def test_ctrl_c_begins_no_further_check(tmp_path: Path, at_once: int) -> None:
    begun = "import sys, time; from pathlib import Path; Path(sys.argv[1]).touch(); time.sleep(0.5)"
    checks = {"first": says(said="x")} | {
        str(number): [*command(begun), tmp_path / str(number)] for number in range(6)
    }

    def interrupt(rows: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_checks(checks, 60, (), interrupt, at_once)
    assert not (tmp_path / "5").exists()
