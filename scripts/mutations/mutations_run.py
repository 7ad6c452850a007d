"""One mutation in a copy of the tree, for `scripts/mutations/mutations.py`.

Its tests run in a fork of a process that has imported torch and pytest, but nothing of mpt.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

COPIED = (
    "mpt",
    "tests",
    "scripts",
    "configs",
    "docs",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "CONTRIBUTING.md",
)
OPTIONS = ("-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=line", "--timeout=200")
HANGS_AFTER = 20.0
"""Processor seconds in one test that is counted as one that does not end."""
WAITS_AFTER = 400.0
"""Seconds in one test that is counted as one that waits for ever: twice pytest's own limit."""


@dataclass
class Report:
    """What the tests of one mutation came to."""

    failed: str | None = None
    """The first test that failed."""
    files: int = 0
    """Test files that were begun."""
    tests: int = 0
    seconds: float = 0.0
    """Processor time."""
    ended: str = "died"
    """all: every test ran; failed; limit: the time was used up; hangs; died."""
    running: str | None = None
    failures: list[str] = field(default_factory=list)
    took: dict[str, float] = field(default_factory=dict)
    """Test -> the processor seconds of its call."""


class Watch:
    """A pytest plugin that notes each test, and stops between two when the time is used up."""

    def __init__(self, path: Path, limit: float, known: Mapping[str, float]) -> None:
        self.path, self.limit, self.known = path, limit, known
        self.report = Report()
        self.seen: set[str] = set()

    def write(self) -> None:
        """Note the state, for a parent that may have to end this process."""
        self.report.seconds = processor_seconds()
        self.path.write_text(json.dumps(vars(self.report)))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Run the quick tests of each file first: an arithmetic error costs milliseconds and not a training."""
        files = {
            name: place for place, name in enumerate(dict.fromkeys(file_of(item) for item in items))
        }
        items.sort(key=lambda item: (files[file_of(item)], self.expected(item)))

    def expected(self, item: pytest.Item) -> float:
        """Return a test's processor seconds, to a tenth: measured, or guessed by whether it has a folder for runs."""
        guess = 1.0 if "tmp_path" in getattr(item, "fixturenames", ()) else 0.0
        return round(self.known.get(item.nodeid, guess), 1)

    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Before a test."""
        self.seen.add(file_of(item))
        self.report.files, self.report.running = len(self.seen), item.nodeid
        self.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """After each part of a test."""
        if report.failed:
            self.report.failures.append(report.nodeid)
        if report.failed and self.report.failed is None:
            self.report.failed, self.report.ended = report.nodeid, "failed"
        if report.when == "call":
            self.report.took[report.nodeid] = processor_seconds() - self.report.seconds
        if report.when == "teardown":
            self.report.tests += 1
        self.write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported has noticed the mutation."""
        if report.failed and self.report.failed is None:
            self.report.failed, self.report.ended = f"{report.nodeid} (collection)", "failed"
            self.write()

    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Stop when the time is used up."""
        if processor_seconds() > self.limit:
            self.report.ended = "limit"
            item.session.shouldstop = "the time is used up"
            self.write()


def file_of(item: pytest.Item) -> str:
    """Return the file of a test."""
    return item.nodeid.split("::")[0]


def doubled(tests: list[str]) -> Iterator[list[str]]:
    """Yield one test file, then two, four, eight."""
    start, size = 0, 1
    while start < len(tests):
        yield tests[start : start + size]
        start, size = start + size, 2 * size


def processor_seconds() -> float:
    """Return the processor time of this process and of those that it has waited for."""
    own, others = (
        resource.getrusage(resource.RUSAGE_SELF),
        resource.getrusage(resource.RUSAGE_CHILDREN),
    )
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def seconds_of(process: int) -> float:
    """Return the processor time of another process and of those that it has waited for."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    return 0.0


@dataclass
class Lane:
    """A copy of the tree in which one mutation at a time is tested."""

    folder: Path
    limit: float
    child: int = 0
    began: float = 0.0
    clock: int = field(default_factory=lambda: int(time.time()))
    took: dict[str, float] = field(default_factory=dict)
    """Test -> processor seconds, of all forks so far."""

    @property
    def tree(self) -> Path:
        """The copy."""
        return self.folder / "tree"

    @property
    def report_path(self) -> Path:
        """Where a fork writes its report."""
        return self.folder / "report.json"

    def fill(self, root: Path) -> None:
        """Copy the files that git knows or would take."""
        listed = subprocess.check_output(
            ["git", "ls-files", "-co", "--exclude-standard", *COPIED], cwd=root, text=True
        )
        for name in listed.splitlines():
            if (root / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.tree / name)

    def write(self, file: str, text: str) -> None:
        """Write a source so that compiled code of another version is not taken for its own."""
        path = self.tree / file
        path.write_text(text, "utf-8")
        self.clock += 2
        os.utime(path, (self.clock, self.clock))

    def start(self, tests: list[str], deselected: list[str], to_the_end: bool = False) -> None:
        """Fork a process that runs tests in this order up to the first failure, or all of them."""
        self.report_path.unlink(missing_ok=True)
        self.began = time.time()
        self.child = os.fork()
        if self.child == 0:
            try:
                self.run_tests(tests, deselected, to_the_end)
            except BaseException:
                traceback.print_exc()
                self.report_path.unlink(missing_ok=True)  # says nothing of the mutation
            finally:
                sys.stdout.flush()
                os._exit(0)

    def run_tests(self, tests: list[str], deselected: list[str], to_the_end: bool) -> None:
        """Run tests in this process, a fork."""
        self.enter_tree()
        options = [*OPTIONS, *([] if to_the_end else ["-x"])]
        skipped = [word for one in deselected for word in ("--deselect", one)]
        place = self.folder / "base"
        plugin = Watch(self.report_path, math.inf if to_the_end else self.limit, self.took)
        for some in (
            [tests] if to_the_end else doubled(tests)
        ):  # nearest first: to import them all would cost more than most kills
            pytest.main([*options, f"--basetemp={place}", *skipped, *some], plugins=[plugin])
            if plugin.report.ended in ("failed", "limit"):
                return
        plugin.report.ended = "all"
        plugin.write()

    def enter_tree(self) -> None:
        """Make this process, a fork, one of the copy, which has imported nothing of it yet."""
        os.setsid()
        log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.chdir(self.tree)
        os.environ["PYTHONPATH"] = str(self.tree)
        sys.path[:] = [str(self.tree), *(one for one in sys.path[1:] if one)]
        for name in [
            name for name in sys.modules if name.split(".")[0] in ("mpt", "tests", "scripts")
        ]:
            del sys.modules[name]

    def is_hanging(self) -> bool:
        """Return whether the test that is running takes much longer than a test may."""
        noted = self.report_path.stat().st_mtime if self.report_path.exists() else self.began
        if time.time() - noted > WAITS_AFTER:
            return True
        return (
            self.report_path.exists() and seconds_of(self.child) - self.read().seconds > HANGS_AFTER
        )

    def kill(self) -> None:
        """End the fork and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child, signal.SIGKILL)

    def end(self) -> Report:
        """Return the report of a fork that has ended, or end it; what it has started ends with it."""
        report = self.read()
        self.took.update(report.took)
        self.kill()
        shutil.rmtree(self.folder / "base", ignore_errors=True)
        self.child = 0
        return report

    def read(self) -> Report:
        """Return what the fork has noted so far."""
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(self.report_path.read_text())
            return Report(**found)
        return Report()
