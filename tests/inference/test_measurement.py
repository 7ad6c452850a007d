"""What inference costs."""

from dataclasses import replace

import pytest
import torch

from mpt.inference.measurement import measure_peak
from tests.engine import parts


def test_on_a_gpu_the_peak_of_a_run_leaves_out_what_other_runs_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = replace(parts.classifier(), device=torch.device("cuda"))
    held = {"now": 5000, "peak": 5000}
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: held["now"])
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: held["peak"])
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda device: 0)
    net = run.task.modules["net"]
    own = sum(tensor.nbytes for tensor in (*net.parameters(), *net.buffers()))
    assert measure_peak(lambda: held.update(peak=5700), run) == own + 700
