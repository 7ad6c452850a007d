#!/usr/bin/env python
"""Whole training scripts, planned as they stand: live bytes of a plan on a CPU against the same script on real tensors.

    python scripts/own_script_table.py CALLS.txt -o rows.md

Each line of CALLS.txt is a script with its words, relative to that file: `vae/main.py --batch-size 64`. A script is
executed in its own folder, in a process for each, and stopped after two steps. Real ones may write there.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from scripts.provenance import made

MEASURED = """
import json, sys
from mpt.planner.own.factory import Source
from mpt.planner.own.trace import trace_on_cpu
from mpt.planner.trace.trace import live_peak
source = Source(sys.argv[1], words=tuple(sys.argv[2:]))
print("LIVE", json.dumps([live_peak(trace_on_cpu(source, {}, is_fake)) for is_fake in (True, False)]))
"""


def row_of(call: str, folder: Path, limit: float) -> str:
    """Return a script's row of the table."""
    file, *words = shlex.split(call)
    path = (folder / file).resolve()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURED, str(path), *words],
        cwd=path.parent, capture_output=True, text=True, check=False, timeout=limit,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.startswith("LIVE ")]
    if not found:
        why = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return f"| `{call}` | | | {why[:120]} |"
    planned, measured = json.loads(found[0].removeprefix("LIVE "))
    same = "equal" if planned == measured else f"{(planned - measured) / measured:+.2%}"
    return f"| `{call}` | {planned:,} | {measured:,} | {same} |"


def main() -> None:
    """Write the rows of all scripts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("calls", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each")
    options = parser.parse_args()
    calls = options.calls.read_text(encoding="utf-8").split("\n")
    rows = [row_of(call, options.calls.parent, options.limit) for call in filter(None, calls)]
    head = ["| script | planned, bytes | measured, bytes | |", "|---|---:|---:|---|"]
    text = "\n".join([f"{made()}", "", *head, *rows, ""])
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
