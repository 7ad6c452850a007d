"""A plan's picture and its memory snapshot are whole or absent on a disk that is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from matplotlib import pyplot

from mpt.errors import InputOutputError
from mpt.planner.trace.snapshot import write_snapshot
from mpt.planner.trace.timeline import save_figure


def fill_disk_after(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk take this number of bytes of each file."""
    write = os.write
    written: dict[int, int] = {}

    def write_some(descriptor: int, data: memoryview) -> int:
        room = size - written.get(descriptor, 0)
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = write(descriptor, data[:room])
        written[descriptor] = written.get(descriptor, 0) + taken
        return taken

    monkeypatch.setattr(os, "write", write_some)


def test_neither_leaves_a_part_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk_after(64, monkeypatch)
    with pytest.raises(InputOutputError, match=r"plan\.png could not be written: the disk is full"):
        save_figure(pyplot.figure(), tmp_path / "plan.png")
    with pytest.raises(InputOutputError, match=r"s\.pickle could not be written: the disk is full"):
        write_snapshot(tmp_path / "s.pickle", {"segments": ["a"] * 100})
    assert list(tmp_path.iterdir()) == []
