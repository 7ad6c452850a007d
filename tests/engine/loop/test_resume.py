"""A run that was stopped and resumed equals, bit for bit, the run that was never stopped."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mpt.commands.train import Command as TrainArguments
from mpt.commands.train import train
from mpt.config.load import load_config
from mpt.data import digits
from mpt.engine.loop.saving import conditions
from mpt.report.reading.read_run import read_run
from mpt.run.checkpoints import checkpoint
from mpt.run.checkpoints.retention import list_steps
from mpt.run.records.layout import open_run
from mpt.run.records.recorder import evaluations_of
from mpt.tasks.classify import Classify
from tests.engine import parts

CLASSIFIER = {
    "model": {"name": "small_cnn", "features": 4, "image_size": 8, "dropout": 0.2},
    "task": {"ema": 0.9, "mixup": 0.4, "cutmix": 1.0, "class_weights": {"3": 2}},
    "dataset": {
        "name": "digits",
        "sampling": "balanced",
        "augment": [{"RandomAffine": {"degrees": 10}}],
    },
    "optimizer": {"name": "adam", "lr": 1e-3, "schedule": "cosine"},
}
GAN = {
    "model": {"name": "dcgan", "features": 4, "image_size": 16, "latent_size": 8},
    "task": {"ema": 0.9, "metric_samples": 64},
    "dataset": {"name": "digits"},
    "optimizer": {"name": "adam", "lr": 2e-4},
}
BATCH = 45  # of 180 digits: an epoch is 4 steps


@pytest.fixture(autouse=True)
def _fewer_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train on an eighth of the digits: turning each of them costs more than the networks do."""
    whole = digits.read_digits
    monkeypatch.setattr(
        digits, "read_digits", lambda split: tuple(part[::8] for part in whole(split))
    )


def settings(base: dict[str, Any], precision: Any, **train_settings: Any) -> dict[str, Any]:
    batch = {
        "steps": 9,
        "batch_size": BATCH,
        "log_every": 1,
        "checkpoint_every": 0,
        **train_settings,
    }
    return {**base, "precision": precision, "train": batch, "name": "run"}


def run_training(
    data: dict[str, Any], runs: Path, stops: tuple[int, ...] = ()
) -> tuple[dict[str, Any], list[Any]]:
    """Train with a stop and a resume at each of `stops`; return the final state and the loss records."""
    config = load_config(data)
    arguments = TrainArguments(config=Path("unused"), runs=str(runs), quiet=True)
    for number, stop in enumerate(stops):
        train(config, arguments if number == 0 else resumed(arguments), stop_after=stop)
    path = train(config, resumed(arguments) if stops else arguments)
    assert path is not None
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    record = [
        (line["step"], line["losses"], line["scale"]) for line in lines if line["kind"] == "train"
    ]
    return checkpoint.load(open_run(path)).state, record


def resumed(arguments: TrainArguments) -> TrainArguments:
    return TrainArguments(config=arguments.config, runs=arguments.runs, quiet=True, resume="auto")


