"""Whatever one run's files hold, commands over all runs show the others, and a report of it is written."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest

from mpt.commands import train
from mpt.commands.listing import list_runs
from mpt.commands.train import Command as TrainArguments
from mpt.errors import MptError
from mpt.report.run_page.page import write_report
from mpt.report.runs.all_runs import write_all_runs
from tests.report.conftest import write_run

NASTY: list[Any] = [
    *(math.inf, -math.inf, math.nan, 10**400, -(10**400), 2**70, -1, 1.5, 0, True, None),
    *("NaN", "inf", "x", "", "\x1b[31m", "\ud800", "=1+1", "<b>", "9" * 5000),
    *([], {}, [[1]], [None, "x"], {"a": {}}, {"": None}, {"net": math.inf}, {"loss": [1]}),
]
FILES = ("metrics.jsonl", "events.jsonl", "summary.json", "env.json", "plan.json")


def damage(value: Any, generator: random.Random) -> Any:
    """Return a value with something inside replaced."""
    if isinstance(value, dict) and value and generator.random() < 0.8:
        key = generator.choice(list(value))
        return {**value, key: damage(value[key], generator)}
    if isinstance(value, list) and value and generator.random() < 0.8:
        index = generator.randrange(len(value))
        return [*value[:index], damage(value[index], generator), *value[index + 1 :]]
    return generator.choice(NASTY)


def damage_file(path: Path, generator: random.Random) -> None:
    """Damage a file of JSON, or some lines of one of lines."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    for _ in range(1 if path.suffix == ".json" else 3):
        index = generator.randrange(len(lines))
        lines[index] = json.dumps(damage(json.loads(lines[index]), generator))
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))]
)
def test_commands_over_all_runs_survive_any_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    generator = random.Random(seed)
    write_run(tmp_path / "sound")
    for number in range(60):
        run = write_run(tmp_path / f"run-{number}", steps=5, finished=generator.random() < 0.7)
        (run / "plan.json").write_text(
            json.dumps({"kind": "live tensors", "allocated": 1, "reserved": 2})
        )
        for name in generator.sample(FILES, generator.randint(1, 2)):
            if (run / name).is_file() and (run / name).stat().st_size:
                damage_file(run / name, generator)
    list_runs(tmp_path, as_json=False)
    list_runs(tmp_path, as_json=True)
    write_all_runs(tmp_path)
    said = capsys.readouterr()
    assert "sound" in said.out
    assert "could not be described" not in said.err
    for number in range(0, 60, 5):
        write_report(tmp_path / f"run-{number}")


def test_a_step_beyond_all_numbers_is_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "damaged", finished=False)
    for line in ('{"kind":"train","step":1e999}', '{"kind":"train","step":"NaN","losses":{"x":1}}'):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(line + "\n")
    list_runs(tmp_path, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown[0]["steps"] == 98
    write_all_runs(tmp_path)
    write_report(run)


def test_a_run_whose_name_is_no_utf_8_is_listed_and_linked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = os.fsdecode(b"caf\xe9")
    run = write_run(tmp_path / "first")
    run.rename(tmp_path / name)
    (tmp_path / name / "report.html").write_text("")
    list_runs(tmp_path, as_json=False)
    list_runs(tmp_path, as_json=True)
    assert "caf" in capsys.readouterr().out
    assert 'href="caf%E9/report.html"' in write_all_runs(tmp_path).read_text()
    write_report(tmp_path / name)


def test_a_run_that_cannot_be_described_is_named_and_the_others_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last resort: a defect of ours in one run's row is no reason to show none."""
    from mpt.report.runs import run_rows

    write_run(tmp_path / "sound")
    write_run(tmp_path / "odd")
    honest = run_rows.describe

    def describe(record: Any) -> Any:
        if record.path.name == "odd":
            raise ZeroDivisionError("division by zero")
        return honest(record)

    monkeypatch.setattr(run_rows, "describe", describe)
    list_runs(tmp_path, as_json=False)
    said = capsys.readouterr()
    assert "sound" in said.out
    assert "odd could not be described (ZeroDivisionError: division by zero)" in said.err
    (tmp_path / "sound").rename(tmp_path / "elsewhere")
    monkeypatch.setattr(run_rows, "describe", lambda record: 1 / 0)
    with pytest.raises(MptError):
        write_all_runs(tmp_path)


def test_a_run_with_a_step_beyond_all_numbers_is_resumed(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        "model: {name: small_cnn, image_size: 8}\ndataset: digits\nprecision: fp32\nname: a\n"
        "train: {steps: 2, checkpoint_every: 2, log_every: 1}\n"
    )
    train.run(TrainArguments(config=config, runs=str(tmp_path), quiet=True))
    metrics = tmp_path / "a" / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write(
            '{"kind":"train","step":1e999}\n{"kind":"evaluate","step":1e999,"metrics":{"accuracy":1e999}}\n'
        )
    again = TrainArguments(
        config=config, runs=str(tmp_path), quiet=True, resume="a", overrides=("train.steps=3",)
    )
    train.run(again)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()][-1] == 3
