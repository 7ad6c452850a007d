"""Bring back faults that fail on a GPU and not on a CPU, one at a time, and see whether a rehearsal notices.

Usage: python scripts/faults/rehearse_faults.py [--state FILE] [--only NAME ...] [--page]

Each fault is one replacement in one file, made in a copy of the repository (`git ls-files`, changes included). All
tests run once in the copy as it is, then each fault's test with the fault. The verdict is one of

- noticed: the test passes without the fault, and fails with it in the words that belong to it;
- limit: it passes with the fault too, as `limit` says it must;
- missed: it passes with the fault, and should not;
- broken run: it fails without the fault, or with it in other words, or does not end, so that nothing is known.

A fault that is missed, or whose run is broken, ends the script with 1. `--state` keeps the verdicts, a line each: a
second run with the same file tries those that are not there, are missed or broken. `--page` runs nothing and writes
docs/benchmarks/planted_faults.md from that file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.faults.rehearsed_faults import MENDED, Fault  # noqa: E402
from scripts.faults.rehearsed_faults_planted import PLANTED  # noqa: E402
from tests.cuda_rehearsal.server import FOR_ONE  # noqa: E402

FAULTS = (*MENDED, *PLANTED)
PAGE = ROOT / "docs" / "benchmarks" / "planted_faults.md"
LIMIT_SECONDS = 900
"""Of one test, which takes ten to thirty seconds of a core that is free."""
NO_CODE = "SyntaxError|IndentationError|ImportError|ModuleNotFoundError|NameError"
"""What a test never says of a fault, but of a replacement that is none."""
SETTLED = ("noticed", "limit")
"""How verdicts begin that need no second try."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=[fault.name for fault in FAULTS], metavar="NAME"
    )
    parser.add_argument(
        "--state", type=Path, help="keep the verdicts in this file, and go on from it"
    )
    parser.add_argument(
        "--page", action="store_true", help=f"write {PAGE.relative_to(ROOT)} from the state's file"
    )
    options = parser.parse_args()
    known = read_state(options.state)
    if options.page:
        PAGE.write_text("\n".join(as_page(known)) + "\n", "utf-8")
        print(f"wrote {PAGE}")
        return 0
    chosen = [fault for fault in FAULTS if not options.only or fault.name in options.only]
    waiting = [
        fault
        for fault in chosen
        if not known.get(fault.name, {}).get("verdict", "").startswith(SETTLED)
    ]
    with tempfile.TemporaryDirectory(prefix="rehearse-faults-") as folder:
        copy = copy_repository(Path(folder))
        passing = find_passing({fault.test for fault in waiting}, copy)
        for fault in waiting:
            started = time.monotonic()
            verdict = try_fault(fault, copy, fault.test in passing)
            seconds = round(time.monotonic() - started)
            print(f"{fault.name}: {verdict} ({seconds} s)", flush=True)
            known[fault.name] = {
                "name": fault.name,
                "verdict": verdict,
                "seconds": seconds,
                **described(),
            }
            if options.state:
                with options.state.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(known[fault.name]) + "\n")
    return 0 if all(known[fault.name]["verdict"].startswith(SETTLED) for fault in chosen) else 1


def read_state(path: Path | None) -> dict[str, dict[str, Any]]:
    """Return each fault's last verdict by its name."""
    lines = path.read_text("utf-8").splitlines() if path is not None and path.is_file() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def described() -> dict[str, str]:
    """Return the date, the commit and the version of torch."""
    import torch

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return {
        "on": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
    }


