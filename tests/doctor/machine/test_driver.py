"""Why torch sees no card: what the doctor says of wheels, drivers and cards that are hidden."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mpt.doctor.findings import Finding, Section
from mpt.doctor.machine import driver

OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs)\nGCC version:\n"
OLD_MODULE = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.256.02  Thu May  2 14:37:44 UTC 2024\n"
)
TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update ..."
NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU ..."


def findings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: str | None, says: str, module: str = ""
) -> list[Finding]:
    """Look at a machine whose torch is built for `cuda` and answers `says` when it is to begin."""
    file = tmp_path / "version"
    if module:
        file.write_text(module)

    def init() -> None:
        if says:
            raise RuntimeError(says)

    monkeypatch.setattr(driver, "VERSION_FILE", file)
    monkeypatch.setattr(driver.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    section = Section("environment")
    driver.examine_visibility(section)
    return section.findings


@pytest.mark.parametrize(
    ("cuda", "says", "module", "level", "words"),
    [
        (
            "13.0",
            TOO_OLD,
            OLD_MODULE,
            "fault",
            "driver 470.256.02, which serves CUDA 11.4, is too old for this",
        ),
        ("13.0", NO_DRIVER, "", "warning", "no driver is loaded"),
        (
            "13.0",
            "CUDA unknown error",
            OPEN_MODULE,
            "fault",
            "a driver 580.95.05 is loaded, but torch sees no card: ",
        ),
        (None, "", OPEN_MODULE, "warning", "driver 580.95.05, but this torch is built for CPUs"),
    ],
)
def test_what_keeps_torch_from_a_card_is_said_with_what_to_do(
    cuda: str | None,
    says: str,
    module: str,
    level: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (found,) = findings(monkeypatch, tmp_path, cuda, says, module)
    assert found.level == level
    assert words in found.text
    assert "docs/how-to/gpu.md" in found.advice


def test_a_variable_that_hides_all_cards_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    (found,) = findings(monkeypatch, tmp_path, "13.0", "No CUDA GPUs are available", OPEN_MODULE)
    assert found.level == "warning"
    assert "CUDA_VISIBLE_DEVICES='7'" in found.text
    (other,) = findings(monkeypatch, tmp_path, "13.0", "CUDA unknown error", OPEN_MODULE)
    assert other.level == "fault"
    assert "CUDA_VISIBLE_DEVICES" not in other.text


def test_a_wheel_for_cpus_on_a_machine_without_a_card_is_nothing_to_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not findings(monkeypatch, tmp_path, None, "")
