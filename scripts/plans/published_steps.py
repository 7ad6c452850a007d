"""Steps of other programs whose memory is published: planned as steps of one's own, and written into a page."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpt.planner.answers.plan import Plan
from mpt.planner.facts.calibration import CONTEXT_BYTES, Calibration
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.own.execution.source import Source
from mpt.planner.own.proposals.changes import Changes
from mpt.planner.own.trace import trace_own
from mpt.planner.plans.plan import Wish, describe
from mpt.planner.server.worker import preload
from mpt.planner.trace.unseen import unseen_on
from mpt.vision_ops import import_torchvision


def plan_of(build: Callable[..., Any], arguments: dict[str, Any], card: str) -> Plan:
    """Return the plan of `build(**arguments)` on a card, as `mpt plan FILE.py:build` makes it. Raises MptError."""
    gpu = find_gpu(card)
    file = Path(build.__code__.co_filename)
    source = Source(file.stem, build.__name__, str(file.parent))
    run = trace_own(source, arguments, gpu, unseen_on(gpu), Changes()).fake
    wish = Wish(budget_bytes=gpu.usable_bytes)
    return describe(run, 1, gpu, Calibration(), wish, CONTEXT_BYTES, False, None)


def clone_and_rows(about: str) -> argparse.ArgumentParser:
    """Return the parser of a script that plans from a clone; its first line of documentation says what it is."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("clone", type=Path)
    parser.add_argument("rows", type=Path, help="what is planned already, and will be")
    parser.add_argument("-o", "--output", type=Path, help="write the page")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def plan_at_commits(script: str, rows: Sequence[Any], clone: Path) -> list[Any]:
    """Plan rows with the code of the commit of each: those of a commit in a process of their own, in its tree.

    `script` is called with the tree, a file of the rows and `--worker`, and answers by `plan_as_worker`.
    """
    found: list[Any] = []
    for commit in sorted({row.commit for row in rows}):
        with tempfile.TemporaryDirectory() as folder:
            call = ["git", "-C", str(clone), "archive", commit]
            packed = subprocess.run(call, check=True, capture_output=True)
            subprocess.run(["tar", "x", "-C", folder], input=packed.stdout, check=True)
            file = Path(folder, "rows.json")
            of_commit = [row for row in rows if row.commit == commit]
            file.write_text(json.dumps([asdict(row) for row in of_commit]), "utf-8")
            call = [sys.executable, script, folder, str(file), "--worker"]
            subprocess.run(call, check=True, cwd=folder)
            found += [type(of_commit[0])(**one) for one in json.loads(file.read_text("utf-8"))]
    return found


def import_from(sources: Path) -> None:
    """Let this process plan steps of the code in a folder, as a planning process does."""
    sys.path.insert(0, str(sources))
    preload()
    import_torchvision("models")


def plan_as_worker(kind: type[Any], file: Path, plan_row: Callable[[Any], None]) -> None:
    """Plan the rows of a file, which are of a kind, and write each back as soon as it is planned."""
    rows = [kind(**one) for one in json.loads(file.read_text("utf-8"))]
    for row in rows:
        plan_row(row)
        file.write_text(json.dumps([asdict(one) for one in rows]), "utf-8")
        print(row, flush=True)


def error(planned: float, published: float) -> float:
    """Return how much more was planned, as a share of what is published."""
    return planned / published - 1


def summary(errors: Sequence[float]) -> str:
    """Return a row's cells: count, median, nine in ten within, lowest and highest error."""
    sizes = sorted(map(abs, errors))
    within = sizes[max(0, -(-9 * len(sizes) // 10) - 1)]
    return (
        f"{len(errors)} | {statistics.median(sizes):.1%} | {within:.1%} | {min(errors):+.1%} | "
        f"{max(errors):+.1%}"
    )
