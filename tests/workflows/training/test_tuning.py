"""Choosing kernels by measurement: what is tried, what counts as a gain, and the patch. The clock is pretended."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from mpt.commands.planning import plan_tune
from mpt.commands.planning.plan_tune import Command as PlanTuneArguments
from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.step.step import Update
from mpt.errors import ConfigError, InputOutputError, NonFiniteError
from mpt.seams import Batch, Phase, Run, StepStats
from mpt.workflows.training import tuning

CONFIG = """
model: {name: small_cnn, features: 4, image_size: 8}
dataset: digits
precision: fp32
optimizer: {name: adam}
train: {steps: 4, batch_size: 16, device: cpu}
"""
Cost = Callable[[Config], float]
Measure = Callable[..., tuning.Tuning]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Return what tunes with steps whose seconds a function says."""

    def run(cost: Cost, text: str = CONFIG, skips: bool = False) -> tuning.Tuning:
        clock = 0.0

        def take(run: Run, phase: Phase, batch: Batch) -> Update:
            nonlocal clock
            clock += cost(run.config)
            return Update(StepStats(skipped=skips))

        monkeypatch.setattr(tuning, "update", take)
        return tuning.tune(load_config(text), clock=lambda: clock)

    return run


def is_fused(config: Config) -> bool:
    return bool(config.optimizer.settings.model_dump()["fused"])


def factors(config: Config) -> float:
    fused, foreach = (config.optimizer.settings.model_dump()[name] for name in ("fused", "foreach"))
    return (
        (0.8 if fused else 1.0) * (0.9 if foreach else 1.0) * (0.5 if config.memory.tricks else 1.0)
    )


def test_the_best_of_each_kind_is_joined_and_measured_once_more(measure: Measure) -> None:
    found = measure(factors)
    assert [trial.settings for trial in found.trials[:3]] == [
        {"optimizer.fused": True},
        {"optimizer.foreach": True},
        {"memory.channels_last": True},
    ]
    assert found.chosen is found.trials[3]
    assert found.chosen.settings == {"optimizer.fused": True, "memory.channels_last": True}
    assert found.chosen.ratio == pytest.approx(0.4)
    assert found.step_seconds == pytest.approx(1.0)


def test_a_step_has_the_phases_that_a_training_has_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def take(run: Run, phase: Phase, batch: Batch) -> Update:
        taken.append(phase.name)
        return Update(StepStats())

    monkeypatch.setattr(tuning, "update", take)
    config = load_config(CONFIG)
    side = tuning.Side(config, torch.device("cpu"), build_datasets(config)[0].spec, [{}])
    only = side.run.phases[0]
    side.run.phases[:] = [replace(only, name="flow", until=2), replace(only, name="joint", since=2)]
    side.take(4, lambda: 0.0)
    assert taken == ["flow", "flow", "joint", "joint"]


def test_what_is_within_the_noise_is_left_as_it_is(measure: Measure) -> None:
    noise = itertools.cycle((0.7, 1.2, 0.9, 1.1, 0.8, 1.3, 0.75))
    found = measure(lambda config: next(noise))
    assert found.chosen is None
    assert all(trial.low < 1 < trial.high for trial in found.trials)
    assert measure(lambda config: 1.0).chosen is None


def test_a_gain_that_is_gone_when_it_is_measured_again_is_not_taken(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "candidates", lambda config, run: [[{"optimizer.fused": True}]])
    lucky: list[Config] = []

    def cost(config: Config) -> float:
        if is_fused(config) and not any(config is one for one in lucky):
            lucky.append(config)
        return 0.5 if is_fused(config) and config is lucky[0] else 1.0

    found = measure(cost)
    assert [trial.gains for trial in found.trials] == [True, False]
    assert found.chosen is None


def test_what_cannot_be_built_or_stepped_is_said_and_the_rest_is_tried(measure: Measure) -> None:
    def cost(config: Config) -> float:
        if is_fused(config):
            raise RuntimeError("fused is not for this device\nframes")
        if config.optimizer.settings.model_dump()["foreach"]:
            raise ConfigError("refused")
        if config.memory.tricks:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 1.0

    found = measure(cost)
    assert [trial.reason for trial in found.trials] == [
        "fused is not for this device",
        "refused",
        "no memory for it beside the other",
    ]


def test_steps_that_are_all_skipped_are_not_timed(measure: Measure) -> None:
    with pytest.raises(NonFiniteError, match="30 of 30 steps were skipped"):
        measure(factors, skips=True)


@pytest.mark.parametrize(
    ("changes", "device", "expected"),
    [
        (
            (),
            "cuda",
            [
                {"optimizer.fused": True},
                {"optimizer.foreach": False},
                {"memory.channels_last": True},
            ],
        ),
        (
            ("optimizer.fused=false",),
            "cpu",
            [{"optimizer.foreach": True}, {"memory.channels_last": True}],
        ),
        (("optimizer.fused=true", "memory.channels_last=true"), "cpu", []),
        (("optimizer.foreach=true", "memory.channels_last=true"), "cpu", []),
        (("optimizer=lion", "memory.channels_last=true"), "cpu", []),
    ],
)
def test_only_what_the_configuration_leaves_open_is_tried(
    changes: Iterable[str], device: str, expected: list[dict[str, bool]]
) -> None:
    config = load_config(CONFIG, list(changes))
    run = build_run(config, torch.device("cpu"), build_datasets(config)[0].spec)
    found = tuning.candidates(config, replace(run, device=torch.device(device)))
    assert [one for group in found for one in group] == expected


def test_the_command_writes_a_patch_that_trains_and_overwrites_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    measure: Measure,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG)
    Path("tuned.yaml").write_text("mine")
    gaining, plain = measure(factors), measure(lambda config: 1.0)

    def tell(config: Config, on_trial: Callable[[tuning.Trial], None]) -> tuning.Tuning:
        for trial in gaining.trials:
            on_trial(trial)
        return gaining

    monkeypatch.setattr(tuning, "tune", tell)
    plan_tune.run(PlanTuneArguments(Path("c.yaml"), ("seed=1",)))
    said = capsys.readouterr().out
    assert "optimizer.foreach=true           0.900 (0.900 to 0.900) of the time of a step\n" in said
    assert "mpt train c.yaml seed=1 --with tuned-2.yaml" in said
    text = Path("tuned-2.yaml").read_text()
    assert "measured by mpt plan tune on " in text
    assert yaml.safe_load(text) == {"optimizer": {"fused": True}, "memory": {"channels_last": True}}
    assert is_fused(load_config(Path("c.yaml"), patches=[Path("tuned-2.yaml")]))
    assert Path("tuned.yaml").read_text() == "mine"

    run = functools.partial(PlanTuneArguments, config=Path("c.yaml"))
    with pytest.raises(ConfigError, match=r"tuned\.yaml exists"):
        plan_tune.run(run(output="tuned.yaml"))
    with pytest.raises(InputOutputError, match="missing"):
        plan_tune.run(run(output="nowhere/tuned.yaml"))
    monkeypatch.setattr(tuning, "tune", lambda config, on_trial: plain)
    plan_tune.run(run(output="other.yaml"))
    assert "nothing gains" in capsys.readouterr().out
    assert not Path("other.yaml").exists()
