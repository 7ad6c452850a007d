"""What goes wrong on one rank makes all ranks act alike, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mpt.commands.train import Command as TrainArguments
from mpt.commands.train import run as train
from mpt.config.load import load_config
from mpt.engine.loop.training import Training
from mpt.engine.step import step as engine_step
from mpt.errors import Terminated
from mpt.parallel.ranks import code_of
from mpt.parallel.start import joined
from mpt.run.checkpoints import checkpoint
from mpt.run.checkpoints.state_checks import first_non_finite
from mpt.run.process.signals import terminated_cleanly
from mpt.run.records.layout import open_run
from mpt.run.records.recorder import evaluations_of, read_lines
from mpt.tasks.classify import Classify

from .forked import run_ranks

CONFIG = """
model: {name: small_cnn, features: 4, image_size: 16}
dataset: {name: digits}
precision: PRECISION
optimizer: {name: sgd, lr: 0.01}
train: {steps: 8, batch_size: 10, checkpoint_every: 3, log_every: 2}
parallel: {timeout: 20}
memory: {on_oom: adapt}
"""
FRAGILE = """
model: {name: "tests.engine.recovery.test_recovery:fragile", image_size: 16, channels: 1}
dataset: {name: digits}
precision: {mode: amp, dtype: float16, init_scale: 4.0, min_scale: 2.0, auto_keep_fp32: true}
optimizer: {name: sgd, lr: 1.0e-6}
train: {steps: 8, batch_size: 12}
"""
FAULT_STEP = 4
EITHER = pytest.mark.parametrize("faulty", [pytest.param(0, marks=pytest.mark.slow), 1])


class Broken(Exception):
    """A mistake of the program."""


@contextlib.contextmanager
def failing(kind: str) -> Iterator[None]:
    """Let one forward of the fifth step fail on this rank."""
    original, calls = engine_step.losses_of, [0]

    def losses_of(run: Any, phase: Any, part: Any, figures: Any = None) -> Iterator[Any]:
        calls[0] += 1
        for together in original(run, phase, part, figures):
            if calls[0] == FAULT_STEP + 1:
                calls[0] += 1
                if kind == "memory":
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
                if kind == "error":
                    raise Broken("a mistake of the program")
                if kind == "signal":
                    os.kill(os.getpid(), signal.SIGTERM)
                if kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if kind == "hang":
                    time.sleep(1000)
                if kind in ("inf", "nan"):
                    together = tuple(
                        loss._replace(value=loss.value * float(kind)) for loss in together
                    )
            yield together

    engine_step.losses_of = losses_of
    try:
        yield
    finally:
        engine_step.losses_of = original


def on_rank(rank: int, folder: Path, faulty: int, kind: str, options: dict[str, Any]) -> str:
    arguments = TrainArguments(
        config=folder / "c.yaml", runs=str(folder / "runs"), name="r", quiet=True, **options
    )
    with failing(kind) if rank == faulty else contextlib.nullcontext():
        train(arguments)
    return "done"


def injected(
    folder: Path, faulty: int, kind: str, precision: str = "fp32", **options: Any
) -> tuple[list[Any], Any]:
    """Return how two ranks ended when one failed, and the run's events by kind."""
    folder.mkdir(exist_ok=True)
    (folder / "c.yaml").write_text(CONFIG.replace("PRECISION", precision))
    ends = run_ranks(2, on_rank, folder, faulty, kind, options)
    lines = read_lines(folder / "runs" / "r" / "events.jsonl")
    return ends, {line["kind"]: line for line in lines}


def saved_step(folder: Path) -> int:
    loaded = checkpoint.load(open_run(folder / "runs" / "r"))
    assert first_non_finite({"modules": loaded.state["modules"]}) is None
    return loaded.step


@EITHER
def test_memory_that_runs_out_on_one_rank_adapts_all(tmp_path: Path, faulty: int) -> None:
    ends, events = injected(tmp_path, faulty, "memory")
    assert ends == ["done", "done"]
    assert events["out_of_memory"]["adapted"]
    assert saved_step(tmp_path) == 8


