"""Recorded updates (`memory.cuda_graphs`) on the pretend card: they train what others train, and what they refuse."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda_rehearsal.programs import CLASSIFIER, GAN, rows, train
from tests.cuda_rehearsal.test_shipped_configs import FURTHER, SMALL, Planner
from tests.cuda_rehearsal.test_shipped_configs import train as train_shipped

OFTEN = "precision={mode: amp, init_scale: 16777216, growth_interval: 3, max_scale: 1.0e30}"
"""A loss scale that overflows again and again."""
CYCLE = (
    "optimizer={name: adamw, fused: true, lr: 0.003, schedule: one_cycle, clip_grad_norm: 1.0}",
    "precision=amp",
)
LESS = (
    "train.checkpoint_every=0",
    "train.evaluate_every=0",
    "train.sample_every=0",
    "task.metric_samples=16",
)


def leaves(value: Any, name: str = "") -> Any:
    """Yield dotted names and values of a checkpoint's state."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{name}.{key}")
    else:
        yield name, value


def state(run: Path) -> dict[str, Any]:
    """Return what a run's last checkpoint holds, but for its seconds."""
    from mpt.run.checkpoints import checkpoint
    from mpt.run.records.layout import RunDirectory

    return {
        name: value
        for name, value in leaves(checkpoint.load(RunDirectory(run)).state)
        if name != ".loop.seconds"
    }


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names of what two states do not have in common, to the bit."""
    assert one.keys() == other.keys()
    return [
        name
        for name, value in one.items()
        if not (
            torch.equal(value, other[name])
            if isinstance(value, torch.Tensor)
            else value == other[name]
        )
    ]


def lines(run: Path) -> list[Any]:
    """Return the losses and norms of a run's log."""
    return [
        (row["step"], row["losses"], row.get("grad_norm")) for row in rows(run) if "losses" in row
    ]