def assert_same(one: Any, other: Any, path: str = "") -> None:
    """Compare nested states bit for bit."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            if key not in ("seconds", "memory"):
                assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}[{index}]")
    else:
        assert one == other, path


def check(data: dict[str, Any], tmp_path: Path, stops: tuple[int, ...]) -> None:
    whole, whole_record = run_training(data, tmp_path / "whole")
    parts, parts_record = run_training(data, tmp_path / "parts", stops)
    assert_same(whole, parts)
    assert whole_record == parts_record
    assert [step for step, _, _ in whole_record] == list(
        range(1, (data["train"]["steps"] or 12) + 1)
    )


MODES: list[Any] = [
    "fp32",
    "amp",
    "bf16",
    "O1",
    "O2",
    "O3",
    "bf16-sr",
    {"mode": "bf16-kahan", "accumulate": "float32"},
    {"mode": "fp16-24bit", "init_scale": 16.0},
    {"mode": "amp", "dtype": "float16", "growth_interval": 3},
    {"mode": "O1", "dtype": "float16", "growth_interval": 3},
    {"mode": "O2", "dtype": "float16", "growth_interval": 3},
]


SCALED = [mode for mode in MODES if isinstance(mode, dict)]
"""What keeps a loss scale per optimizer or bits beside the weights: of two optimizers too."""


@pytest.mark.parametrize(
    ("base", "precision"),
    [
        *((CLASSIFIER, mode) for mode in MODES),
        *((GAN, mode) for mode in ("fp32", "bf16-sr", *SCALED)),
    ],
    ids=lambda value: (
        ("gan" if value is GAN else "classifier") if value in (CLASSIFIER, GAN) else str(value)
    ),
)
def test_resume_in_mid_epoch_is_bit_exact_in_every_mode(
    base: dict[str, Any], precision: Any, tmp_path: Path
) -> None:
    check(settings(base, precision), tmp_path, (6,))


@pytest.mark.parametrize(
    "stops", [(4,), (8,), (5, 6)], ids=["end of epoch 1", "end of epoch 2", "twice in one epoch"]
)
def test_resume_is_bit_exact_wherever_it_stops(stops: tuple[int, ...], tmp_path: Path) -> None:
    check(settings(CLASSIFIER, "amp"), tmp_path, stops)


@pytest.mark.parametrize(
    ("workers", "micro_batch"),
    [
        (2, None),
        (0, 25),
        pytest.param(0, None, marks=pytest.mark.slow),
        pytest.param(2, 25, marks=pytest.mark.slow),
    ],
)
def test_resume_is_bit_exact_with_workers_and_accumulation(
    workers: int, micro_batch: int | None, tmp_path: Path
) -> None:
    dataset = {**CLASSIFIER["dataset"], "workers": workers}  # type: ignore[dict-item]
    data = settings(
        {**CLASSIFIER, "dataset": dataset},
        {"mode": "amp", "dtype": "float16", "growth_interval": 2},
    )
    if micro_batch:
        data["memory"] = {"micro_batch": micro_batch}
    check(data, tmp_path, (6,))


def test_log_lines_that_span_a_resume_hold_the_same_means(tmp_path: Path) -> None:
    data = settings(CLASSIFIER, "fp32", log_every=3)
    _, whole = run_training(data, tmp_path / "whole")
    _, parts = run_training(data, tmp_path / "parts", (3,))
    assert whole == parts


def test_another_gpu_is_another_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    run = parts.classifier()
    assert "gpu" not in conditions(run)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert conditions(replace(run, device=torch.device("cuda")))["gpu"] == "NVIDIA H200"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("base", [CLASSIFIER, GAN], ids=["classifier", "gan"])
def test_resume_on_a_gpu_is_bit_exact(base: dict[str, Any], tmp_path: Path) -> None:
    data = settings(
        base,
        {"mode": "amp", "dtype": "float16", "growth_interval": 3},
        device="cuda",
        plan_memory=False,
    )
    check(data, tmp_path, (6,))


def test_periods_in_epochs_are_those_of_the_training_data_and_a_resume_keeps_them(
    tmp_path: Path,
) -> None:
    """An epoch is four steps, and by default each is evaluated."""
    data = settings(CLASSIFIER, "fp32", steps=None, epochs=3, checkpoint_every="2 epochs")
    check(data, tmp_path, (6,))
    whole, parted = (open_run(tmp_path / name / "run") for name in ("whole", "parts"))
    assert [step for step, _ in evaluations_of(whole)] == [4, 8, 12]
    assert evaluations_of(whole) == evaluations_of(parted)
    assert whole.checkpoint_path(8).is_dir()


def test_the_best_evaluation_has_a_checkpoint_and_no_other_figure_is_written_to_one(
    tmp_path: Path,
) -> None:
    """Saved every fourth step and evaluated every third: what the newest evaluation was is not said of step 4."""
    data = settings(CLASSIFIER, "fp32", checkpoint_every=4, evaluate_every=3, keep_last=9)
    config = load_config(data)
    path = train(config, TrainArguments(config=Path("unused"), runs=str(tmp_path), quiet=True))
    assert path is not None
    evaluated = {step: figures["accuracy"] for step, figures in evaluations_of(open_run(path))}
    assert list(evaluated) == [3, 6, 9]
    manifests = [
        json.loads(file.read_text())
        for file in sorted(path.glob("checkpoints/step-*/manifest.json"))
    ]
    saved = {manifest["step"]: manifest["metric"] for manifest in manifests}
    assert saved.keys() >= {3, 4, 8, 9}, "the first evaluation is the best so far"
    assert saved == {step: evaluated.get(step) for step in saved}
    assert max(evaluated.values()) in saved.values()


@pytest.mark.parametrize("failing", [3, 9], ids=["in the middle", "at the end"])
def test_a_step_whose_evaluation_fails_is_saved_and_evaluated_at_the_resume(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = settings(CLASSIFIER, "fp32", evaluate_every=3, early_stopping={"patience": 3})
    whole, _ = run_training(data, tmp_path / "whole")
    conclude, seen = Classify.conclude, []

    def fails_once(task: Classify, evidence: Any) -> dict[str, float]:
        seen.append(evidence)
        if len(seen) * 3 == failing:
            raise KeyError("a figure of somebody's own")
        return conclude(task, evidence)

    monkeypatch.setattr(Classify, "conclude", fails_once)
    with pytest.raises(KeyError):
        run_training(data, tmp_path / "failed")
    assert list_steps(open_run(tmp_path / "failed" / "run"))[-1] == failing
    config, arguments = (
        load_config(data),
        TrainArguments(
            config=Path("unused"), runs=str(tmp_path / "failed"), quiet=True, resume="auto"
        ),
    )
    path = train(config, arguments)
    assert path is not None
    state = checkpoint.load(open_run(path)).state
    for part in ("modules", "optimizers"):
        assert_same(state[part], whole[part])
    for counter in ("best", "best_step", "last_metrics", "waiting", "owed_step"):
        assert state["loop"][counter] == whole["loop"][counter], counter
    assert [step for step, _ in evaluations_of(open_run(path))] == [3, 6, 9]
    assert json.loads((path / "summary.json").read_text())["final"] is not None


def test_a_killed_run_leaves_its_metric_and_the_direction_of_it(tmp_path: Path) -> None:
    run_training(settings(GAN, "fp32", steps=2, evaluate_every=1), tmp_path)
    (tmp_path / "run" / "summary.json").unlink()
    record = read_run(tmp_path / "run")
    assert (record.metric, record.higher_is_better) == ("frechet_distance", False)
    assert record.best == min(line["metrics"]["frechet_distance"] for line in record.evaluations)
