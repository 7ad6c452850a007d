"""Each rank writes its rows; any number of processes reads them; what is torn, missing or old is refused by all."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from mpt.errors import InputOutputError
from mpt.run.checkpoints import checkpoint, shards
from mpt.run.checkpoints.checkpoint import load
from mpt.run.records.layout import RunDirectory

from .forked import run_ranks
from .killed_saves import ROWS, is_as_saved, kill_and_look, loading, saving

SECOND = "shard-00001-of-00003.safetensors"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the steps 1 and 2, saved by three ranks."""
    folder: Path = tmp_path_factory.mktemp("run")
    assert all(calls >= 4 for calls in run_ranks(3, saving, folder, (1, 2), None))
    return folder


@pytest.fixture
def run(written: Path, tmp_path: Path) -> RunDirectory:
    return RunDirectory(Path(shutil.copytree(written, tmp_path / "run")))


def test_every_rank_writes_its_rows_and_one_process_reads_them(run: RunDirectory) -> None:
    folder = run.checkpoint_path(2)
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    assert len(sizes) == 4
    rows = sum(ROWS) * 400
    assert all(size < rows / 2 for size in sizes.values()), "one file has more than a rank's part"
    assert sizes["state.safetensors"] < 1000, "what is sharded was gathered"
    assert json.loads((folder / "manifest.json").read_text())["format"] == 2
    loaded = load(run)
    assert (loaded.step, loaded.notes) == (2, [])
    assert is_as_saved(loaded)


@pytest.mark.parametrize("fault", ["missing", "torn", "stale", "flipped"])
def test_a_faulty_shard_is_refused_and_the_checkpoint_before_is_used(
    run: RunDirectory, fault: str
) -> None:
    shard = run.checkpoint_path(2) / SECOND
    data = shard.read_bytes()
    if fault == "missing":
        shard.unlink()
    elif fault == "stale":
        shutil.copy(run.checkpoint_path(1) / SECOND, shard)
    else:
        shard.write_bytes(data[:-100] if fault == "torn" else data[:-1] + bytes([data[-1] ^ 1]))
    loaded = load(run)
    assert loaded.step == 1
    assert is_as_saved(loaded)
    assert SECOND in loaded.notes[0]


def test_what_one_rank_cannot_read_is_refused_by_all(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = checkpoint.read_checkpoint
    monkeypatch.setattr(
        checkpoint, "read_checkpoint", lambda path: unreadable_on_rank_1(path, original)
    )
    told = run_ranks(2, loading, run.path)
    assert [(step, whole) for step, whole, _ in told] == [(1, True), (1, True)]
    assert all("not here yet (seen by rank 1)" in notes[0] for _, _, notes in told)


def unreadable_on_rank_1(path: Path, original: object) -> object:
    import os

    assert callable(original)
    if os.environ.get("RANK") == "1" and path.name == "step-00000002":
        raise ValueError("not here yet")
    return original(path)


@pytest.mark.parametrize("is_beside", [False, True], ids=["between steps", "beside the training"])
def test_a_rank_that_cannot_write_ends_all_and_leaves_nothing(
    is_beside: bool,
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    original = shards.write_tensors

    def full(descriptor: int, tensors: object) -> object:
        import os

        if os.environ.get("RANK") == "1":
            raise OSError(28, "No space left on device")
        return original(descriptor, tensors)  # type: ignore[arg-type]

    monkeypatch.setattr(shards, "write_tensors", full)
    assert run_ranks(2, saving, run.path, (3,), None, is_beside) == [InputOutputError.exit_code] * 2
    said = capfd.readouterr().err
    assert said.count("error:") == 1
    assert "rank 1: " in said
    assert "the disk is full" in said
    assert load(run).step == 2
    assert not list(run.checkpoints.glob(".*"))


@pytest.mark.parametrize(
    ("rank", "call", "is_beside"),
    [
        pytest.param(1, 2, False, id="in a shard-between steps"),
        pytest.param(0, 12, True, id="in the first rank's files-beside the training"),
        pytest.param(1, 2, True, id="in a shard-beside the training", marks=pytest.mark.slow),
        pytest.param(
            0, 12, False, id="in the first rank's files-between steps", marks=pytest.mark.slow
        ),
    ],
)
def test_a_rank_killed_in_a_save_loses_nothing(
    tmp_path: Path, rank: int, call: int, is_beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """scripts/faults/kill_saves.py does it at every call of every rank."""
    monkeypatch.setattr("mpt.parallel.watch.BEAT_SECONDS", 0.05)
    found = kill_and_look(tmp_path, 2, rank, call, is_beside)
    assert found["ends"][rank] == -signal.SIGKILL
    assert found["ends"][1 - rank] == 9
    assert (found["step"], found["whole"], found["cleaned"], found["left"]) == (2, True, 1, [])
