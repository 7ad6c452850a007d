"""The device section of `mpt doctor`: the checks of a card within some minutes, and a file that can be sent.

The file is written after each check. A second `mpt doctor --only device` with the same file continues where the first
stopped, also if that was killed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mpt.doctor.card.checks import MEANINGS, check_names, commands_of
from mpt.doctor.card.machine import describe_machine
from mpt.doctor.card.runner import Row, is_late, is_settled, left_over, run_checks
from mpt.doctor.findings import Section
from mpt.run.process.files import write_atomically

SECONDS = 480.0
NO_CARD = "needs a CUDA device"


def examine_device(device: torch.device, file: Path) -> Section:
    """Run the checks that the file does not hold yet, and write them to it. Raises InputOutputError."""
    about = describe_machine(device)
    save = saver(file, about)
    every = check_names()
    names = every if device.type == "cuda" else ["machine"]
    rows = run_checks(
        commands_of(names, str(device), small=False), SECONDS, rows_of(file, about), save
    )
    if device.type != "cuda":
        rows += [{"name": name, "skipped": NO_CARD} for name in every if name not in names]
    save(rows)
    section = Section("device")
    for row in rows:
        add(section, row, device)
    left = left_over(rows)
    if left:
        text = f"{len(left)} checks are left: {', '.join(left)}"
        section.add("note", "time", text, "the same command goes on with them")
    section.add(
        "note", "file", f"{file} holds what was measured", "docs/how-to/help.md says how to send it"
    )
    return section


def saver(file: Path, about: dict[str, Any]) -> Callable[[list[Row]], None]:
    """Return a function that writes rows to the file, and says on standard error which one is new."""
    told: set[str] = set()

    def save(rows: list[Row]) -> None:
        write_atomically(file, json.dumps({"machine": about, "checks": rows}, indent=1) + "\n")
        done = [row["name"] for row in rows if is_settled(row) and row.get("skipped") != NO_CARD]
        for number, name in enumerate(done, 1):
            if name not in told:
                print(f"{number} of {len(rows)} checks: {name}", file=sys.stderr, flush=True)
        told.update(done)

    return save


def rows_of(file: Path, about: dict[str, Any]) -> list[Row]:
    """Return the rows of an earlier run on the same machine; none if there is no such file."""
    try:
        found = json.loads(file.read_text("utf-8"))
        return list(found["checks"]) if found["machine"] == about else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def add(section: Section, row: Row, device: torch.device) -> None:
    """Add a check's row as a finding."""
    kind, _, subject = row["name"].partition(" ")
    about = f"{device}: {MEANINGS[kind]}{subject and f' ({subject})'}"
    if "skipped" in row:
        section.add("note", about, f"not tried: {row['skipped']}")
    elif row.get("wrong"):
        section.add("fault", about, f"{row['wrong']} ({row.get('said', '')})")
    elif "said" in row:
        section.add("ok", about, row["said"])
    elif not is_late(row):
        section.add("fault", about, row["error"])
