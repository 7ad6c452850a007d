"""Generated programs of pickle operations run far, and what a reader does wrong with one is noticed."""

from __future__ import annotations

import pickletools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.faults import fault_battery_pickles as pickles
from scripts.faults.fault_battery_process import call


def test_most_programs_are_programs_and_many_share_what_they_remember() -> None:
    generator, whole, shared = random.Random(0), 0, 0
    for _ in range(100):
        try:
            names = [
                operation.name
                for operation, _, _ in pickletools.genops(pickles.program_of(generator))
            ]
        except ValueError:
            continue
        whole += names[-1] == "STOP"
        shared += names.count("BINGET") > 2
    assert whole > 60
    assert shared > 20


@pytest.mark.parametrize(
    ("reader", "said"),
    [
        (lambda path: exec("1"), "exec"),
        (lambda path: {"weight": torch.zeros(1 << 20)}, "a tensor of 4194304 bytes"),
    ],
    ids=["executes", "allocates"],
)
def test_a_reader_that_breaks_a_promise_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Callable[[Path], Any], said: str
) -> None:
    monkeypatch.setattr(pickles, "load_weights_file", lambda path: reader(path) or {})
    ended = call(
        lambda: pickles.read_programs(tmp_path, 0), tmp_path / "read.log", streams=lambda: None
    )
    assert ended.code == 1
    assert said in ended.text
    assert not Path(pickles.COMMAND.split()[1]).exists()