@EITHER
def test_a_loss_that_is_not_finite_on_one_rank_rolls_all_back(tmp_path: Path, faulty: int) -> None:
    ends, events = injected(tmp_path, faulty, "nan")
    assert ends == ["done", "done"]
    assert "rolled back from step 4 to 3" in events["rollback"]["message"]
    assert saved_step(tmp_path) == 8


def test_all_ranks_return_to_the_recent_state_of_one_step_and_train_on_as_if_nothing_had_been(
    tmp_path: Path,
) -> None:
    ring = (
        "train.checkpoint_every=0",
        "train.recent_states=2",
        "train.recent_every=3",
        "model.dropout=0.2",
    )
    ends, events = injected(tmp_path / "failing", 1, "nan", overrides=ring)
    assert ends == ["done", "done"]
    assert "rolled back from step 4 to 3" in events["rollback"]["message"]
    injected(tmp_path / "clean", -1, "", overrides=ring)
    assert torch.equal(saved_weights(tmp_path / "failing"), saved_weights(tmp_path / "clean"))
    assert metrics(tmp_path / "failing") == metrics(tmp_path / "clean")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_keep_the_same_modules_in_float32(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "c.yaml").write_text(FRAGILE + f"parallel: {{timeout: 60, strategy: {strategy}}}\n")
    assert run_ranks(2, on_rank, tmp_path, -1, "", {"allow": ("tests",)}) == ["done", "done"]
    (kept,) = [
        line
        for line in read_lines(tmp_path / "runs" / "r" / "events.jsonl")
        if line["kind"] == "keep_fp32"
    ]
    assert kept["modules"] == ["net.2", "net.5"]
    assert saved_step(tmp_path) == 8


def saved_weights(folder: Path) -> torch.Tensor:
    state = checkpoint.load(open_run(folder / "runs" / "r")).state
    return torch.cat([value.float().flatten() for value in state["modules"]["net"].values()])


def metrics(folder: Path) -> list[Any]:
    return [line.get("losses") for line in read_lines(folder / "runs" / "r" / "metrics.jsonl")]


@EITHER
def test_an_overflow_on_one_rank_is_skipped_by_all(tmp_path: Path, faulty: int) -> None:
    precision = "{mode: amp, dtype: float16, init_scale: 1024}"
    ends, events = injected(tmp_path, faulty, "inf", precision)
    assert ends == ["done", "done"]
    assert (events["overflow"]["step"], events["overflow"]["scale"]) == (FAULT_STEP, 512)
    assert saved_step(tmp_path) == 8


@EITHER
def test_a_signal_to_one_rank_saves_and_stops_all(tmp_path: Path, faulty: int) -> None:
    ends, _ = injected(tmp_path, faulty, "signal")
    assert ends == [143, 143]
    assert saved_step(tmp_path) == FAULT_STEP + 1
    assert run_ranks(2, on_rank, tmp_path, -1, "", {"resume": "auto"}) == ["done", "done"]
    assert saved_step(tmp_path) == 8


