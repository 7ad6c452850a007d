"""`mpt doctor FILE.py:FUNCTION`: faults of precision in training steps that know nothing of mpt."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mpt
from mpt.commands import doctor
from mpt.commands.doctor import Command
from mpt.doctor.findings import Section
from mpt.doctor.own.arithmetic import Arithmetic
from mpt.doctor.own.loss_scales import largest_finite
from mpt.doctor.own.numerics import describe_own
from mpt.doctor.own.step import OwnSubject, Taken, take
from mpt.errors import ConfigError, NonFiniteError
from mpt.planner.facts.gpus import DEFAULT, find_gpu
from mpt.planner.own.execution.source import Source
from tests.doctor.own import strange_steps
from tests.programs import run_mpt

STEPS = Path(strange_steps.__file__)
CPU = torch.device("cpu")


def subject(name: str) -> OwnSubject:
    return OwnSubject(Source(str(STEPS), name, str(STEPS.parent)), {}, CPU, find_gpu(DEFAULT))


def line_with(text: str) -> int:
    """Return the number of the one line of the steps' file that has a text."""
    (number,) = (
        number
        for number, line in enumerate(STEPS.read_text("utf-8").splitlines(), 1)
        if text in line
    )
    return number


POOR = line_with("1e-8")


def said(section: Section, level: str) -> list[str]:
    return [
        f"{one.about}: {one.text} {one.advice}".strip()
        for one in section.findings
        if one.level == level
    ]


@pytest.mark.parametrize("name", ["healthy", "recomputed", "on_cards", "on_a_numbered_card"])
def test_a_step_without_faults_has_none(name: str) -> None:
    section = describe_own(subject(name))
    assert section.worst in ("ok", "note")
    assert re.match(
        "phase (net|module): autocast in float16, loss scale [0-9]+: gradients are off by",
        said(section, "ok")[0],
    )


@pytest.mark.parametrize(
    ("name", "fault", "cure"),
    [
        ("poor_logarithm", rf"log in float32 \(strange_steps.py:{POOR}\)", r"write logaddexp\(logsigmoid\(x\)"),
        ("overflowing", r"net.first: addmm in float16 \(strange_steps.py:2", "net.first: call it within torch"),
        ("unscaled", "gradient of net.first.weight is wrong by 100%", r"scaler.scale\(loss\).backward\(\)"),
        ("masked", "it raises .*cannot be converted .* strange_steps.py:[0-9]+", "the loss outside of torch.autocast"),
    ],
)  # fmt: skip
def test_a_fault_is_named_by_its_line_and_the_lines_that_cure_it_were_tried(
    name: str, fault: str, cure: str
) -> None:
    section = describe_own(subject(name))
    assert re.search(fault, said(section, "fault")[0])
    lines = [row["line"] for row in section.tables["lines"]]
    assert len(lines) == 1
    assert re.search(cure, lines[0])


@pytest.mark.parametrize("name", ["poor_logarithm", "overflowing", "unscaled", "masked"])
def test_a_step_into_which_its_cure_was_written_has_no_fault(name: str) -> None:
    section = describe_own(subject(f"{name}_cured"))
    assert said(section, "fault") + said(section, "warning") == []


@pytest.mark.parametrize("name", ["in_float32", "in_float32_with_a_look_at_half"])
def test_a_step_in_float32_is_tried_with_autocast_and_not_blamed(name: str) -> None:
    section = describe_own(subject(name))
    assert (
        said(section, "note")[0]
        == "precision: the script computes in float32; float16 was tried with autocast added"
    )
    assert section.worst in ("ok", "note")
    assert section.tables["lines"][0]["line"].startswith(
        'with torch.autocast("cuda", torch.float16)'
    )


def test_a_network_that_has_two_names_is_scaled_once() -> None:
    assert describe_own(subject("known_twice")).worst in ("ok", "note")


def test_places_and_labels_that_are_floats_are_not_moved_by_rounding() -> None:
    one = subject("whole_numbers_as_floats")
    steps = [take(one, Arithmetic(torch.float32, moved=moved)) for moved in (0.0, 2.0**-12)]
    losses = [list(step.phases["net"].losses.values()) for step in steps]
    assert losses[1] == [pytest.approx(losses[0][0], rel=2e-3)]
    assert losses[0] != losses[1]


