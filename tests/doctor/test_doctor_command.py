"""`mpt doctor` as a user types it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mpt.commands import doctor, report, train
from mpt.commands.doctor import Command as DoctorArguments
from mpt.commands.report import Command as ReportArguments
from mpt.commands.train import Command as TrainArguments
from mpt.config.load import load_config
from mpt.doctor.findings import Section
from mpt.doctor.machine.environment import try_dtype
from mpt.doctor.measuring.instrument import observed
from mpt.doctor.numerics.numerics_section import note_small_gradients
from mpt.doctor.numerics.numerics_tables import exponents_of
from mpt.errors import ConfigError, NonFiniteError
from mpt.report.run_page.numerics_map import map_numerics
from mpt.workflows.examining.examination import BEGINNING, Wish, examine_parts

BAD: dict[str, Any] = {
    "model": {
        "name": "scripts.doctor.planted_faults:plant_log_of_tiny",
        "image_size": 16,
        "channels": 1,
    },
    "dataset": "digits",
    "train": {"steps": 2, "batch_size": 16},
}


@pytest.fixture
def bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(BAD))
    return path


def test_a_fault_ends_with_6_and_the_patch_that_is_written_cures_it(
    bad: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = DoctorArguments(
        subject=str(bad), only=("numerics",), allow=("scripts",), page="page.html"
    )
    with pytest.raises(NonFiniteError, match="net/loss is nan in float16"):
        doctor.run(asked)
    said = capsys.readouterr().out
    assert "net.planted: sigmoid in float16 (planted_faults.py:" in said
    assert "write logaddexp(logsigmoid(x), log(1e-08)) instead of log(sigmoid(x) + 1e-08)" in said
    assert load_config(
        bad, patches=[Path("doctor.yaml")], allow=["scripts"]
    ).precision.settings.stable_forms == ["log"]
    page = Path("page.html").read_text()
    assert "net.planted" in page
    assert page.count("<script") == 1  # of our own
    doctor.run(
        DoctorArguments(
            str(bad), only=("numerics",), allow=("scripts",), patches=(Path("doctor.yaml"),)
        )
    )
    assert "from before" not in capsys.readouterr().out
    for name, is_said in (("numerics", True), ("data", False)):
        doctor.conclude(DoctorArguments("another.yaml"), "another.yaml", [Section(name)], [])
        assert ("doctor.yaml here is from before" in capsys.readouterr().out) == is_said


def test_data_and_speed_are_examined_and_told_as_json(
    bad: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor.run(DoctorArguments(str(bad), only=("data", "speed"), allow=("scripts",), json=True))
    told = json.loads(capsys.readouterr().out)
    data, speed = told["sections"]
    assert {row["set"] for row in data["tables"]["classes"]} == {"train", "test"}
    assert data["worst"] in ("ok", "note")
    assert {row["part"] for row in speed["tables"]["step"]} >= {
        "data",
        "forward",
        "backward",
        "optimizer",
    }


def test_a_shipped_configuration_is_examined_by_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    doctor.run(DoctorArguments("@classify_digits", only=("data",)))
    assert "train: looked at all 1437 samples" in capsys.readouterr().out


def test_without_a_subject_the_machine_is_examined(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.run(DoctorArguments())
    assert "processor" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (DoctorArguments(only=("heart",)), "'heart'.*environment"),
        (DoctorArguments(only=("numerics",)), "name a configuration or a run"),
    ],
)
def test_bad_words_are_answered(asked: DoctorArguments, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        doctor.run(asked)


def test_a_card_is_believed_only_after_it_computed() -> None:
    import torch

    assert try_dtype(torch.device("cpu"), torch.float32, 2) == ""
    assert try_dtype(torch.device("cpu"), torch.bfloat16, 2) == ""
    assert try_dtype(torch.device("meta"), torch.float32, 2)


def test_a_run_is_examined_at_several_points_and_its_report_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {
        "steps": 8,
        "batch_size": 16,
        "checkpoint_every": 2,
        "keep_last": 9,
        "plan_memory": False,
    }
    model = {"name": "small_cnn", "image_size": 16, "features": 4}
    Path("c.yaml").write_text(
        yaml.safe_dump({"model": model, "dataset": "digits", "precision": "amp", "train": settings})
    )
    train.run(TrainArguments(Path("c.yaml"), name="seen", quiet=True))
    doctor.run(DoctorArguments("seen", only=("numerics",), points=3, page="page.html"))
    said = capsys.readouterr().out
    assert re.findall(r"phase net, step (\d+): amp in float16", said) == ["0", "4", "8"]
    report.run(ReportArguments("seen"))
    for page in (Path("page.html").read_text(), Path("runs/seen/report.html").read_text()):
        assert "at steps\n0, 4, 8" in page
        assert "net.stages.0.0" in page
        assert "Powers of two of all values" in page
    assert (
        map_numerics(
            [{"module": "net", "step": "x", "forward_headroom_bits": None}, {}], [{"shares": 3}]
        )
        is not None
    )
    Path("runs/seen/doctor.json").write_text('{"sections": [3, {"tables": {"ranges": 7}}]}')
    report.run(ReportArguments("seen"))
    assert "Powers of two" not in Path("runs/seen/report.html").read_text()


def test_the_histogram_weighs_each_result_by_its_size_and_leaves_zeros_out() -> None:
    net = torch.nn.Identity()
    with observed({"net": net}) as seen:
        torch.full((3000,), 1.5) * 2.0  # 3000 values of 2^1
        torch.full((1000,), 0.0) * 1.0
        torch.full((1000,), 0.25) * 1.0
    (forward, gradient) = exponents_of("p", 0, seen.results, 1.0)
    assert forward["shares"] == {"-2": 0.25, "1": 0.75}
    assert gradient["shares"] == {}


def test_a_model_that_raises_leaves_the_other_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = {"name": "scripts.doctor.planted_faults:raises_always", "image_size": 16, "channels": 1}
    Path("c.yaml").write_text(
        yaml.safe_dump(
            {"model": model, "dataset": "digits", "train": {"steps": 1, "batch_size": 8}}
        )
    )
    with pytest.raises(NonFiniteError, match="2 faults, first numerics: could not be examined"):
        doctor.run(DoctorArguments("c.yaml", allow=("scripts",)))
    said = capsys.readouterr().out
    assert re.search(r"^data \(", said, re.MULTILINE)
    assert re.search(r"FAULT numerics: could not be examined: .*shapes cannot be multiplied", said)
    assert "--only numerics` says more" in said


def test_modules_whose_gradients_are_too_small_for_one_cause_are_one_line() -> None:
    section = Section("numerics")
    note_small_gradients(section, "phase net", {"net.a": 0.42, "net.b": 0.44, "net.c": 0.43})
    (finding,) = section.findings
    assert (
        finding.text
        == "42% to 44% of the gradients in 3 modules (net.a, net.b, net.c) are too small for float16"
    )


def test_the_speed_of_a_step_that_raises_in_half_alone_is_that_of_its_cure() -> None:
    config = load_config(
        {
            "model": {
                "name": "scripts.doctor.planted_faults:plant_masked_beyond_half",
                "image_size": 16,
                "channels": 1,
            },
            "dataset": "digits",
            "precision": {"mode": "amp", "dtype": "float16"},
            "train": {"steps": 1, "batch_size": 8},
        },
        allow=["scripts"],
    )
    numerics, speed = examine_parts(["numerics", "speed"], Wish(), config, [BEGINNING])
    assert (numerics.worst, speed.worst) == ("fault", "note")
    assert any("for 8 samples" in one.text for one in speed.findings)
    assert "measured with the cure of the numerics: the step raises without it" in [
        one.text for one in speed.findings
    ]
