"""Saving beside the training: what is written is the state at the save, whatever happens meanwhile."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from mpt.errors import InputOutputError
from mpt.run.checkpoints import background_save, checkpoint
from mpt.run.checkpoints.background_save import BackgroundSave, HostCopies
from mpt.run.checkpoints.checkpoint import EncodedState, encode, load, save
from mpt.run.process import host_memory
from mpt.run.records.layout import RunDirectory, create_run

pytestmark = pytest.mark.tier("fast")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(tmp_path, "demo")


def odd_state() -> dict[str, Any]:
    """Every dtype that a state may hold, views, aliases, scalars and nothing at all."""
    weight = torch.arange(24, dtype=torch.float32).reshape(2, 3, 2, 2)
    return {
        "weight": weight.to(memory_format=torch.channels_last),
        "again": weight,
        "turned": weight[0, :, 0].t(),
        "flag": torch.tensor([True, False, True]),
        "half": torch.tensor(1.5, dtype=torch.bfloat16),
        "small": torch.arange(5, dtype=torch.uint8)[1:4],
        "wide": torch.tensor([1 + 2j], dtype=torch.complex128).conj(),
        "eight": torch.ones(3).to(torch.float8_e4m3fn),
        "none": torch.empty(0, 3),
        "step": torch.tensor(7),
    }


def files_of(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in ("state.safetensors", "state.json")}


def test_the_files_are_those_of_a_save_between_steps(run: RunDirectory) -> None:
    save(run, 1, odd_state(), keep_last=3)
    saver = BackgroundSave(True)
    for step in (2, 3):  # into new memory, and into memory that is kept
        saver.start(
            step,
            encode(odd_state()),
            lambda state, step=step: checkpoint.write(run, step, state, keep_last=3),
        )
    saver.finish()
    assert saver.newest == 3
    first, *others = (files_of(run.checkpoint_path(step)) for step in (1, 2, 3))
    assert others == [first, first]


def test_steps_taken_meanwhile_do_not_reach_the_file(run: RunDirectory) -> None:
    weight = torch.zeros(1000)
    goes_on = threading.Event()
    saver = BackgroundSave(None)

    def write(state: EncodedState) -> None:
        assert goes_on.wait(30)
        checkpoint.write(run, 1, state, keep_last=1)

    saver.start(1, encode({"weight": weight}), write)
    assert not saver.is_written
    assert saver.newest is None
    weight.add_(1)
    goes_on.set()
    saver.finish()
    assert torch.equal(load(run).state["weight"], torch.zeros(1000))


def test_the_next_save_waits_for_the_one_before(run: RunDirectory) -> None:
    order: list[str] = []
    saver = BackgroundSave(True)
    first_may_end = threading.Event()

    def slow(state: EncodedState) -> None:
        first_may_end.wait(0.05)
        order.append("first")

    saver.start(1, encode({"n": 1}), slow)
    saver.start(2, encode({"n": 2}), lambda state: order.append("second"))
    saver.finish()
    assert order == ["first", "second"]


def test_what_fails_is_raised_once_where_it_is_waited_for(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save(run, 1, odd_state(), keep_last=3)
    saver = BackgroundSave(True)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", full)
        saver.start(
            2, encode(odd_state()), lambda state: checkpoint.write(run, 2, state, keep_last=3)
        )
        with pytest.raises(InputOutputError, match=r"disk is full.*bytes are needed"):
            saver.finish()
    saver.finish()
    assert (saver.newest, load(run).step) == (None, 1)


def test_a_state_that_does_not_fit_beside_is_written_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []
    state = encode({"weight": torch.zeros(1000)})
    for beside, available, is_beside in (
        (None, 8000, False),
        (None, 10**6, True),
        (None, None, False),
        (True, 0, True),
        (False, 10**6, False),
    ):
        monkeypatch.setattr(
            background_save, "available_bytes", lambda available=available: available
        )
        saver = BackgroundSave(beside)
        saver.start(1, state, lambda state: threads.append(threading.current_thread()))
        saver.finish()
        assert (threads.pop() is not threading.current_thread(), saver.newest) == (is_beside, 1)


def test_memory_is_kept_and_grows() -> None:
    copies = HostCopies()
    small, large = {"a": torch.ones(100)}, {"a": torch.ones(1000), "b": torch.ones(3)}
    assert copies.of(large, 4012, wanted=True) is not None
    place = copies.block.data_ptr()
    for tensors, size in ((small, 400), (large, 4012)):
        found = copies.of(tensors, size, wanted=None)
        assert found is not None
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
        assert copies.block.data_ptr() == place


def test_the_least_that_a_control_group_leaves_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    (tmp_path / "own").write_text("0::/jobs/one\n")
    monkeypatch.setattr(host_memory, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path / "groups")
    assert host_memory.available_bytes() == 5000 * 1024
    for name, limit in (("jobs/one", "max"), ("jobs", "3000000")):
        folder = tmp_path / "groups" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text("2500000")
        (folder / "memory.stat").write_text("anon 5\ninactive_file 1000000\n")
    assert host_memory.available_bytes() == 1500000
    (tmp_path / "meminfo").unlink()
    assert host_memory.available_bytes() is None
