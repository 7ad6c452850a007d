"""A resume that is exact is said to be, and one that is not is found: a network that counts without saving it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mpt.commands import verify_resume
from mpt.commands.cli.arguments import VerifyResumeArguments
from mpt.errors import GateError

COUNTING = """
from torch import nn

class Counting(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body, self.calls = nn.Sequential(nn.Flatten(), nn.Linear(256, classes)), 0

    def forward(self, images):
        self.calls += 1
        return self.body(images) * (1 + 0.01 * self.calls)

def counting(num_classes): return Counting(num_classes)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "counting_net.py").write_text(COUNTING)
    for name, model in (("honest", "small_cnn"), ("counting", "counting_net:counting")):
        size: dict[str, Any] = {"image_size": 16} | ({"channels": 1} if ":" in model else {"features": 4})
        config = {"model": {"name": model, **size}, "dataset": "digits", "train": {"batch_size": 16, "epochs": 1}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train here: starting Python takes longer than these trainings."""

    def train(
        file: Path,
        folder: Path,
        name: str,
        arguments: VerifyResumeArguments,
        *,
        stop_after: Any = None,
        resumes: Any = False,
    ) -> None:
        verify_resume.main(verify_resume.command(file, folder, name, stop_after, resumes, arguments.allow)[3:])

    monkeypatch.setattr(verify_resume, "train", train)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("mode", ["fp32", "amp"])
def test_an_exact_resume_is_said_to_be(here: Path, capsys: pytest.CaptureFixture[str], mode: str) -> None:
    verify_resume.run(VerifyResumeArguments("honest.yaml", (f"precision={mode}",), steps=4, json=True))
    told = json.loads(capsys.readouterr().out)
    assert (told["same"], told["stops"], told["files"]["common"]) == (True, ["a stop at step 2"], 4)
    assert told["files"]["checkpoints"][-1]["tensors"] > 20


@pytest.mark.usefixtures("in_process")
def test_a_state_that_no_checkpoint_keeps_is_found(here: Path) -> None:
    with pytest.raises(GateError, match="the training is another one: net/loss at step 3"):
        verify_resume.run(VerifyResumeArguments("counting.yaml", steps=4, allow=("counting_net",)))


@pytest.mark.slow
def test_kills_leave_no_trace(here: Path) -> None:
    words = [sys.executable, "-m", "mpt", "verify-resume", "honest.yaml", "--kill", "--steps", "40"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "resume is exact: a kill at step" in done.stdout
