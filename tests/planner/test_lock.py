"""`mpt plan lock` keeps a plan, and `mpt plan check` fails, with one line, where it has grown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mpt.commands import plan
from mpt.commands.plan import Command as PlanArguments
from mpt.commands.planning import plan_check, plan_lock, plan_step
from mpt.commands.planning.plan_check import Command as PlanCheckArguments
from mpt.commands.planning.plan_lock import Command as PlanLockArguments
from mpt.commands.planning.plan_step import Command as PlanStepArguments
from mpt.errors import ConfigError, GateError, InputOutputError
from mpt.planner.client.session import Session
from mpt.planner.recipes import own_step, planned
from mpt.workflows import plan_lock as lock
from tests.planner.test_command import Shared, arguments

__all__ = ["arguments"]  # a fixture


@pytest.fixture
def locked(
    arguments: PlanArguments, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[PlanCheckArguments, Path]:
    """Return arguments that check a lock of the test's configuration, and the lock."""
    monkeypatch.setattr(lock, "Session", Shared(session))
    path = tmp_path / "plan.lock"
    plan_lock.run(
        PlanLockArguments(arguments.config, allow=("tests",), gpu="rtx2060", output=str(path))
    )
    return PlanCheckArguments(path, allow=("tests",)), path


def test_a_lock_holds_until_the_configuration_grows(
    locked: tuple[PlanCheckArguments, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    check, path = locked
    assert json.loads(path.read_text())["gpu"] == "rtx2060"
    plan_check.run(check)
    said = capsys.readouterr().out
    assert "(+0.0%)" in said
    assert "within 1 %" in said
    config = Path(json.loads(path.read_text())["config"])
    config.write_text(config.read_text().replace("batch_size: 256", "batch_size: 288"))
    with pytest.raises(
        GateError,
        match=r"the peak rose from .* MiB \(\+.*%\): activations \+.* MiB, in net \+[\d.]+ MiB;",
    ) as error:
        plan_check.run(check)
    assert "the step slowed from" in str(error.value)
    assert "\n" not in str(error.value)
    assert f"To accept it: mpt plan lock {config} --gpu rtx2060 --output {path}" in str(error.value)
    plan_check.run(replace(check, tolerance="20%"))
    config.write_text(config.read_text().replace("batch_size: 288", "batch_size: 64"))
    plan_check.run(replace(check, json=True))
    told = json.loads(capsys.readouterr().out.partition("{")[2].join(["{", ""]))
    assert told["after"]["peak_bytes"] < told["before"]["peak_bytes"]
    assert told["grown"] == []


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_planned(
    arguments: PlanArguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (lock, planned, own_step):
        monkeypatch.setattr(module, "Session", None)
    nowhere = str(tmp_path / "missing" / "file")
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    for command in (
        lambda: plan_lock.run(
            PlanLockArguments(arguments.config, allow=("tests",), output=nowhere)
        ),
        lambda: plan_lock.run(
            PlanLockArguments(arguments.config, allow=("tests",), output="/dev/null")
        ),
        lambda: plan.run(replace(arguments, output=None, snapshot=nowhere)),
        lambda: plan_step.run(PlanStepArguments(str(script), snapshot=nowhere)),
    ):
        with pytest.raises(InputOutputError, match="cannot be written"):
            command()


def test_growth_that_the_context_hides_is_named(locked: tuple[PlanCheckArguments, Path]) -> None:
    check, path = locked
    values = json.loads(path.read_text())
    values["peak_bytes"] *= 2
    values["by_category"]["activations"] //= 2
    path.write_text(json.dumps(values))
    with pytest.raises(
        GateError, match=r"^what tensors take of the peak rose from .* \(\+.*%\): activations \+"
    ):
        plan_check.run(check)


def test_another_version_of_torch_is_named_where_a_plan_grew(
    locked: tuple[PlanCheckArguments, Path],
) -> None:
    check, path = locked
    values = json.loads(path.read_text())
    values["versions"]["torch"] = "1.0"
    values["step_seconds"] *= 0.9
    path.write_text(json.dumps(values))
    with pytest.raises(
        GateError, match=r"the step slowed from .* \(\+11.1%\) \(torch is .* and was 1.0\)"
    ):
        plan_check.run(check)


def test_what_is_no_lock_is_said(tmp_path: Path, locked: tuple[PlanCheckArguments, Path]) -> None:
    check, path = locked
    with pytest.raises(InputOutputError, match="cannot be read"):
        plan_check.run(replace(check, lock=tmp_path / "none"))
    for text in (
        "no json",
        "[]",
        "{}",
        json.dumps({**json.loads(path.read_text()), "peak_bytes": -1}),
    ):
        (tmp_path / "bad.lock").write_text(text)
        with pytest.raises(ConfigError, match="is no lock"):
            plan_check.run(replace(check, lock=tmp_path / "bad.lock"))
    for wrong in ({"tolerance": "much"}, {"tolerance": "5"}, {"gpu": "rtx3090"}):
        with pytest.raises(ConfigError):
            plan_check.run(replace(check, **wrong))  # type: ignore[arg-type]


SCRIPT = """
import sys
import torch
width = int(sys.argv[2])
net = torch.nn.Linear(width, width, device="cuda")
optimizer = torch.optim.SGD(net.parameters())
while True:
    optimizer.zero_grad()
    net(torch.zeros(4, width, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_a_script_is_locked_with_its_words(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_step, "Session", Shared(session))
    script, path = tmp_path / "train.py", tmp_path / "plan.lock"
    script.write_text(SCRIPT)
    words = ("--width", "1000")
    plan_lock.run(PlanLockArguments(script, words, gpu="rtx2060", output=str(path)))
    plan_check.run(PlanCheckArguments(path))
    script.write_text(SCRIPT.replace("[2])", "[2]) * 2"))
    with pytest.raises(GateError, match="parameters") as error:
        plan_check.run(PlanCheckArguments(path))
    again = f"mpt plan lock {script} --gpu rtx2060 --output {path} -- --width 1000"
    assert str(error.value).endswith(f"To accept it: {again}")
    with pytest.raises(ConfigError, match=r"train\.py is no configuration"):
        plan_lock.run(PlanLockArguments(script, words, (Path("plan.yaml"),), output=str(path)))
