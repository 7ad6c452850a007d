"""Bring back faults that fail on a GPU and not on a CPU, one at a time, and see whether a rehearsal notices.

Usage: python scripts/rehearse_faults.py [--only NAME ...] [--list]

Each fault is one replacement in one file, made in a copy of the repository (`git ls-files`, changes included), in which
its test runs: once as the repository is, once with the fault. The verdict is one of

- noticed: the test passes without the fault, and fails with it in the words that belong to it;
- limit: it passes with the fault too, as `limit` says it must;
- missed: it passes with the fault, and should not;
- broken run: it fails without the fault, or with it in other words, or does not end, so that nothing is known.

A fault that is missed, or whose run is broken, ends the script with 1. `--list` writes the tables of
docs/explanation/rehearsal.md.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.rehearsed_faults import MENDED, Fault  # noqa: E402
from scripts.rehearsed_faults_planted import PLANTED  # noqa: E402

FAULTS = (*MENDED, *PLANTED)
LIMIT_SECONDS = 900
"""Of one test, which takes ten to thirty seconds of a core that is free."""
NO_CODE = "SyntaxError|IndentationError|ImportError|ModuleNotFoundError|NameError"
"""What a test never says of a fault, but of a replacement that is none."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[fault.name for fault in FAULTS], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="write the faults and their tests, and run nothing")
    options = parser.parse_args()
    if options.list:
        print("\n\n".join("\n".join(table(faults)) for faults in (MENDED, PLANTED)))
        return 0
    wrong = []
    with tempfile.TemporaryDirectory(prefix="rehearse-faults-") as folder:
        copy = copy_repository(Path(folder))
        for fault in FAULTS:
            if options.only and fault.name not in options.only:
                continue
            started = time.monotonic()
            verdict = try_fault(fault, copy)
            print(f"{fault.name}: {verdict} ({time.monotonic() - started:.0f} s)", flush=True)
            if not verdict.startswith(("noticed", "limit")):
                wrong.append(fault.name)
    return 1 if wrong else 0


def table(faults: tuple[Fault, ...]) -> list[str]:
    """Return faults as Markdown."""
    rows = []
    for fault in faults:
        by = f"limit: {fault.limit}" if fault.limit else f"`{fault.test.removeprefix('tests/')}`"
        rows.append(f"| {fault.name} | {fault.words} | {by} |")
    return ["| Fault | What happens | Noticed by |", "|---|---|---|", *rows]


def copy_repository(folder: Path) -> Path:
    """Copy what git knows, as it stands, and what it does not know and does not ignore."""
    known = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(known, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def try_fault(fault: Fault, copy: Path) -> str:
    """Run a fault's test without it and with it in the copy; return the verdict."""
    passed, said = run_test(fault.test, copy)
    if not passed:
        return f"broken run: without the fault {said.strip().splitlines()[-1]}"
    path = copy / fault.file
    text = path.read_text("utf-8")
    assert text.count(fault.mended) == 1, f"{fault.file}: {fault.mended!r} does not stand there once"
    path.write_text(text.replace(fault.mended, fault.broken), "utf-8")
    try:
        passed, said = run_test.__wrapped__(fault.test, copy)
    finally:
        path.write_text(text, "utf-8")
    return judge(fault, passed, said)


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


@functools.cache
def run_test(test: str, copy: Path) -> tuple[bool, str]:
    """Return whether a test passed in the copy, and what was printed; nothing else counts as passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", test]
    environment = {**os.environ, "PYTHONPATH": str(copy), "CI": "1"}  # CI: without a compiler they fail, not skip
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"no end within {LIMIT_SECONDS} s"
    said = done.stdout if done.stdout.strip() else f"exit {done.returncode}: {done.stderr}"
    return done.returncode == 0 and "1 passed" in said.strip().splitlines()[-1], said


if __name__ == "__main__":
    sys.exit(main())
