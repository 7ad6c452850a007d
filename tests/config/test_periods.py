"""Periods in steps and in epochs."""

import pytest

from mpt.config.load import load_config
from mpt.config.periods import in_steps
from mpt.errors import ConfigError

CONFIG = {"model": {"name": "small_cnn"}}


@pytest.mark.parametrize(
    ("written", "steps"),
    [
        (200, 200),
        (0, 0),
        ("1 epoch", 22),
        ("2 epochs", 44),
        ("0.5 epochs", 11),
        ("2.5epochs", 55),
        ("150 steps", 150),
        ("1 step", 1),
        ("0 epochs", 0),
        ("0.001 epochs", 1),
    ],
)
def test_a_period_is_steps_or_epochs_of_the_training_data(written: int | str, steps: int) -> None:
    train = load_config({**CONFIG, "train": {"steps": 440, "evaluate_every": written}}).train
    assert in_steps(train.evaluate_every, 440, 22, has_epochs=False) == steps


@pytest.mark.parametrize(
    ("total", "has_epochs", "steps"),
    [
        (440, True, 22),
        (22, True, 0),  # one epoch: the evaluation at the end is the one
        (22 * 100, True, 22),
        (22 * 1000, True, 220),  # 100 times at most
        (440, False, 44),
        (30, False, 10),
        (10, False, 0),
        (1_000_003, False, 100_001),
    ],
)
def test_by_default_it_is_an_epoch_and_a_tenth_of_a_run_without_epochs(
    total: int, has_epochs: bool, steps: int
) -> None:
    assert in_steps("auto", total, 22, has_epochs) == steps


@pytest.mark.parametrize(
    "wrong", ["1", "epoch", "1 epohc", "1.5 steps", "-1 epochs", "1e9 epochs", "1 epoch 2"]
)
def test_other_text_is_refused_with_what_a_period_is(wrong: str) -> None:
    with pytest.raises(
        ConfigError, match=r"checkpoint_every: a period is a number of steps \(200\), of epochs"
    ):
        load_config({**CONFIG, "train": {"checkpoint_every": wrong}})


def test_values_of_other_types_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="evaluate_every: found -1; allowed: a number not below 0"
    ):
        load_config({**CONFIG, "train": {"evaluate_every": -1}})
    with pytest.raises(
        ConfigError, match=r"sample_every: found 1\.5; allowed: a whole number or text"
    ):
        load_config({**CONFIG, "train": {"sample_every": 1.5}})


def test_a_period_comes_back_from_the_file_that_a_run_keeps() -> None:
    config = load_config({**CONFIG, "train": {"evaluate_every": "1 epoch", "sample_every": 20}})
    assert load_config(config.to_yaml()).train == config.train
    assert config.train.checkpoint_every == 200
