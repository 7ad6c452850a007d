"""Many mutations tried on tests that are imported once, for `scripts/mutations/mutations.py`.

A process collects the tests and forks for each mutation; the fork's functions get the mutated code (see
`scripts.mutations.mutations_swap`), and the tests of the mutation's files run, the quick ones first, up to the first
that fails.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.mutations.mutations_run import OPTIONS, Lane, Report, Watch, file_of
from scripts.mutations.mutations_swap import changed_functions, swap


@dataclass(frozen=True)
class Trial:
    """A mutated source, and the test files to run for it."""

    name: str
    file: str
    before: str
    after: str
    files: tuple[str, ...]
    first: str
    """The test that is run before all others, if it is among those."""


def try_group(lane: Lane, trials: Sequence[Trial]) -> Iterator[tuple[str, Report]]:
    """Yield what the tests came to for each mutation; those that cannot be tried so have no report."""
    reports = lane.folder / "group.json"
    reports.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            lane.enter_tree()
            files = dict.fromkeys(file for trial in trials for file in trial.files)
            options = [
                *OPTIONS,
                "--continue-on-collection-errors",
                f"--basetemp={lane.folder / 'base'}",
            ]
            pytest.main([*options, *files], plugins=[Group(lane, trials, reports)])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(0)
    told: set[str] = set()
    is_running = True
    while is_running:
        time.sleep(0.2)
        is_running = not os.waitpid(child, os.WNOHANG)[0]
        found = json.loads(reports.read_text()) if reports.exists() else {}
        for name in found.keys() - told:
            report = Report(**found[name])
            lane.took.update(report.took)
            yield name, report
        told |= found.keys()
    lane.clock += 4 * len(trials) + 4  # the child's count of written sources is lost
    for trial in trials:
        lane.write(trial.file, trial.before)


class Group:
    """A pytest plugin that runs what was collected once for each mutation, in a fork."""

    def __init__(self, lane: Lane, trials: Sequence[Trial], reports: Path) -> None:
        self.lane, self.trials, self.path = lane, trials, reports
        self.reports: dict[str, dict[str, Any]] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Fork for each mutation."""
        import_more()
        for trial in self.trials:
            changes = changed_functions(trial.before, trial.after, trial.file)
            if changes is None:
                continue
            lane = self.lane
            lane.write(trial.file, trial.after)  # for the processes that tests start
            lane.report_path.unlink(missing_ok=True)
            lane.began = time.time()
            lane.child = os.fork()
            if lane.child == 0:
                try:
                    os.setsid()
                    # none, where tests import the file later: they find the mutated one
                    swap(changes)
                    names = {code.co_name for code in changes if not code.co_name.startswith("<")}
                    run_all(session, Watch(lane.report_path, lane.limit, lane.took), trial, names)
                except BaseException:
                    traceback.print_exc()
                    lane.report_path.unlink(missing_ok=True)  # says nothing of the mutation
                finally:
                    sys.stdout.flush()
                    os._exit(0)
            while not os.waitpid(lane.child, os.WNOHANG)[0]:
                if lane.is_hanging():
                    lane.kill()
                time.sleep(0.02)
            report = lane.end()
            lane.write(trial.file, trial.before)
            if report.running is not None:
                self.reports[trial.name] = vars(report)
                self.path.with_suffix(".new").write_text(json.dumps(self.reports))
                self.path.with_suffix(".new").replace(self.path)
        return True


def import_more() -> None:
    """Import what the runs of most tests import when they are built."""
    with contextlib.suppress(Exception):
        parts = importlib.import_module("tests.engine.parts")
        parts.classifier()
        parts.gan({"mode": "amp", "dtype": "float16"})


def run_all(session: pytest.Session, watch: Watch, trial: Trial, names: set[str]) -> None:
    """Run a mutation's tests up to the first failure: its first one, those with one of the names, then quick ones."""
    session.config.pluginmanager.register(watch)

    def lateness(item: pytest.Item) -> tuple[bool, bool, int, float]:
        source = inspect.getsource(getattr(item, "function", run_all))
        has_name = any(name in source for name in names)
        return (
            not item.nodeid.startswith(trial.first),
            not has_name,
            trial.files.index(file_of(item)),
            watch.expected(item),
        )

    items = sorted((item for item in session.items if file_of(item) in trial.files), key=lateness)
    for item, following in zip(items, [*items[1:], None]):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if watch.report.failed or session.shouldstop:
            return
    watch.report.ended = "all" if items else "none"
    watch.write()
