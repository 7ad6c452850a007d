"""Which systems move what does not fit on a card into system memory."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from mpt.doctor.findings import Section
from mpt.doctor.machine.environment import examine_overflow
from mpt.run.process import operating_system

pytestmark = pytest.mark.tier("fast")


@pytest.mark.parametrize(
    ("platform", "release", "moves", "advice"),
    [
        ("linux", "6.8.0-45-generic", False, ""),
        (
            "linux",
            "5.15.167.4-microsoft-standard-WSL2",
            True,
            "the driver's setting does not reach WSL",
        ),
        ("win32", "11", True, "CUDA - Sysmem Fallback Policy"),
    ],
)
def test_windows_and_its_linux_move_and_the_doctor_names_it(
    platform: str, release: str, moves: bool, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    assert operating_system.moves_overflow() == moves
    section = Section("environment")
    examine_overflow(section, "cuda:0: a card")
    (found,) = section.findings
    assert found.level == ("note" if moves else "ok")
    assert advice in found.advice
