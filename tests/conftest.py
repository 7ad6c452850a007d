"""Tests run as on a machine without a GPU wherever they run: what they expect was measured on a CPU."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

TRACING = "COVERAGE_PROCESS_CONFIG"
"""Set by coverage for the processes that tests start."""
FAST = (
    "config",
    "data",
    "losses",
    "metrics",
    "nn",
    "optim",
    "report",
    "run",
    "engine/test_build.py",
    "engine/test_scale_watch.py",
    "engine/test_step.py",
    "precision/test_scaler.py",
    "test_architecture.py",
    "test_cli.py",
    "test_seams.py",
)
"""Folders and files whose tests are the fast tier, `pytest -m fast -n 2`: under a minute on two cores."""
NOT_FAST = (
    "config/test_json_schema.py::test_a_shipped_config",
    "config/test_load.py::test_any_value_is_taken",
    "config/test_load.py::test_every_slip",
    "config/test_part_packages.py",
    "config/test_yaml_text.py::test_any_text_gives",
    "config/test_yaml_text.py::test_what_is_written_reads",
    "data/test_absent.py",
    "report/test_classification_page.py",
    "report/test_comparison.py",
    "report/test_page.py",
    "report/test_plots.py",
    "report/test_read_run.py::test_a_report_of_200_000_lines",
    "report/test_statistics.py",
    "run/test_boards.py::test_the_library_itself",
    "run/test_checkpoint.py::test_a_failure_of_any_call",
    "run/test_checkpoint.py::test_a_kill_at_any_moment",
    "run/test_collector.py",
    "run/test_other_systems.py",
    "run/test_signals.py",
    "run/test_state.py::test_any_nested_state",
    "run/test_weights_file.py::test_every_flipped_bit",
    "run/test_weights_file.py::test_hostile_pickles",
    "test_architecture.py::test_commands_that_only_look",
    "test_architecture.py::test_importing_the_light",
    "test_architecture.py::test_the_check_notices_torch",
    "test_cli.py::test_light_commands",
)
"""Files and tests among them that train runs, draw figures, start processes or draw many samples: a few in a hundred,
and half of the processor time."""

UNTRACED = (
    "commands/test_exported.py::test_an_export_alone",
    "commands/test_fine_tuning.py::test_a_file_with_another_head",
    "commands/test_skeleton.py::test_one_configuration",
    "commands/test_train.py::test_a_run_s_memory_is_planned",
    "commands/test_train.py::test_two_processes",
    "cuda_rehearsal",
    "engine/test_memory_ladder.py",
    "engine/test_resume.py",
    "engine/test_without_compiler.py",
    "parallel/test_resume.py",
    "parallel/test_shard_files.py::test_a_rank_killed",
    "planner/test_against_real.py",
    "planner/test_beside.py::test_a_model_that_cannot",
    "planner/test_beside.py::test_a_run_on_a_cpu",
    "planner/test_command.py::test_a_patch",
    "planner/test_fake_device.py",
    "planner/test_moments.py::test_an_evaluation_of_a_whole_batch",
    "planner/test_ranks.py::test_plans_agree",
    "planner/test_search.py::test_what_changes",
    "planner/test_session.py::test_every_precision_mode",
    "report/test_statistics.py::test_adding_seeds",
    "run/test_collector.py::test_a_training",
    "run/test_other_systems.py",
    "run/test_weights_file.py::test_hostile_pickles",
    "scripts",
    "systems/dain/nn/test_published_training.py",
    "systems/dain/nn/test_triton_operators.py",
    "systems/deepfacelab/commands/test_convert_leras.py::test_every_model",
    "systems/yolofuse/nn/test_torchvision_detector.py",
    "systems/yolofuse/nn/test_yolo_weights.py::test_the_same_network",
    "systems/yolofuse/nn/test_yolofuse.py::test_every_fusion",
    "systems/yolofuse/tasks/test_detect_contract.py",
    "test_api.py",
    "test_configs.py",
    "test_contributing.py",
    "test_outside_parts.py",
    "test_stories.py",
    "workflows/test_out_of_memory_report.py::test_an_adapted_run",
    "workflows/test_training_process.py",
)
"""Folders, files and tests that count for no coverage: they run whole commands and trainings whose lines other tests
reach too. Until Python 3.12 counting takes .6 of a test's time again (50 -> 84 processor seconds of two such files)."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the fast tier, and what counts for no coverage."""
    here = Path(__file__).parent
    for item in items:
        path = item.path.relative_to(here).as_posix() if item.path.is_relative_to(here) else ""
        name = f"{path}::{item.name}"
        if is_among(name, UNTRACED):
            item.add_marker("no_cover")  # of pytest-cov
        is_expensive = item.get_closest_marker("slow") or item.get_closest_marker("gpu") or is_among(name, NOT_FAST)
        if not is_expensive and is_among(name, FAST):
            item.add_marker("fast")


def is_among(name: str, chosen: tuple[str, ...]) -> bool:
    """Return whether a test, `FILE::NAME` below this folder, is one of these folders, files and beginnings of names."""
    return any(name.startswith(one if ".py" in one else f"{one}/") for one in chosen)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let processes that an untraced test starts be untraced too."""
    settings = os.environ.pop(TRACING, None) if item.get_closest_marker("no_cover") else None
    try:
        return (yield)
    finally:
        if settings is not None:
            os.environ[TRACING] = settings


@pytest.fixture(autouse=True)
def _no_drawing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures of reports undrawn where they are not what is tested: they take longer than a short training.

    Axes are still made and filled; what is left out is matplotlib's layout and its writing of SVG.
    """
    if Path(__file__).parent / "report" not in request.path.parents:
        import mpt.report.drawing

        monkeypatch.setattr(mpt.report.drawing, "as_svg", lambda figure, name: "<svg></svg>")


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, from the processes that tests start too, unless tests are chosen for needing one: `pytest -m gpu`.

    And take Ctrl-C as a terminal's programs do. A shell lets what it starts in the background ignore it, and nohup a
    hang-up, which the programs that tests send these signals to would inherit.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # still nothing here, but no longer inherited
    if "gpu" not in config.getoption("markexpr"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if TRACING in os.environ:
        let_processes_end()


def let_processes_end() -> None:
    """Let planning processes that have nothing to do end by themselves: a killed one leaves no coverage."""
    from mpt.planner.session import Session

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
