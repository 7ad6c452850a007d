"""The battery of faults: a slice of it comes out well, and it does notice what it is there to notice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpt.config.load import load_config
from scripts.faults import fault_battery, fault_battery_inputs, fault_battery_runs
from scripts.faults.fault_battery_process import (
    PREFIX,
    Ended,
    clean_up_when_told_to_end,
    end_all,
    is_running,
    make_folder,
    start,
)
from scripts.faults.fault_battery_runs import TOLD_CODES, failure_of

ROOT = Path(__file__).resolve().parents[2]
SLICE = """
import json, sys
sys.path.insert(0, {root!r})
from scripts.faults.fault_battery_process import KILL, begin_with_library
begin_with_library()
from mpt.config.load import load_config
from scripts.faults import fault_battery, fault_battery_inputs, fault_battery_runs
from scripts.faults import fault_battery_runs as runs
kinds = ["kills", "errors", "signals", "files", "planted", "weights", "pickles", "configs", "outputs"]
with fault_battery.prepared() as battery:
    rows = fault_battery.try_kinds(battery, kinds, 0.002, 2)
    from mpt.run.checkpoints import checkpoint
    from mpt.engine.loop import summary
    checkpoint.check_hash = lambda *_: None
    summary.write_atomically = lambda *_, **__: None
    unread = fault_battery.try_kinds(battery, ["checkpoints"], 0.002, 1)["checkpoints"].bad
    place = battery.folder / "killed"
    place.mkdir()
    lost = runs.at_operation(battery, place, "train", KILL, 0, 40)
print(json.dumps([{{kind: [row.cases, row.bad, row.shown] for kind, row in rows.items()}}, unread, lost]))
"""


def test_a_slice_comes_out_well_and_broken_promises_are_noticed(tmp_path: Path) -> None:
    program = tmp_path / "slice.py"
    program.write_text(SLICE.format(root=str(ROOT)))
    environment = {name: value for name, value in os.environ.items() if "COVERAGE" not in name}
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    rows, unread, lost = json.loads(done.stdout.splitlines()[-1])
    assert all(cases >= 1 for cases, _, _ in rows.values())
    assert {kind: shown for kind, (_, bad, shown) in rows.items() if bad} == {}
    assert unread["silent"]  # nobody looks at hashes
    assert "summary.json" in lost[1]  # no summary is written


def test_what_is_mutated_was_right_before(tmp_path: Path) -> None:
    config = tmp_path / "base.yaml"
    config.write_text(fault_battery_inputs.BASE)
    assert load_config(config).train.batch_size == 64


def test_endings_are_judged() -> None:
    assert failure_of(Ended(0, ""), TOLD_CODES) is None
    assert failure_of(Ended(5, "error: the disk is full"), TOLD_CODES) is None
    crash = Ended(1, "Traceback (most recent call last):\n  x")
    assert (failure_of(crash, TOLD_CODES) or "")[0] == "traceback"
    assert (failure_of(Ended(-9, "", hung=True), TOLD_CODES) or "")[0] == "hang"
    assert (failure_of(Ended(-11, ""), TOLD_CODES) or "")[0] == "silent"


def test_a_log_is_gone_on_with_and_its_table_is_of_all_outcomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    battery, log, tried = (
        fault_battery_runs.Battery(tmp_path),
        tmp_path / "log.jsonl",
        tmp_path / "tried",
    )

    def case(battery: object, place: Path, number: int) -> tuple[str, str] | None:
        with tried.open("a") as file:
            file.write(f"{number} ")
        return ("lost", "something") if number == 2 else None

    for kind, count in (("kills", 3), ("files", 2)):
        numbered = [(case, number) for number in range(count)]
        monkeypatch.setitem(
            fault_battery.KINDS, kind, ("words", 10, lambda battery, numbered=numbered: numbered)
        )
    fault_battery.begin_log(log)
    fault_battery.try_kinds(battery, ["kills"], 1, 1, log=log)
    with log.open("ab") as file:
        file.write(b'{"kind": "kills", "ca')  # cut off by a kill
    fault_battery.begin_log(log)
    rows = fault_battery.try_kinds(battery, ["files", "kills"], 1, 2, log=log)
    assert sorted(tried.read_text().split()) == ["0", "0", "1", "1", "2"]
    assert {kind: (row.cases, row.all_cases, dict(row.bad)) for kind, row in rows.items()} == {
        "kills": (30, 30, {"lost": 1}),
        "files": (20, 20, {}),
    }
    assert "| 50 | 50 | **all** | 1 | 0 | 0 | 0 |" in fault_battery.describe(rows)
    ended = fault_battery.try_kinds(battery, ["planted"], 1, 1, log=log, until=0.0)
    assert list(ended) == ["kills", "files"]


def test_cases_are_chosen_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    battery, log = fault_battery_runs.Battery(tmp_path), tmp_path / "log.jsonl"

    def case(battery: object, place: Path, name: str) -> None:
        return None

    monkeypatch.setitem(
        fault_battery.KINDS, "kills", ("words", 1, lambda battery: [(case, "pipe"), (case, "link")])
    )
    monkeypatch.setitem(
        fault_battery.KINDS, "files", ("words", 1, lambda battery: [(case, "flip")])
    )
    rows = fault_battery.try_kinds(battery, ["kills", "files"], 0.5, 1, log=log, matching="li.k")
    assert {kind: row.cases for kind, row in rows.items()} == {"kills": 1}
    assert "'link'" in fault_battery.read_log(log)[0]["case"]


def test_a_battery_that_ends_leaves_no_process_and_removes_what_killed_ones_left(
    tmp_path: Path,
) -> None:
    numbers = tmp_path / "numbers"

    def note() -> None:
        with numbers.open("a") as file:
            file.write(f"{os.getpid()} ")

    def command() -> None:
        note()
        time.sleep(60)

    def worker() -> None:
        note()
        start(command, tmp_path / "command.log").wait()

    def battery() -> None:
        clean_up_when_told_to_end()
        working = start(worker, tmp_path / "worker.log")
        try:
            working.wait()
        except SystemExit:
            end_all([working])
            raise

    running = start(battery, tmp_path / "battery.log")
    deadline = time.monotonic() + 30
    while (
        len(numbers.read_text().split() if numbers.is_file() else []) < 2
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait().code == 128 + signal.SIGTERM
    assert [int(number) for number in numbers.read_text().split() if is_running(int(number))] == []

    left, own = tmp_path / f"{PREFIX}{running.pid}-abc", tmp_path / f"{PREFIX}{os.getpid()}-abc"
    for folder in (left, own):
        folder.mkdir()
    made = make_folder(tmp_path)
    assert (left.exists(), own.exists(), made.is_dir()) == (False, True, True)


def test_a_log_of_another_source_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    fault_battery.begin_log(log)
    fault_battery.begin_log(log)
    log.write_text('{"source": "another"}\n')
    with pytest.raises(SystemExit, match="another state of the source"):
        fault_battery.begin_log(log)


@pytest.mark.parametrize("scale", [0.001, 0.1, 0.5, 1.0])
def test_a_share_of_the_cases_is_spread_over_all_of_them(scale: float) -> None:
    cases = [(number,) for number in range(1000)]
    chosen = [case[0] for case in fault_battery.sample(cases, scale, seed=1)]
    assert len(chosen) == len(set(chosen)) == round(1000 * scale)
    assert max(b - a for a, b in zip([-1, *chosen], [*chosen, 1000], strict=True)) <= 2 / scale
