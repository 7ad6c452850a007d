"""Planning processes start before a command imports the rest only where they will be needed, and never outlive it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mpt.planner.client import processes
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import find_gpu


class Process:
    """Stands for a process."""

    def __init__(self, ended: int | None = None) -> None:
        self.ended = ended

    def poll(self) -> int | None:
        return self.ended


class Started:
    """Stands for a planner."""

    def __init__(self, environment: dict[str, str], ended: int | None = None) -> None:
        self.environment, self.process, self.is_over = environment, Process(ended), False

    def end(self) -> None:
        self.is_over = True


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(processes, "_ahead", found)
    monkeypatch.setattr(processes, "count_workers", lambda: 3)
    monkeypatch.setattr("atexit.register", lambda call: None)
    return found


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("plan here.yaml", 1),
        ("plan --gpu rtx2060 here.yaml train.batch_size=2", 1),
        ("plan @dcgan_amp --json", 1),
        ("plan here.yaml --vram 6GiB", 3),
        ("plan here.yaml --vram=6GiB", 3),
        ("plan presets here.yaml", 3),
        ("plan infer here.yaml", 1),
        ("plan missing.yaml", 0),
        ("plan here.yaml --help", 0),
        ("plan tune here.yaml", 0),
        ("plan here.yaml --parts=folder", 0),
        ("train here.yaml", 0),
        ("", 0),
    ],
)
def test_processes_are_started_ahead_for_a_plan_of_a_configuration_that_is_there(
    words: str, count: int, ahead: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here.yaml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "start", object)
    for can_fork, started in ((False, count), (True, min(1, count))):
        monkeypatch.setattr(processes, "CAN_FORK", can_fork)
        processes.start_ahead(words.split())
        assert len(ahead) == started
        ahead.clear()


def test_what_was_started_ahead_is_taken_only_where_it_is_what_would_be_started_now(
    ahead: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    same, other, ended = (
        Started(processes.environment()),
        Started({**processes.environment(), "MPT_PARTS": "elsewhere"}),
        Started(processes.environment(), ended=1),
    )
    ahead += [same, other, ended]
    assert processes.start() is same
    assert (same.is_over, other.is_over, ended.is_over) == (False, True, True)


def test_what_nothing_took_is_ended(ahead: list[Any]) -> None:
    started = Started({})
    ahead.append(started)
    processes.end_unused()
    assert started.is_over
    assert not ahead


def test_a_process_that_is_ended_amid_a_plan_of_a_script_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C in `mpt plan script.py` does: the session is left, and its busy process killed."""
    script, temporary = tmp_path / "slow.py", tmp_path / "temporary"
    script.write_text("import time\nopen('log.txt', 'w').write('x')\ntime.sleep(600)\n")
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with Session(find_gpu("rtx3060"), Calibration()) as session, ThreadPoolExecutor(1) as pool:
        source = {"where": str(script), "folder": str(tmp_path)}
        planning = pool.submit(session.plan_own, source, {})
        while not list(temporary.glob("*/**/log.txt")):
            assert not planning.done(), planning.result()
            time.sleep(0.05)
        session.kill()
    assert planning.result().error
    left = [path.name for path in temporary.iterdir()]
    assert [name for name in left if not name.startswith("torchinductor_")] == []
