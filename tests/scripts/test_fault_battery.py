"""The battery of faults: a slice of it comes out well, and it does notice what it is there to notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import fault_battery
from scripts.fault_battery_process import Ended
from scripts.fault_battery_runs import TOLD_CODES, failure_of

ROOT = Path(__file__).resolve().parents[2]
SLICE = """
import json, sys
sys.path.insert(0, {root!r})
import os
from scripts import fault_battery
from scripts import fault_battery_runs as runs
from scripts.fault_battery_process import KILL, LIBRARY
if LIBRARY not in os.environ:
    fault_battery.begin_with_library()
kinds = ["kills", "errors", "signals", "files", "planted", "weights", "configs", "outputs"]
with fault_battery.prepared() as battery:
    rows = fault_battery.try_kinds(battery, kinds, 0.002, 2)
    from mpt.run import checkpoint
    from mpt.engine.training import Training
    checkpoint.check_hash = lambda *_: None
    Training.write_summary = lambda self: None
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
        [sys.executable, str(program)], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    rows, unread, lost = json.loads(done.stdout.splitlines()[-1])
    assert all(cases >= 1 for cases, _, _ in rows.values())
    assert {kind: shown for kind, (_, bad, shown) in rows.items() if bad} == {}
    assert unread["silent"]  # nobody looks at hashes
    assert "summary.json" in lost[1]  # no summary is written


def test_endings_are_judged() -> None:
    assert failure_of(Ended(0, ""), TOLD_CODES) is None
    assert failure_of(Ended(5, "error: the disk is full"), TOLD_CODES) is None
    crash = Ended(1, "Traceback (most recent call last):\n  x")
    assert (failure_of(crash, TOLD_CODES) or "")[0] == "traceback"
    assert (failure_of(Ended(-9, "", hung=True), TOLD_CODES) or "")[0] == "hang"
    assert (failure_of(Ended(-11, ""), TOLD_CODES) or "")[0] == "silent"


@pytest.mark.parametrize("scale", [0.001, 0.1, 0.5, 1.0])
def test_a_share_of_the_cases_is_spread_over_all_of_them(scale: float) -> None:
    cases = [(number,) for number in range(1000)]
    chosen = [case[0] for case in fault_battery.sample(cases, scale, seed=1)]
    assert len(chosen) == len(set(chosen)) == round(1000 * scale)
    assert max(b - a for a, b in zip([-1, *chosen], [*chosen, 1000], strict=True)) <= 2 / scale
