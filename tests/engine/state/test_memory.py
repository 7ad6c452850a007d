"""The peaks of a GPU's allocator, of the steps and of all else."""

from __future__ import annotations

import pytest
import torch

from mpt import accelerator
from mpt.engine.state.memory import AllocatorPeaks


def test_the_steps_reserve_counts_where_it_goes_beyond_what_something_else_raised_it_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On an H200 a save before the first step had left 382 MiB as the reserve of steps that allocated 5.6 GiB."""
    now = {"allocated": 0, "reserved": 0, "made": 0}

    def work(allocated: int, reserved: int) -> None:
        now.update(allocated=allocated, reserved=max(now["reserved"], reserved))
        now["made"] += 1

    monkeypatch.setattr(accelerator, "has_allocator", lambda device: True)
    monkeypatch.setattr(accelerator, "peaks", lambda device: (now["allocated"], now["reserved"]))
    monkeypatch.setattr(accelerator, "reset_peaks", lambda device: None)
    monkeypatch.setattr(accelerator, "allocations_made", lambda device: now["made"])
    card, peaks = torch.device("xpu"), AllocatorPeaks()
    work(100, 110)  # the networks
    with peaks.beside_steps(card):  # a save
        work(110, 120)
    work(900, 1000)  # steps
    with peaks.beside_steps(card):  # an evaluation
        work(1500, 1600)
    work(900, 1000)
    peaks.count_steps(card)
    assert peaks.to_record(card) == {
        "kind": "xpu",
        "peak_bytes": 1500,
        "reserved_bytes": 1600,
        "steps_peak_bytes": 900,
        "steps_reserved_bytes": 1000,
    }