@pytest.mark.parametrize(("number", "asked"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_ranks_that_are_stopped_before_the_training_end_together(
    tmp_path: Path, number: int, asked: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    assert run_ranks(2, stopped_on_rank, number, asked) == [128 + number] * 2
    assert time.monotonic() - started < 20
    assert not re.search("failed|lost", capfd.readouterr().err)


def stopped_on_rank(rank: int, number: int, asked: bool) -> str:
    """Be stopped: rank 0 too while it does what the others wait for, or it hears nothing of it."""

    def stop() -> None:
        os.kill(os.getpid(), number)
        time.sleep(10)

    config = load_config({"model": "small_cnn", "dataset": "digits"})
    try:
        with terminated_cleanly(), joined(config) as world:
            if rank == 1:
                stop()
            elif asked:
                world.ask(stop)
            world.tell(0)
    except (Terminated, KeyboardInterrupt) as stopped:
        raise SystemExit(code_of(stopped)) from None
    return "done"


@EITHER
def test_a_mistake_on_one_rank_ends_all_with_one_message(
    tmp_path: Path, faulty: int, capfd: pytest.CaptureFixture[str]
) -> None:
    ends, _ = injected(tmp_path, faulty, "error")
    assert ends == [1, 1]
    said = capfd.readouterr().err
    assert said.count("Broken: a mistake of the program") == 1
    assert ("rank 1 (host " in said) == (faulty == 1)
    assert saved_step(tmp_path) == 3


@pytest.mark.parametrize("faulty", [0, 1])
def test_a_killed_rank_is_named_and_ends_all(
    tmp_path: Path, faulty: int, capfd: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    ends, events = injected(tmp_path, faulty, "kill")
    assert ends[faulty] == -signal.SIGKILL
    assert ends[1 - faulty] == 9
    assert time.monotonic() - started < 40
    assert_named(faulty, events, capfd.readouterr().err)
    assert saved_step(tmp_path) == 3


@pytest.mark.slow
@pytest.mark.parametrize("faulty", [0, 1])
def test_a_hung_rank_is_named_and_ends_all(
    tmp_path: Path, faulty: int, capfd: pytest.CaptureFixture[str]
) -> None:
    ends, events = injected(tmp_path, faulty, "hang", overrides=("parallel.timeout=3",))
    assert ends == [9, 9]
    assert_named(faulty, events, capfd.readouterr().err)
    assert saved_step(tmp_path) == 3


def evaluated_on_rank(rank: int, folder: Path, method: str, faulty: int, unsaved: bool) -> str:
    """Train with a task whose method fails at the evaluation of step 4, on one rank."""
    original = getattr(Classify, method)

    def fails(task: Classify, *args: Any) -> Any:
        if rank == faulty and Training.current.progress.step == 4:  # type: ignore[attr-defined]
            raise Broken("a figure of somebody's own")
        return original(task, *args)

    def noted(training: Training, *args: Any) -> None:
        Training.current = training  # type: ignore[attr-defined]
        begun(training, *args)

    begun, Training.__init__ = Training.__init__, noted  # type: ignore[assignment]
    setattr(Classify, method, fails)
    if unsaved:
        checkpoint.write = refuse
    return on_rank(rank, folder, -1, "", {})


WRITE = checkpoint.write


def refuse(run: Any, step: int, *args: Any, **options: Any) -> None:
    if step == 4:
        raise OSError("the disk is full")
    WRITE(run, step, *args, **options)


@pytest.mark.parametrize(
    ("method", "faulty", "unsaved", "strategy"),
    [
        ("conclude", 0, False, "ddp"),
        ("evaluate_batch", 1, False, "ddp"),
        pytest.param("preview", 0, False, "ddp", marks=pytest.mark.slow),
        pytest.param("evaluate_batch", 0, True, "ddp", marks=pytest.mark.slow),
        pytest.param("conclude", 0, False, "fsdp", marks=pytest.mark.slow),
    ],
)
def test_a_step_whose_evaluation_fails_on_one_rank_is_saved_by_all(
    tmp_path: Path,
    method: str,
    faulty: int,
    unsaved: bool,
    strategy: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    jobs = "checkpoint_every: 0, evaluate_every: 2, sample_every: 4"
    config = CONFIG.replace("PRECISION", "fp32").replace("checkpoint_every: 3", jobs)
    config = config.replace("timeout: 20", f"timeout: 20, strategy: {strategy}")
    if strategy == "fsdp":
        config = config.replace("memory: {on_oom: adapt}\n", "")
    (tmp_path / "c.yaml").write_text(config)
    ends = run_ranks(2, evaluated_on_rank, tmp_path, method, faulty, unsaved)
    assert ends == [1, 1]
    said = capfd.readouterr().err
    assert said.count("Broken: a figure of somebody's own") == 1
    assert saved_step(tmp_path) == (2 if unsaved else 4)
    assert run_ranks(2, on_rank, tmp_path, -1, "", {"resume": "auto"}) == ["done", "done"]
    evaluated = [step for step, _ in evaluations_of(open_run(tmp_path / "runs" / "r"))]
    assert evaluated == [2, 4, 6, 8]


def assert_named(lost: int, events: Any, said: str) -> None:
    """Assert that the run's events and one line on the terminal have a lost rank's number, host, process and step."""
    named = (
        rf"rank {lost} \(host {re.escape(socket.gethostname())}, process \d+, step {FAULT_STEP}\) "
    )
    assert re.match(named, events["rank_lost"]["message"])
    assert [
        bool(re.match(f"error: {named}", line)) for line in said.splitlines() if "error: " in line
    ] == [True]
