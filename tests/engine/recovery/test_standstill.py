"""A training whose updates move no weight says so, once, and waits for no device to find out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mpt.cli import main
from mpt.engine.recovery.standstill import Standstill
from mpt.engine.step.step import update
from tests.engine import parts
from tests.engine.parts import classifier


def look(run: Any, steps: int = 1) -> list[str]:
    watch = Standstill(run, log_every=1)
    watch.spacing = 1
    for step in range(steps):
        for phase in run.phases:
            before = watch.before(phase, step)
            if before is not None:
                watch.after(phase, step, before, update(run, phase, parts.batch(step)))
    return watch.take()


@pytest.mark.parametrize(
    "mode", ["fp32", "amp", "O1", "O2", "fp16-pure", "bf16-pure", "bf16-sr", "bf16-kahan"]
)
def test_a_training_that_moves_says_nothing(mode: str) -> None:
    precision = {"mode": mode, **({"init_scale": 16} if mode in ("amp", "O1", "O2") else {})}
    assert look(classifier(precision), 3) == []


def test_updates_that_bfloat16_loses_are_named_with_the_mode_that_keeps_them() -> None:
    run = classifier("bf16-pure", optimizer={"name": "sgd", "lr": 1e-9})
    for weight in run.task.net.parameters():
        weight.detach().fill_(1)  # near zero anything counts
    (said,) = look(run, 3)
    assert said.startswith(
        "net: the update of step 0 was not skipped and moved no weight: updates below half an ulp"
    )
    assert "precision=bf16-sr" in said


def test_a_weight_that_moves_by_one_ulp_counts() -> None:
    run = classifier(optimizer={"name": "sgd", "lr": 1e-6})
    weight = run.task.net.head[3].bias

    def nudge(phase: Any) -> None:
        with torch.no_grad():
            weight[0] = torch.nextafter(weight[0], weight[0] + 1)

    run.precision.optimize = nudge  # type: ignore[method-assign]
    assert look(run) == []
    run.precision.optimize = lambda phase: None  # type: ignore[method-assign]
    assert "does not get them" in look(run)[0]


def test_a_step_that_is_skipped_and_a_rate_of_zero_are_not_looked_at() -> None:
    run = classifier(
        {"mode": "amp", "dtype": "float16", "init_scale": 2.0**40, "max_scale": 2.0**41}
    )
    watch = Standstill(run, log_every=1)
    (phase,) = run.phases
    before = watch.before(phase, 0)
    assert before is not None
    done = update(run, phase, parts.batch())
    assert done.stats.skipped
    watch.after(phase, 0, before, done)
    assert watch.pending == []
    for group in phase.optimizer.param_groups:
        group["lr"] = 0.0
    assert watch.before(phase, 1) is None


def test_the_first_updates_are_looked_at_and_then_some_a_hundred_steps_or_a_line_apart() -> None:
    assert Standstill(classifier(), log_every=10).spacing == 100
    assert Standstill(classifier(), log_every=500).spacing == 500
    run = parts.gan()
    watch, looked = Standstill(run, log_every=4), []
    watch.spacing = 4
    for step in range(9):
        for phase in run.phases:
            before = watch.before(phase, step)
            if before is not None:
                looked.append((phase.name, step))
                watch.after(phase, step, before, update(run, phase, parts.batch(step)))
    names = [phase.name for phase in run.phases]
    assert looked == [(name, step) for step in (0, 4, 8) for name in names]


def test_a_run_says_so_once_and_records_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # underflows
    words = ["optimizer=null", "optimizer.name=sgd", "optimizer.lr=1e-60", "train.steps=6"]
    words += [
        "train.log_every=2",
        "train.epochs=null",
        "train.evaluate_every=0",
        "model.features=4",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["train", "@classify_digits", *words, "--runs", str(tmp_path), "--device", "cpu"])
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    assert (said.out + said.err).replace("\n", " ").count("moved no weight") == 1
    (run,) = tmp_path.iterdir()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "standstill"] == [2]
