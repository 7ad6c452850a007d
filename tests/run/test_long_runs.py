"""What a long run and a folder of many runs cost: time and memory stay flat."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from pathlib import Path

import pytest

from mpt.data.loading.loader import Loader
from mpt.errors import CheckpointError
from mpt.run.checkpoints.checkpoint import load, save
from mpt.run.checkpoints.manifest import MANIFEST, TENSORS, hash_manifest
from mpt.run.records.layout import create_run, find_run, list_runs, newest_run
from mpt.run.records.recorder import Recorder
from tests.run.checkpoints.test_checkpoint import state_at

pytestmark = pytest.mark.tier("fast")


def write_lines(path: Path, count: int) -> None:
    line = {
        "time": 1.7e9,
        "seconds": 1.0,
        "losses": {"net/loss": 0.5},
        "lr": {"net": 1e-3},
        "skipped": {"net": 0},
    }
    with path.open("w") as file:
        for step in range(1, count + 1):
            file.write(
                json.dumps({"kind": "train", "step": step, **line}, separators=(",", ":")) + "\n"
            )


@pytest.mark.slow
def test_a_log_of_100_000_lines_is_resumed_in_flat_memory(tmp_path: Path) -> None:
    run = create_run(tmp_path, "demo")
    write_lines(run.metrics_path, 100_000)
    size = run.metrics_path.stat().st_size
    tracemalloc.start()
    with Recorder(run) as recorder:
        opened = tracemalloc.get_traced_memory()[1]
        assert recorder.truncate_after(99_000) == 1000
        cut = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert opened < 4 << 20
    # the lines that stay, once as they are gathered and once as they are written
    assert cut < 4 * size


def test_the_memory_of_opening_a_log_does_not_grow_with_it(tmp_path: Path) -> None:
    peaks = []
    for number, count in enumerate((1000, 8000)):
        run = create_run(tmp_path, f"run{number}")
        write_lines(run.metrics_path, count)
        tracemalloc.start()
        with Recorder(run):
            peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] + 100_000


@pytest.mark.slow
def test_among_1_000_runs_the_newest_is_found_at_once(tmp_path: Path) -> None:
    for number in range(1000):
        create_run(tmp_path, "demo").config_path.write_text(f"name: demo-{number}\n")
    started = time.process_time()
    assert len(list_runs(tmp_path)) == 1000
    assert newest_run(tmp_path).name == "demo-1000"
    assert find_run("demo-500", tmp_path)[0].name == "demo-500"
    assert time.process_time() - started < 2


def test_steps_beyond_two_to_the_31_are_saved_and_their_batches_found(tmp_path: Path) -> None:
    step = 2**31 + 5
    run = create_run(tmp_path, "demo")
    save(run, step, state_at(1), keep_last=1)
    assert load(run).step == step

    class Numbers:
        def __len__(self) -> int:
            return 10

        def groups(self) -> None:
            return None

    loader = Loader(Numbers(), 4, seed=0)  # type: ignore[arg-type]
    indices, epoch = loader.indices(step)
    assert (epoch, sorted(loader.order(epoch)), len(indices)) == (step // 2, list(range(10)), 4)


def test_a_state_of_10_gib_of_which_a_byte_is_missing_is_refused_unread(tmp_path: Path) -> None:
    run = create_run(tmp_path, "demo")
    path = save(run, 1, state_at(1), keep_last=1)
    manifest = json.loads((path / MANIFEST).read_text("utf-8"))
    manifest["files"][TENSORS]["bytes"] = 10 << 30
    manifest.pop("sha256")
    (path / MANIFEST).write_text(json.dumps({**manifest, "sha256": hash_manifest(manifest)}))
    os.truncate(path / TENSORS, (10 << 30) - 1)  # a hole: no place on the disk is taken
    tracemalloc.start()
    started = time.process_time()
    with pytest.raises(CheckpointError, match=rf"{TENSORS} .*{(10 << 30) - 1}"):
        load(run)
    assert time.process_time() - started < 1
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