def train_both(folder: Path, text: str, *words: str) -> list[dict[str, Any]]:
    """Train recorded, by the same arithmetic without graphs, and as it is; return the first run's events."""
    performed = {}
    for name, value in {"recorded": "true", "eager": "{warmup: 100}", "plain": "null"}.items():
        with counting_updates() as counted:
            said = train(folder, text, *words, f"memory.cuda_graphs={value}", f"name={name}")
        performed[name] = len(counted)
        assert said.code == 0, said
    recorded, eager, plain = (folder / "runs" / name for name in performed)
    # the others were repeated, and none of these failed
    assert performed["recorded"] <= performed["eager"] - 4
    for (_, ours, _), (_, theirs, _) in zip(lines(recorded), lines(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=0.01)
    assert differing(state(recorded), state(eager)) == []
    assert lines(recorded) == lines(eager)
    return rows(recorded, "events.jsonl")


@contextlib.contextmanager
def counting_updates() -> Iterator[list[Any]]:
    """Yield a list that each update which is performed operator by operator, or recorded, is added to."""
    from mpt.engine.step import step

    perform, found = step.perform, []

    def counted(*args: Any) -> Any:
        found.append(args)
        return perform(*args)

    step.perform = counted
    try:
        yield found
    finally:
        step.perform = perform


def said_of_graphs(events: list[dict[str, Any]]) -> list[str]:
    """Return what was said of recordings, without the number of operators."""
    found = [event["message"] for event in events if event["kind"] == "cuda_graphs"]
    return [
        re.sub(r"\d+ operators", "N operators", one.removeprefix("memory.cuda_graphs: "))
        for one in found
    ]


def test_a_game_under_a_scale_that_overflows_trains_the_same_weights_recorded(
    tmp_path: Path,
) -> None:
    events = train_both(tmp_path, GAN, "train.steps=16", OFTEN, *LESS)
    assert sorted(said_of_graphs(events)) == [
        f"{name}: N operators recorded in 2 graphs" for name in ("disc", "gen")
    ]
    assert sum(event["kind"] == "overflow" and event["step"] > 8 for event in events) > 1


def test_rates_micro_batches_clipping_and_batches_of_another_shape_are_as_without_graphs(
    tmp_path: Path,
) -> None:
    events = train_both(
        tmp_path, CLASSIFIER, "train.steps=10", *CYCLE, "memory.micro_batch=12", "train.log_every=1"
    )
    assert said_of_graphs(events) == ["net: N operators recorded in 2 graphs"]


def test_a_resume_records_anew_and_ends_as_a_run_that_was_not_stopped(tmp_path: Path) -> None:
    words = (
        "train.checkpoint_every=6",
        "memory.cuda_graphs=true",
        "optimizer=null",
        "optimizer=adam",
        "precision=amp",
    )
    for name, steps, further in (
        ("whole", 12, ()),
        ("run", 6, ()),
        ("run", 12, ("--resume", "runs/run")),
    ):
        said = train(tmp_path, CLASSIFIER, *words, f"train.steps={steps}", f"name={name}", *further)
        assert said.code == 0, said
    assert differing(state(tmp_path / "runs" / "whole"), state(tmp_path / "runs" / "run")) == []


def test_a_checkpoint_goes_from_a_recorded_run_to_another_and_back(tmp_path: Path) -> None:
    words = ("optimizer=null", "optimizer=adam", "name=run")
    for steps, further in ((4, ()), (9, ("memory.cuda_graphs=true",)), (12, ())):
        resumed = () if steps == 4 else ("--resume", "runs/run")
        said = train(tmp_path, CLASSIFIER, *words, f"train.steps={steps}", *further, *resumed)
        assert said.code == 0, said
    assert state(tmp_path / "runs" / "run")[".optimizers.net.state.0.step"] == 12


@contextlib.contextmanager
def at_step_8(
    change: Callable[[Any, dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> Iterator[None]:
    """Let a function of the training and its batch make another batch before step 8, once."""
    from mpt.engine.loop.training import Training

    stream = Training.stream
    pending = [change]

    def changed(training: Training) -> Any:
        for step, batch in enumerate(stream(training), training.progress.step):
            yield pending.pop()(training, batch) if step == 8 and pending else batch

    Training.stream = changed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Training.stream = stream  # type: ignore[method-assign]


def poison(training: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    batch["image"] = batch["image"].clone().fill_(torch.nan)
    return batch


def halve(training: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value[:16].clone() for name, value in batch.items()}


def fall_back(training: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    assert training.run.precision.fall_back(training.run.task)
    return batch


def split(training: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    training.run.adaptation.micro_batch_size = 8
    return batch


ANEW = "arithmetic or micro-batches have changed; updates are recorded anew"
CHANGES = {
    "poison": (
        poison,
        "precision=bf16",
        ["the optimizer's state was put back; updates are recorded anew"],
    ),
    "halve": (
        halve,
        "precision=bf16",
        ["a batch of another shape than the recorded ones runs operator by operator"],
    ),
    "fall_back": (fall_back, "precision=amp", [ANEW]),
    "split": (split, "precision=fp32", [ANEW]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_that_changes_trains_as_without_graphs_and_says_so(name: str, tmp_path: Path) -> None:
    change, mode, said = CHANGES[name]
    states = []
    words = (
        "train.steps=14",
        "train.checkpoint_every=4",
        "train.on_non_finite=rollback",
        mode,
        "optimizer=null",
    )
    for value in ("true", "{warmup: 100}"):
        with at_step_8(change):
            done = train(
                tmp_path,
                CLASSIFIER,
                *words,
                "optimizer=adam",
                f"memory.cuda_graphs={value}",
                f"name={name}",
            )
        assert done.code == 0, done
        (tmp_path / "runs" / name).rename(tmp_path / f"{name}{len(states)}")
        states.append(state(tmp_path / f"{name}{len(states)}"))
    assert differing(*states) == []
    events = said_of_graphs(rows(tmp_path / f"{name}0", "events.jsonl"))
    assert events == ["net: N operators recorded in 2 graphs", *said]


@pytest.mark.parametrize(
    ("config", "mode"), [("dcgan_amp", "bf16"), ("classify_digits", OFTEN.partition("=")[2])]
)
def test_recorded_memory_is_what_was_planned(config: str, mode: str, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    planner = Planner()
    run = train_shipped(
        config, SMALL[config], 12, "run", f"precision={mode}", "memory.cuda_graphs=true"
    )
    memory = [row["memory"] for row in rows(run) if "memory" in row][-1]
    planned = planner.peaks(run)
    assert planned[0] == pytest.approx(memory["steps_peak_bytes"], rel=0.01)
    assert planned[1] == pytest.approx(memory["steps_reserved_bytes"], rel=0.01)


RECORDED = (
    "classify_digits",
    "diffusion_digits",
    "dcgan_amp",
    "dcgan_o1",
    "lsgan",
    "rife_demo",
    "saehd_demo",
    "vae",
    "wgan_gp",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("config", RECORDED)
def test_a_shipped_config_trains_the_same_weights_recorded(config: str, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    runs = []
    for name, value in {"recorded": "true", "eager": "{warmup: 100}"}.items():
        words = (*FURTHER.get(config, ()), f"memory.cuda_graphs={value}", "train.log_every=3")
        runs.append(train_shipped(config, SMALL[config], 16, name, *words))
    assert differing(*map(state, runs)) == []
    assert lines(runs[0]) == lines(runs[1])
    assert said_of_graphs(rows(runs[0], "events.jsonl"))


REFUSED = {
    "began": (
        "disc cannot be .* reads a tensor that another",
        GAN,
        "model=null model={name: began, image_size: 16}",
    ),
    "muon": (
        "net cannot be recorded: .* reads the device on the host",
        CLASSIFIER,
        "optimizer=null optimizer=muon",
    ),
    "drawn": (
        "net cannot be recorded: .* is given -?[0-9]+ in one",
        CLASSIFIER,
        "precision=bf16-sr",
    ),
    "schedule_free": (
        "ScheduleFreeAdamW computes its steps",
        CLASSIFIER,
        "optimizer=null optimizer=schedule_free",
    ),
    "adapts": ("on_oom=adapt and micro_batch=auto change", CLASSIFIER, "memory.on_oom=adapt"),
    "auto": ("on_oom=adapt and micro_batch=auto change", CLASSIFIER, "memory.micro_batch=auto"),
    "offload": ("cannot be combined with", CLASSIFIER, "memory.offload_activations=true"),
}


def test_what_is_not_the_same_each_time_is_refused_in_a_line(tmp_path: Path) -> None:
    for reason, text, word in REFUSED.values():
        said = train(
            tmp_path,
            text,
            *re.split(" (?=[a-z]+=)", word),
            "memory.cuda_graphs=true",
            "train.steps=6",
        )
        errors = [line for line in said.text.splitlines() if line.startswith("error:")]
        assert (said.code, len(errors)) == (2, 1), said
        assert re.search(reason, errors[0]), errors


# the pretend graphs themselves


def record(work: Any) -> Any:
    """Record a function's work on the pretend card."""
    graph, stream = torch.cuda.CUDAGraph(), torch.Stream("cuda")
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    torch.accelerator.current_stream().wait_stream(stream)
    return graph


def test_a_recording_computes_nothing_and_a_repetition_what_was_recorded() -> None:
    weight, rate, made = torch.ones(3, device="cuda"), 2.0, []

    def work() -> None:
        weight.add_(torch.rand(3, device="cuda").mul_(0).add_(rate))
        made.append(weight * 2)

    random = torch.cuda.get_rng_state()
    graph = record(work)
    rate = 5.0
    assert weight.tolist() == [1.0] * 3
    assert made[0].isnan().all()
    assert torch.equal(torch.cuda.get_rng_state(), random)
    graph.replay()
    graph.replay()
    # the rate is that of the recording
    assert (weight.tolist(), made[0].tolist()) == ([5.0] * 3, [10.0] * 3)
    assert not torch.equal(torch.cuda.get_rng_state(), random)


def test_a_recording_refuses_that_the_host_reads_or_copies() -> None:
    number = torch.ones((), device="cuda")
    for work in (
        lambda: float(number),
        lambda: number.fill_(torch.ones(1).cuda()[0]),
        torch.cuda.synchronize,
    ):
        with pytest.raises(RuntimeError, match=r"capturing|previous error"):
            record(work)


def test_a_repetition_notices_memory_that_was_freed() -> None:
    held = {"weight": torch.ones(3, device="cuda")}
    graph = record(lambda: held["weight"].mul_(2))
    held["weight"] = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="freed since"):
        graph.replay()


def test_a_recordings_memory_stays_with_its_pool_and_a_repetition_takes_none() -> None:
    graph = record(lambda: torch.empty(2**22, device="cuda").fill_(1.0))
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    assert reserved >= 2**24
    assert torch.cuda.memory_allocated() == 0
    torch.cuda.reset_peak_memory_stats()
    graph.replay()
    assert torch.cuda.max_memory_allocated() == 0
    assert torch.cuda.memory_reserved() == reserved
