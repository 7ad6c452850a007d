"""Tests run as on a machine without a GPU wherever they run: what they expect was measured on a CPU."""

import contextlib
import functools
import gc
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import mpt
from mpt.config.finding.part_packages import IMPORT_HOME, VARIABLE

TESTS = Path(__file__).parent
TRACING = "COVERAGE_PROCESS_CONFIG"
"""Set by coverage for the processes that tests start."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the fast tier: what the closest `tier` marker puts there, unless it is slow or needs a GPU."""
    for item in items:
        tier = item.get_closest_marker("tier")
        is_expensive = item.get_closest_marker("slow") or item.get_closest_marker("gpu")
        if tier is not None and tier.args == ("fast",) and not is_expensive:
            item.add_marker("fast")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let each test draw the same, whichever ran before it in its process: processes share them out as they come."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """Look for garbage rarely, and not among what collection made: it took a seventh of the suite's time.

    And keep nothing compiled from now on: a part that a test writes twice in a second would stay the first one.
    """
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(autouse=True)
def _no_drawing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures of reports undrawn where they are not what is tested: they take longer than a short training.

    In tests of commands and workflows axes are still made and filled; what is left out is matplotlib's layout and its
    writing of SVG.
    """
    package = request.path.relative_to(TESTS).parts[0]
    if package in ("commands", "workflows"):
        monkeypatch.setattr("mpt.report.drawing.as_svg", lambda figure, name: "<svg></svg>")
    elif package != "report":
        monkeypatch.setattr("mpt.report.drawing.drawn", lambda plot: "<svg></svg>")


@pytest.fixture(autouse=True)
def _training_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave reports and the planner's words on memory out where dozens of runs are trained: both have their tests."""
    if request.path.relative_to(TESTS).parts[0] in ("engine", "parallel"):
        monkeypatch.setattr("mpt.report.run_page.page.write_report", lambda path: None)
        monkeypatch.setattr(
            "mpt.workflows.training.out_of_memory_report.add_report",
            lambda message, training, arguments: message,
        )


@pytest.fixture(autouse=True, scope="module")
def _garbage_of_one_file() -> Iterator[None]:
    """Look at no file's objects again when the next one's garbage is: tests and mpt collect it hundreds of times."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _nothing_waits_for_the_disk() -> Iterator[None]:
    """Leave to the system when it writes files: a test's power does not fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: os.fstat(file) and None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _git_asked_once() -> Iterator[None]:
    """Ask git once about the repository that tests run in: each training asks it twice, a tenth of a short one."""
    import mpt.run.records.environment as environment

    ask, answers = environment.ask_git, functools.cache(environment.ask_git)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            environment,
            "ask_git",
            lambda folder, *words: (answers if folder == TESTS.parent else ask)(folder, *words),
        )
        yield


@pytest.fixture(autouse=True)
def _no_parts_left() -> Iterator[None]:
    """Forget the folders of parts that a test adds to this process, so that the next test finds what ships.

    And what was imported from them: another folder of the same name is another package.
    """
    before, imported = os.environ.get(VARIABLE), modules_of_parts()
    yield
    os.environ.pop(VARIABLE, None)
    if before is not None:
        os.environ[VARIABLE] = before
    for name in modules_of_parts() - imported:
        del sys.modules[name]
        vars(sys.modules[IMPORT_HOME]).pop(name.removeprefix(f"{IMPORT_HOME}."), None)


def modules_of_parts() -> set[str]:
    """Return the names of the modules that were imported from folders of parts."""
    packages = [
        name
        for name, value in vars(sys.modules.get(IMPORT_HOME, mpt)).items()
        if isinstance(value, ModuleType) and value.__name__ == f"{IMPORT_HOME}.{name}"
    ]
    if not packages:  # of thousands of modules none has to be looked at
        return set()
    return {name for name in sys.modules if name.startswith(f"{IMPORT_HOME}.")}


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, from the processes that tests start too, unless tests are chosen for needing one: `pytest -m gpu`.

    Keep what is compiled while tests are collected: without it each process that tests start compiles mpt anew. And
    take Ctrl-C as a terminal's programs do. A shell lets what it starts in the background ignore it, and nohup a
    hang-up, which the programs that tests send these signals to would inherit.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # still nothing here, but no longer inherited
    sys.dont_write_bytecode = False
    if "gpu" not in config.getoption("markexpr"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if TRACING in os.environ:
        let_processes_end()


def let_processes_end() -> None:
    """Let planning processes that have nothing to do end by themselves: a killed one leaves no coverage."""
    from mpt.planner.client.session import Session

    leave = Session.__exit__

    def leave_patiently(self: Session, *exception: object) -> None:
        if not self._is_killed and self._idle.qsize() == len(self._started):
            for worker in self._started:
                if worker.process.stdin is not None:
                    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                        worker.process.stdin.close()
                        worker.process.wait(30)
        leave(self, *exception)

    Session.__exit__ = leave_patiently  # type: ignore[method-assign]
