"""Several mutations tried on one test file that is imported once, for `scripts/mutations.py`.

A process collects the tests of the file and forks for each mutation; the fork's functions get the mutated code (see
`scripts.mutations_swap`) and its tests run, the quick ones first, up to the first that fails.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.mutations_run import OPTIONS, Lane, Report, Watch, file_of
from scripts.mutations_swap import changed_functions, swap


@dataclass(frozen=True)
class Trial:
    """A mutated source, and the test that is run first."""

    name: str
    file: str
    before: str
    after: str
    first: str


def try_group(lane: Lane, test_file: str, trials: Sequence[Trial]) -> dict[str, Report]:
    """Return what the tests of one file came to for each mutation; those that could not be tried have no entry."""
    reports = lane.folder / "group.json"
    reports.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            lane.enter_tree()
            plugin = Group(lane, trials, reports)
            pytest.main([*OPTIONS, "-x", f"--basetemp={lane.folder / 'base'}", test_file], plugins=[plugin])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(child, 0)
    lane.clock += 4 * len(trials) + 4  # the child's count of written sources is lost
    for trial in trials:
        lane.write(trial.file, trial.before)
    found = json.loads(reports.read_text()) if reports.exists() else {}
    done = {name: Report(**one) for name, one in found.items()}
    for report in done.values():
        lane.took.update(report.took)
    return done


class Group:
    """A pytest plugin that runs what was collected once for each mutation, in a fork."""

    def __init__(self, lane: Lane, trials: Sequence[Trial], reports: Path) -> None:
        self.lane, self.trials, self.path = lane, trials, reports
        self.reports: dict[str, dict[str, Any]] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Fork for each mutation."""
        if session.testsfailed:
            return True
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
                    swap(changes)  # none, where tests import the file later: they find the mutated one
                    names = {code.co_name for code in changes if not code.co_name.startswith("<")}
                    run_all(session, Watch(lane.report_path, lane.limit, lane.took), trial.first, names)
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
                self.path.write_text(json.dumps(self.reports))
        return True


def run_all(session: pytest.Session, watch: Watch, first: str, names: set[str]) -> None:
    """Run what was collected up to the first failure: `first` and its cases, tests with one of the names, the quick."""
    session.config.pluginmanager.register(watch)

    def lateness(item: pytest.Item) -> tuple[bool, bool, float]:
        source = inspect.getsource(getattr(item, "function", run_all))
        return not item.nodeid.startswith(first), not any(name in source for name in names), watch.expected(item)

    items = sorted(session.items, key=lateness)
    assert len({file_of(item) for item in items}) <= 1
    for item, following in zip(items, [*items[1:], None]):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail or session.shouldstop:
            return
    watch.report.ended = "all"
    watch.write()
