#!/usr/bin/env python
"""Whole training scripts, planned as they stand: live bytes of a plan on a CPU against the same script on real tensors.

    python scripts/plans/own_script_table.py CALLS.txt -o rows.md

Each line of CALLS.txt is a script with its words, relative to that file: `vae/main.py --batch-size 64`. A script is
executed in its own folder, in a process for each, and stopped after two steps. Real ones may write there.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.plans.live_bytes import live_bytes
from scripts.provenance import made


def row_of(call: str, folder: Path, limit: float) -> str:
    """Return a script's row of the table."""
    file, *words = shlex.split(call)
    path = (folder / file).resolve()
    try:
        [(planned, measured)] = live_bytes(
            ({"where": str(path), "words": words}, {}), folder=path.parent, timeout=limit
        )
    except RuntimeError as error:
        return f"| `{call}` | | | {str(error).splitlines()[-1][:120]} |"
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