def test_a_doctor_at_work_names_its_steps_on_a_terminal_and_is_silent_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor.run(Command(f"{STEPS}:healthy", only=("numerics",)))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    doctor.run(Command(f"{STEPS}:healthy", only=("numerics",)))
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r" +[0-9]+ s  step 1, float32", lines[1])
    assert lines[-1].endswith("float32, weights and inputs moved by rounding")
    assert 4 < len(lines) < 9
    doctor.run(Command(f"{STEPS}:healthy", only=("numerics",), json=True))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("true", "first", "highest", "tried"),
    [
        (16, 16, 16, [16]),
        (8, 8, 16, [8, 9]),
        (8, 11, 16, [11, 10, 8, 9]),
        (16, 8, 16, [8, 9, 11, 15, 16]),
        (-8, -8, 16, [-8, -7]),
        (-99, 3, 4, [3, 2, 0, -4, -8]),
    ],
)
def test_the_largest_loss_scale_that_is_finite_is_looked_for_around_the_expected_one(
    true: int, first: int, highest: int, tried: list[int]
) -> None:
    asked: list[int] = []

    def is_finite(exponent: int) -> bool:
        asked.append(exponent)
        return exponent <= true

    found = largest_finite(first, highest, is_finite)
    assert (found, asked) == (true if true > -9 else None, tried)


def test_a_script_in_float32_repeats_the_step_to_compare_with_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[Arithmetic] = []

    def noted(subject: OwnSubject, how: Arithmetic, **options: Any) -> Taken:
        taken.append(how)
        return take(subject, how, **options)

    monkeypatch.setattr("mpt.doctor.own.numerics.take", noted)
    describe_own(subject("in_float32"))
    assert [one.describe() for one in taken if one.scale is None] == [
        "float32",
        "as it is",
        "float32, weights and inputs moved by rounding",
    ]


def test_updates_that_half_weights_round_away_are_a_warning() -> None:
    section = describe_own(subject("half_weights"))
    assert any("stay as they are in bfloat16" in text for text in said(section, "warning"))
    assert not any("optimizer.lr" in text for text in said(section, "warning"))


def test_what_half_weights_refuse_is_a_fault() -> None:
    assert (
        "only float32 is known here"
        in said(describe_own(subject("refused_by_half_weights")), "fault")[0]
    )


def test_a_step_that_its_seeds_do_not_repeat_is_not_judged() -> None:
    assert (
        "two float32 steps from the same seeds differ"
        in said(describe_own(subject("unseeded")), "warning")[0]
    )


def test_each_optimizer_ends_a_phase_and_none_sees_anothers_update() -> None:
    taken = take(subject("two_networks"), Arithmetic())
    assert list(taken.phases) == ["judge", "maker"]
    assert set(taken.phases["maker"].gradients) == {"maker.weight", "maker.bias"}
    weights = taken.modules["judge"].weight
    assert taken.moves["judge"]["judge.weight"].abs().max() == pytest.approx(1e-3, rel=1e-2)
    torch.manual_seed(0)  # as the factory began
    torch.nn.Linear(8, 32)
    assert torch.equal(weights, torch.nn.Linear(32, 1).weight)


def test_the_command_prints_a_fault_with_exit_6_and_takes_arguments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(NonFiniteError, match=r"gradient of net.first.weight is wrong"):
        doctor.run(Command(f"{STEPS}:unscaled", only=("numerics",)))
    assert "to write: scaler.scale(loss)" in capsys.readouterr().out
    doctor.run(
        Command(
            f"{STEPS}:healthy", ("batch_size=8",), only=("numerics",), dtype="bfloat16", json=True
        )
    )
    told = json.loads(capsys.readouterr().out)
    assert "autocast in bfloat16" in told["sections"][0]["findings"][0]["text"]
    with pytest.raises(ConfigError, match="it takes batch_size"):
        doctor.run(Command(f"{STEPS}:healthy", ("batch=8",), only=("numerics",)))
    with pytest.raises(
        ConfigError, match="of a training step of your own there are environment, numerics, speed"
    ):
        doctor.run(Command(f"{STEPS}:healthy", only=("data",)))
    with pytest.raises(ConfigError, match=r"strange_steps.py:1[0-9][0-9].*mat1 and mat2"):
        doctor.run(Command(f"{STEPS}:broken", only=("numerics",)))


def test_the_speed_of_a_step_that_wants_a_missing_gpu_is_not_timed() -> None:
    for name in ("healthy", "on_cards"):
        sections = mpt.doctor(f"{STEPS}:{name}", only=["speed"])
        assert "no such device here" in sections[0].findings[0].text


