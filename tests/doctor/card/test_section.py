"""`mpt doctor --only device` as a user types it; tests/cuda_rehearsal/test_card_checks.py rehearses its checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mpt.commands import doctor
from mpt.commands.doctor import Command as DoctorArguments
from mpt.doctor.card import section
from mpt.doctor.card.checks import KINDS, check_names
from mpt.errors import NonFiniteError


def test_on_a_cpu_the_file_says_what_could_not_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    doctor.run(DoctorArguments(only=("device",), device="cpu"))
    said = capsys.readouterr().out
    assert "so there is no bus to measure" in said
    assert said.count("not tried: needs a CUDA device") == len(check_names()) - 1
    content = json.loads((tmp_path / "device.json").read_text("utf-8"))
    assert content["machine"]["torch"] == torch.__version__
    assert [row["name"] for row in content["checks"]] == check_names()


def test_every_kind_of_check_is_made_of_a_configuration_of_each_task_or_of_none() -> None:
    names = check_names()
    assert [name.split()[0] for name in names if name.split()[0] in KINDS] == [
        name.split()[0] for name in names
    ]
    tasks = [name.split()[1] for name in names if name.startswith("losses ")]
    assert len(tasks) == len(set(tasks)) > 4
    assert list(dict.fromkeys(name.split()[0] for name in names)) == list(KINDS)


def test_a_second_run_goes_on_and_a_fault_ends_with_6(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known: list[Any] = []

    def run_checks(commands: Any, seconds: float, before: Any, save: Any) -> list[dict[str, Any]]:
        known.append(list(before))
        late = {"name": "nccl", "error": "not reached in time; run this again to go on"}
        rows = [
            {"name": "machine", "said": "fast"},
            {"name": "nan", "said": "x", "wrong": "lost in bf16-sr"},
            late,
        ]
        save(rows)
        return rows

    monkeypatch.setattr(section, "run_checks", run_checks)
    for _ in range(2):
        with pytest.raises(NonFiniteError, match="lost in bf16-sr"):
            doctor.run(
                DoctorArguments(only=("device",), device="cpu", output=str(tmp_path / "card.json"))
            )
        assert "1 checks are left: nccl" in capsys.readouterr().out
    assert known[0] == []
    assert [row["name"] for row in known[1]][:3] == ["machine", "nan", "nccl"]
