"""Tests run as on a machine without a GPU wherever they run: what they expect was measured on a CPU."""

import os
import subprocess

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, from the processes that tests start too, unless tests are chosen for needing one: `pytest -m gpu`."""
    if "gpu" not in config.getoption("markexpr"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "COVERAGE_PROCESS_CONFIG" in os.environ:  # set by coverage for the processes that tests start
        let_processes_end()


def let_processes_end() -> None:
    """Let the planner's processes end by themselves before they are killed: a killed one leaves no coverage."""
    from mpt.planner import session

    class Patient(subprocess.Popen):  # type: ignore[type-arg]
        def kill(self) -> None:
            if self.stdin is not None and not self.stdin.closed:
                try:
                    self.stdin.close()
                    self.wait(30)
                except (OSError, subprocess.TimeoutExpired):
                    pass
            super().kill()

    class Module:
        PIPE = subprocess.PIPE
        Popen = Patient

    session.subprocess = Module  # type: ignore[assignment]
