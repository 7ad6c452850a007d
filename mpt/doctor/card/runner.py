"""Runs checks in processes of their own, within a time, and keeps their findings.

A check's row has `said`, and `wrong` for each fault found; `skipped` with a reason; or `error`. After each
check the rows are handed to `save`, so that a check that is killed leaves them: the next one takes them as `before` and
continues. A check that failed once is tried once more, after all that were not reached.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from mpt.doctor.card.processes import reason, run

Row = dict[str, Any]
LEAST_SECONDS = 5
LATE = "not reached in time; run this again to go on"
TOO_LONG = "did not end in its time; run this again to go on"


class Skipped(Exception):
    """A check cannot be made here, for the reason that is the message."""


def run_checks(
    commands: Mapping[str, Sequence[str | Path]],
    seconds: float,
    before: Sequence[Row] = (),
    save: Callable[[list[Row]], None] = lambda rows: None,
    at_once: int = 1,
) -> list[Row]:
    """Run the command of each check that `before` does not settle, `at_once` side by side; return a row for each."""
    deadline = time.monotonic() + seconds
    rows = {name: {"name": name, "error": LATE} for name in commands}
    rows |= {row["name"]: row for row in before if row["name"] in commands}
    waiting = [name for name, row in rows.items() if not is_settled(row)]
    waiting.sort(key=lambda name: rows[name].get("tries", 0))

    def make(name: str) -> tuple[str, Row]:
        return name, run_check(rows[name], commands[name], deadline - time.monotonic())

    with ThreadPool(at_once) as pool:  # which on Ctrl-C begins no further check
        for name, row in pool.imap_unordered(make, waiting):
            rows[name] = row
            save(list(rows.values()))
    return list(rows.values())


def is_settled(row: Row) -> bool:
    """Return whether a check was made or skipped, or its process failed twice."""
    return "said" in row or "skipped" in row or row.get("tries", 0) > 1


def is_late(row: Row) -> bool:
    """Return whether a check found too little time."""
    return row.get("error") in (LATE, TOO_LONG)


def run_check(row: Row, command: Sequence[str | Path], left: float) -> Row:
    """Run one check; return its row."""
    name, tries = row["name"], row.get("tries", 0)
    known = {"name": name, **({"tries": tries} if tries else {})}
    if left < LEAST_SECONDS:
        return {**known, "error": LATE}
    started = time.monotonic()
    try:
        done = run(command, left)
    except subprocess.TimeoutExpired:
        return {**known, "error": TOO_LONG}
    try:
        if done.returncode:
            raise ValueError(reason(done))
        found: Row = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        return {"name": name, "tries": tries + 1, "error": str(error)}
    return {"name": name, **found, "seconds": round(time.monotonic() - started, 1)}


def faults(rows: Sequence[Row]) -> list[str]:
    """Return in words which checks failed or found something wrong."""
    found = [
        (row["name"], row.get("error") or row.get("wrong")) for row in rows if not is_late(row)
    ]
    return [f"{name}: {words}" for name, words in found if words]


def left_over(rows: Sequence[Row]) -> list[str]:
    """Return the names of the checks that are still to be made."""
    return [row["name"] for row in rows if not is_settled(row)]


def as_markdown(title: str, rows: Sequence[Row]) -> list[str]:
    """Return the rows as a table, and in a line what time did not reach."""
    lines = [f"## {title}", "", "| check | result |", "|---|---|"]
    for row in rows:
        if not is_late(row):
            said = f"skipped: {row['skipped']}" if "skipped" in row else row.get("said", "")
            wrong = row.get("error") or row.get("wrong") or ""
            words = "; ".join(filter(None, (said, wrong and f"WRONG: {wrong}")))
            lines.append(f"| {row['name']} | {words.replace('|', '/')} |")
    late = [row["name"] for row in rows if is_late(row)]
    return [*lines, "", *([f"Not done in time: {', '.join(late)}.", ""] if late else [])]