SCRIPT = """
import argparse

import torch
from torch import nn

from strange_steps import {loss}

parser = argparse.ArgumentParser()
parser.add_argument("--amp", action="store_true")
parser.add_argument("--scale", type=float, default=2.0**16)
parser.add_argument("--steps", type=int, default=4)
args = parser.parse_args()
with open("begun.txt", "a") as file:
    file.write("begun")
device = "cuda" if torch.cuda.is_available() else "cpu"
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.AdamW(net.parameters())
scaler = torch.amp.GradScaler(device, init_scale=args.scale, enabled=args.amp)
data = torch.utils.data.TensorDataset(torch.randn(64, 32), torch.randint(0, 10, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, num_workers=1)
for step, (x, labels) in enumerate(loader):
    if step == args.steps:
        break
    optimizer.zero_grad()
    with torch.autocast(device, enabled=args.amp):
        loss = {loss}(net, x.to(device), labels.to(device))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def script_of(folder: Path, loss: str) -> Path:
    path = folder / "train_it.py"
    path.write_text(SCRIPT.format(loss=loss), encoding="utf-8")
    (folder / "strange_steps.py").write_text(STEPS.read_text("utf-8"), encoding="utf-8")
    return path


@pytest.mark.parametrize(("loss", "worst"), [("entropy", "ok"), ("poor_loss", "fault")])
def test_a_whole_script_is_executed_anew_for_each_step(
    loss: str, worst: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = script_of(tmp_path, loss)
    (section,) = mpt.doctor(path.name, words=["--amp"], only=["numerics"])
    assert section.worst == worst
    if worst == "fault":
        (line,) = [row["line"] for row in section.tables["lines"]]
        assert line.startswith("strange_steps.py:")
        assert "logaddexp" in line
    assert not (tmp_path / "begun.txt").exists()  # what it writes is kept apart


def test_what_float16_refuses_is_named_by_the_line_of_the_script_itself(tmp_path: Path) -> None:
    path = script_of(tmp_path, "entropy")
    masked = "net(x.to(device)).masked_fill(labels.to(device)[:, None] > 4, -1e9).softmax(1).mean()"
    text = path.read_text("utf-8").replace("entropy(net, x.to(device), labels.to(device))", masked)
    path.write_text(text, encoding="utf-8")
    (number,) = (n for n, line in enumerate(text.splitlines(), 1) if "masked_fill" in line)
    (section,) = mpt.doctor(str(path), words=["--amp"], only=["numerics"])
    assert f"train_it.py:{number} in <module>" in said(section, "fault")[0]


def test_a_network_that_a_script_records_is_not_asked_for_that(tmp_path: Path) -> None:
    """Loggers record with memory that nothing was written to, and two watched passes are not the same to torch."""
    path = script_of(tmp_path, "entropy")
    made = ".to(device)\noptimizer"
    text = path.read_text("utf-8").replace(
        made,
        ".to(device)\ntorch.jit.trace(net, torch.full((2, 32), torch.inf, device=device))\noptimizer",
    )
    text = text.replace("nn.ReLU()", "nn.BatchNorm1d(64), nn.ReLU()")
    path.write_text(text, encoding="utf-8")
    (section,) = mpt.doctor(str(path), words=["--amp"], only=["numerics"])
    assert section.worst == "ok", said(section, "fault")


def test_a_script_whose_loss_scale_overflows_has_taken_its_step(tmp_path: Path) -> None:
    """Its optimizer does not step then, and it is not waited for."""
    words = ("--amp", "--scale", "1e30")
    source = Source(str(script_of(tmp_path, "entropy")), words=words)
    taken = take(OwnSubject(source, {}, CPU, find_gpu(DEFAULT)), Arithmetic())
    assert [len(step.losses) for step in taken.phases.values()] == [1]
    assert taken.phases["net"].has_overflowed


def test_a_script_is_timed_for_as_long_as_it_trains(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(script_of(tmp_path, "entropy"))
    doctor.run(Command(path, ("--steps", "3"), only=("speed",), device="cpu"))
    assert "optimizer" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="came to its end after no training step"):
        doctor.run(Command(path, ("--steps", "0"), only=("speed",)))
    with pytest.raises(ConfigError, match=r"ends the program: .*--step"):
        doctor.run(Command(path, ("--step", "two"), only=("numerics",)))
    asked = run_mpt("doctor", "train_it.py", "--amp", cwd=tmp_path)
    assert "mpt doctor: --amp is none of its options" in asked.stderr
    assert "mpt doctor train_it.py -- --amp" in asked.stderr
    path = str(script_of(tmp_path, "missing"))
    with pytest.raises(ConfigError, match=r"train_it\.py: ImportError: .*train_it\.py:7"):
        doctor.run(Command(path, only=("numerics",)))
