"""A training that evaluations do not better ends before its last step, and resumes as if never stopped."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpt.commands.train import Command as TrainArguments
from mpt.commands.train import train
from mpt.config.load import load_config
from mpt.config.schema import EarlyStopping
from mpt.engine.state.early_stopping import Rule, Waiting
from mpt.errors import ConfigError
from mpt.report.reading.read_run import read_run
from mpt.run.checkpoints import checkpoint
from mpt.run.records.layout import open_run
from tests.engine import parts
from tests.engine.loop.test_resume import assert_same

CONFIG: dict[str, Any] = {
    "model": {"name": "small_cnn", "features": 4, "image_size": 8, "dropout": 0.2},
    "dataset": "digits",
    "precision": "fp32",
    # gains less than 0.2 of accuracy between evaluations, from the first on
    "optimizer": {"name": "sgd", "lr": 1e-3},
    "name": "run",
}
ARGUMENTS = TrainArguments(config=Path("unused"), quiet=True, no_report=True)


def go(
    runs: Path, patience: int, *, resume: bool = False, stop_after: int | None = None
) -> dict[str, Any]:
    """Train, or go on, and return the state of the newest checkpoint."""
    rule = {"patience": patience, "min_delta": 0.2}
    lengths = {
        "steps": 9,
        "batch_size": 32,
        "log_every": 1,
        "checkpoint_every": 0,
        "evaluate_every": 2,
    }
    config = load_config({**CONFIG, "train": {**lengths, "early_stopping": rule}})
    path = train(
        config, replace(ARGUMENTS, runs=str(runs), resume="auto" if resume else None), stop_after
    )
    assert path == runs / "run"
    return checkpoint.load(open_run(path)).state


def test_a_run_ends_where_evaluations_got_no_better_wherever_it_was_stopped_before(
    tmp_path: Path,
) -> None:
    straight = go(tmp_path / "straight", 2)
    assert straight["loop"]["step"] == 6
    record = read_run(tmp_path / "straight" / "run")
    assert record.is_finished
    assert (
        "at step 2, and no better by more than 0.2 in 2 evaluations since"
        in record.summary["stopped_early"]
    )
    assert [event["kind"] for event in record.events].count("stopped_early") == 1

    runs = tmp_path / "resumed"
    go(runs, 2, stop_after=5)  # between the second evaluation and the third, which ends it
    resumed = go(runs, 2, resume=True)
    assert_same(straight["modules"], resumed["modules"])
    assert straight["loop"]["waiting"] == resumed["loop"]["waiting"]

    assert go(runs, 2, resume=True)["loop"]["step"] == 6  # complete: nothing is trained
    assert_same(go(runs, 3, resume=True)["modules"], go(tmp_path / "patient", 3)["modules"])
    assert json.loads((runs / "run" / "summary.json").read_text())["steps"] == 8


@pytest.mark.parametrize(
    ("mode", "losses"), [("min", (1.0, 0.6, math.nan, 0.4)), ("max", (1.0, 1.4, math.nan, 1.6))]
)
def test_only_what_is_better_by_the_least_difference_counts(
    mode: Any, losses: tuple[float, ...]
) -> None:
    rule = Rule(EarlyStopping(metric="loss", mode=mode, min_delta=0.5), parts.classifier().task)
    waiting, waited = Waiting(), []
    for step, loss in enumerate(losses):
        rule.observe(waiting, {"loss": loss}, step)
        waited.append(waiting.evaluations)
    assert waited == [0, 1, 2, 0]
    assert (waiting.best, waiting.best_step) == (losses[-1], 3)


@pytest.mark.parametrize(("least", "losses"), [(0.0, (1.0, 1.0, 1.0)), (0.5, (1.0, 0.5, 0.5))])
def test_a_figure_that_is_equal_or_better_by_just_the_least_difference_is_no_better(
    least: float, losses: tuple[float, ...]
) -> None:
    rule = Rule(
        EarlyStopping(metric="loss", mode="min", min_delta=least, patience=2),
        parts.classifier().task,
    )
    waiting, is_over = Waiting(), []
    for step, loss in enumerate(losses):
        rule.observe(waiting, {"loss": loss}, step)
        is_over.append(rule.is_over(waiting))
    assert is_over == [False, False, True]
    assert (waiting.best, waiting.best_step, waiting.evaluations) == (1.0, 0, 2)


def test_settings_that_cannot_stop_anything_are_refused() -> None:
    task = parts.classifier().task
    with pytest.raises(
        ConfigError, match=r"auto knows the direction of accuracy alone; say whether loss"
    ):
        Rule(EarlyStopping(metric="loss"), task)
    with pytest.raises(ConfigError, match=r"has no 'acuracy'; did you mean accuracy\?"):
        Rule(EarlyStopping(metric="acuracy", mode="max"), task).observe(
            Waiting(), {"accuracy": 0.5}, 1
        )
    with pytest.raises(ConfigError, match=r"found train\.evaluate_every 0"):
        load_config({"model": "small_cnn", "train": {"early_stopping": {}, "evaluate_every": 0}})
    with pytest.raises(ConfigError, match=r"unknown key 'pat'.* allowed: metric, patience"):
        load_config({"model": "small_cnn", "train": {"early_stopping": {"pat": 3}}})