def as_page(known: dict[str, dict[str, Any]]) -> list[str]:
    """Return the page of all faults with their verdicts."""
    rows = [known.get(fault.name, {"verdict": "not run"}) for fault in FAULTS]
    kinds = [str(row["verdict"]).partition(":")[0] for row in rows]
    counts = ", ".join(f"{kind}: {kinds.count(kind)}" for kind in dict.fromkeys(kinds))
    run = {
        name: sorted({str(row[name]) for row in rows if name in row})
        for name in ("on", "commit", "torch")
    }
    return [
        "# Faults that a rehearsal must notice",
        "",
        f"{len(FAULTS)} faults that pass on a CPU and fail, or mislead, on a CUDA card, brought back one at a time:",
        f"{counts}. How they are noticed is in [the rehearsal](../explanation/rehearsal.md).",
        "",
        f"Run on {' and '.join(run['on'])} on a CPU ({platform.machine()}, Linux), torch {', '.join(run['torch'])}, "
        f"commits {', '.join(run['commit'])}, by `python scripts/faults/rehearse_faults.py --state FILE`; the page "
        "the same with `--page`.",
        "",
        "## Mended before a first GPU",
        "",
        *table(MENDED, known),
        "",
        "## Planted, none of them ever in mpt",
        "",
        *table(PLANTED, known),
    ]


def table(faults: Sequence[Fault], known: dict[str, dict[str, Any]]) -> list[str]:
    """Return faults as Markdown."""
    lines = ["| Fault | What happens | Test | Verdict |", "|---|---|---|---|"]
    for fault in faults:
        verdict = str(known.get(fault.name, {"verdict": "not run"})["verdict"])
        said = verdict if verdict.startswith("limit") else verdict.partition(":")[0]
        lines.append(
            f"| {fault.name} | {fault.words} | `{fault.test.removeprefix('tests/')}` | {said} |"
        )
    return lines


def copy_repository(folder: Path) -> Path:
    """Copy what git knows, as it stands, and what it does not know and does not ignore."""
    known = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(
        known, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def find_passing(tests: set[str], copy: Path) -> set[str]:
    """Return those of the tests that pass in the copy as it is; all run in one process."""
    if not tests:
        return set()
    done, said = run_tests(sorted(tests), copy, LIMIT_SECONDS * len(tests))
    return (
        {test for test in tests if f"PASSED {test}" in said.splitlines()}
        if done is not None
        else set()
    )


def try_fault(fault: Fault, copy: Path, passes: bool) -> str:
    """Run a fault's test with it in the copy; return the verdict. `passes`: whether it passes without the fault."""
    if not passes:
        return "broken run: the test does not pass without the fault"
    path = copy / fault.file
    text = path.read_text("utf-8")
    assert text.count(fault.mended) == 1, (
        f"{fault.file}: {fault.mended!r} does not stand there once"
    )
    path.write_text(text.replace(fault.mended, fault.broken), "utf-8")
    try:
        code, said = run_tests([fault.test], copy, LIMIT_SECONDS)
    finally:
        path.write_text(text, "utf-8")
    return judge(fault, code == 0 and f"PASSED {fault.test}" in said.splitlines(), said)


def judge(fault: Fault, passed: bool, said: str) -> str:
    """Return the verdict on a fault by how its test ended with it."""
    last = said.strip().splitlines()[-1]
    if passed:
        return f"limit: {fault.limit}" if fault.limit else f"missed: {last}"
    found = re.findall(f".*(?:{fault.says}).*", said)
    if not found or re.search(NO_CODE, said) or " failed" not in last:
        return f"broken run: with the fault {last}"
    if fault.limit:
        return f"missed no more, but listed as a limit: {found[-1].strip()[:160]}"
    return f"noticed: {' '.join(found[-1].split())[:160]}"


def run_tests(tests: Sequence[str], copy: Path, seconds: float) -> tuple[int | None, str]:
    """Run tests in the copy; return the exit code, None if they did not end in time, and what was printed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    # CI: without a compiler they fail, not skip
    environment = {**os.environ, "PYTHONPATH": str(copy), "CI": "1"}
    environment |= {FOR_ONE: "1"} if len(tests) == 1 else {}
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"no end within {seconds:.0f} s"
    return (
        done.returncode,
        done.stdout if done.stdout.strip() else f"exit {done.returncode}: {done.stderr}",
    )


if __name__ == "__main__":
    sys.exit(main())
