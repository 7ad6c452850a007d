"""Faults injected into a training run: NaN, overflow without end, memory refused, poisoned state, signals."""

import functools
import json
import os
import shlex
import signal
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mpt.commands.train import Command as TrainArguments
from mpt.commands.train import train
from mpt.config.load import load_config
from mpt.engine.loop import rollback
from mpt.engine.loop.training import Training
from mpt.engine.recovery.diagnosis import FirstNonFinite
from mpt.engine.recovery.recent_states import RecentStates
from mpt.engine.step.faults import is_out_of_memory
from mpt.errors import Interrupted, MemoryBudgetError, NonFiniteError
from mpt.nn.shared.module_places import ModulePlaces
from mpt.report.run_page.page import write_report
from mpt.run.checkpoints import checkpoint
from mpt.run.records.layout import open_run
from mpt.tasks.classify import Classify
from mpt.tasks.gan import Gan
from tests.engine import parts

DATA: dict[str, Any] = {
    "model": {"name": "small_cnn", "features": 4, "image_size": 8},
    "dataset": "digits",
    "precision": "fp32",
    "optimizer": {"name": "sgd", "lr": 0.05},
    "train": {"steps": 8, "batch_size": 64, "log_every": 1, "checkpoint_every": 2},
    "name": "run",
}


def start(runs: Path, **sections: Any) -> Path:
    data = {**DATA, **sections}
    arguments = TrainArguments(config=Path("unused"), runs=str(runs), quiet=True)
    path = train(load_config(data), arguments)
    assert path is not None
    return path


def settings(**changes: Any) -> dict[str, Any]:
    return {**DATA["train"], **changes}


def weights(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = checkpoint.load(open_run(path)).state["modules"]["net"]
    return found


@functools.cache
def clean_weights() -> dict[str, Tensor]:
    """Return what a run ends with to which nothing happens, however often it saves or keeps states in memory.

    To be called before anything is injected.
    """
    with tempfile.TemporaryDirectory() as folder:
        return weights(start(Path(folder)))


def assert_clean(path: Path) -> None:
    """Fail unless a run has ended with the same bits as a clean one."""
    ours = weights(path)
    assert [
        key for key, value in clean_weights().items() if not torch.equal(ours[key], value)
    ] == []


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]


def poison(
    monkeypatch: pytest.MonkeyPatch, when: Callable[[int], bool], value: float = float("nan")
) -> list[int]:
    """Make the loss non-finite at the calls that `when` chooses; return the list of calls made."""
    calls: list[int] = []
    original = Classify.standardize

    def standardize(self: Classify, image: Tensor) -> Tensor:
        if self.net.training:
            calls.append(len(calls))
            if when(calls[-1]):
                return original(self, image) * value
        return original(self, image)

    monkeypatch.setattr(Classify, "standardize", standardize)
    return calls


def test_a_single_nan_is_rolled_back_and_the_run_equals_a_clean_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean_weights()
    poison(monkeypatch, lambda call: call == 5)
    path = start(tmp_path / "poisoned")
    kinds = [event["kind"] for event in events(path)]
    assert kinds.count("rollback") == 1
    assert_clean(path)
    steps = [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def test_a_roll_back_names_the_damaged_checkpoint_that_it_passes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(call: int) -> bool:
        saved = sorted((tmp_path / "poisoned").rglob("step-*/state.safetensors"))
        if call == 5:
            os.truncate(saved[-1], 100)
        return call == 5

    poison(monkeypatch, damage)
    path = start(tmp_path / "poisoned", train=settings(asynchronous_save=False, keep_last=3))
    told = [event["message"] for event in events(path) if event["kind"] == "rollback"]
    assert "is refused" in told[0]
    assert "is used instead" in told[0]


def test_a_state_in_memory_loses_fewer_steps_and_the_run_equals_a_clean_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = settings(checkpoint_every=0, recent_states=2, recent_every=2)
    clean_weights()
    poison(monkeypatch, lambda call: call == 5)
    path = start(tmp_path / "poisoned", train=memory)
    told = [event["message"] for event in events(path) if event["kind"] == "rollback"]
    assert len(told) == 1
    assert told[0].endswith("rolled back from step 5 to 4")
    assert_clean(path)


def test_the_ring_keeps_the_newest_good_states_and_gives_each_once() -> None:
    ring = RecentStates(2, 5)
    assert ring.every == 5
    weight = torch.ones(3)
    for step in (5, 10, 15):
        ring.keep(step, {"modules": {"net": {"weight": weight}}})
        weight += 1
    weight.fill_(float("nan"))
    ring.keep(20, {"modules": {"net": {"weight": weight}}})
    assert [step for step, _ in ring.states] == [10, 15]
    taken = ring.take(since=3)
    assert taken is not None
    assert taken[0] == 15
    assert taken[1]["modules"]["net"]["weight"].tolist() == [3.0, 3.0, 3.0]  # a copy of its time
    assert ring.take(since=10) is None  # no newer than the checkpoint
    assert RecentStates(0, 5).every == 0  # never


def poison_sample(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make a sample of one step's batch non-finite, whenever that batch comes."""
    fetch = Training.stream

    def stream(self: Training) -> Any:
        for number, batch in enumerate(fetch(self), self.progress.step):
            if number == step:
                batch["image"][3] = float("nan")
            yield batch

    monkeypatch.setattr(Training, "stream", stream)


def test_a_batch_that_is_not_finite_each_time_is_passed_over_as_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_sample(monkeypatch, 5)
    with pytest.raises(NonFiniteError):
        start(tmp_path / "repeat")
    path = start(tmp_path / "skip", train=settings(after_rollback=["repeat", "skip_batch"]))
    found = events(path)
    assert [
        event["kind"] for event in found if event["kind"] in ("rollback", "remedy", "skipped_batch")
    ] == [
        "rollback",
        "rollback",
        "remedy",
        "skipped_batch",
    ]
    assert json.loads((path / "summary.json").read_text())["steps"] == 8
    saved = checkpoint.load(open_run(path)).state["loop"]["remedies"]
    assert saved["skipped_batches"] == [5]


def test_learning_rates_are_halved_for_a_while_after_a_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda call: call == 3)
    path = start(tmp_path, train=settings(after_rollback=["halve_lr"], halved_steps=2))
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rates = {line["step"]: line["lr"]["net"] for line in lines if "lr" in line}
    assert rates == {1: 0.05, 2: 0.05, 3: 0.025, 4: 0.025, 5: 0.025, 6: 0.05, 7: 0.05, 8: 0.05}


class Fragile(torch.nn.Module):
    """Overflows float16 whatever the loss scale is."""

    def forward(self, value: Tensor) -> Tensor:
        return (value + 300.0).square() - 90000.0


def fragile(num_classes: int) -> torch.nn.Module:
    """A network of which two layers must be in float32; its BatchNorm sees what they overflow to."""
    layers = torch.nn
    narrow = [
        Fragile(),
        layers.BatchNorm1d(16),
        layers.Linear(16, 16),
        Fragile(),
        layers.Linear(16, num_classes),
    ]
    return layers.Sequential(layers.Flatten(), layers.Linear(256, 16), *narrow)


FRAGILE: dict[str, Any] = {
    **DATA,
    "model": {
        "name": "tests.engine.recovery.test_recovery:fragile",
        "image_size": 16,
        "channels": 1,
    },
    "optimizer": {"name": "sgd", "lr": 1e-6},
}


def go_fragile(
    folder: Path, *, resume: str | None = None, stop_after: int | None = None, **sections: Any
) -> Path:
    config = load_config({**FRAGILE, **sections}, allow=["tests"])
    arguments = TrainArguments(config=Path("unused"), runs=str(folder), quiet=True, resume=resume)
    path = train(config, arguments, stop_after)
    assert path is not None
    return path


def test_the_fewest_modules_are_kept_in_float32_and_stay_so_after_a_resume(tmp_path: Path) -> None:
    precision = {"mode": "amp", "dtype": "float16", "init_scale": 4.0, "min_scale": 2.0}
    with pytest.raises(NonFiniteError, match="smallest loss scale"):
        go_fragile(tmp_path / "stops", precision=precision, train=settings(steps=12))
    sections = {"precision": {**precision, "auto_keep_fp32": True}, "train": settings(steps=12)}
    path = go_fragile(tmp_path, stop_after=10, **sections)
    (told,) = [event for event in events(path) if event["kind"] == "keep_fp32"]
    assert "first at net.2: aten::" in told["message"]
    assert told["message"].endswith(
        "net.2, net.5 are kept in float32 from now on (the smallest list that helps)"
    )
    assert told["modules"] == ["net.2", "net.5"]
    before = [event["kind"] for event in events(path)].count("overflow")
    go_fragile(tmp_path, resume=str(path), **sections)
    assert [event["kind"] for event in events(path)].count("overflow") == before
    state = checkpoint.load(open_run(path)).state
    assert state["loop"]["remedies"]["float32"] == ["net.2", "net.5"]
    # the search left BatchNorm's buffers alone
    assert "poisoned" not in [event["kind"] for event in events(path)]
    write_report(path)
    assert "raised to float32 in recovery" in (path / "report.html").read_text("utf-8")


def test_after_a_rollback_the_fewest_modules_are_kept_in_float32_as_often_as_is_allowed(
    tmp_path: Path,
) -> None:
    precision = {"mode": "amp", "dtype": "float16", "loss_scale": 1.0, "auto_keep_fp32": True}
    path = go_fragile(tmp_path, precision=precision)
    kinds = [event["kind"] for event in events(path) if event["kind"] in ("rollback", "keep_fp32")]
    assert kinds == ["rollback", "keep_fp32"]
    assert json.loads((path / "summary.json").read_text())["precision"]["raised_to_float32"] == [
        "net.2",
        "net.5",
    ]
    with pytest.raises(NonFiniteError):
        go_fragile(tmp_path / "none", precision=precision, train=settings(max_rollbacks=0))


def test_a_search_that_finds_nothing_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not finite in float32 either is no matter of precision."""
    poison_sample(monkeypatch, 5)
    precision = {"mode": "amp", "dtype": "bfloat16", "auto_keep_fp32": True}
    path = start(tmp_path, precision=precision, train=settings(after_rollback=["skip_batch"]))
    kinds = [event["kind"] for event in events(path)]
    assert "keep_fp32" not in kinds
    assert "skipped_batch" in kinds


@pytest.mark.parametrize("recent", [1, 0])
def test_a_collapsed_gan_returns_to_the_last_evaluation_that_was_well_with_half_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recent: int
) -> None:
    variety = iter([0.9, 0.05] + 9 * [0.9])
    monkeypatch.setattr(
        Gan,
        "conclude",
        lambda self, evidence: {"frechet_distance": 1.0, "diversity": next(variety)},
    )
    path = start(
        tmp_path,
        model={"name": "vanilla_gan", "image_size": 8},
        task={"metric_samples": 8, "preview_count": 4},
        optimizer={"name": "adam", "lr": 0.01},
        train=settings(
            evaluate_every=3,
            checkpoint_every=5,
            on_collapse="rollback",
            collapse={"after": 0, "samples": 0},
            recent_states=recent,
            steps=7,
        ),
    )
    told = [(event["kind"], event["message"]) for event in events(path) if event["kind"] != "note"]
    assert [kind for kind, _ in told] == ["warning", "rollback", "remedy"]
    assert told[1][1].startswith(
        "the samples vary 0.05 times as much as the data: the generator may have collapsed: "
    )
    assert told[1][1].endswith("rolled back from step 6 to 3"), (
        "the best evaluation has a checkpoint"
    )
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rates = {line["step"]: line["lr"]["gen"] for line in lines if line["kind"] == "train"}
    assert rates == {**dict.fromkeys(range(1, 4), 0.01), **dict.fromkeys(range(4, 8), 0.005)}
    saved = sorted(file.name for file in (path / "checkpoints").glob("*step*"))
    # 5 was set aside, and made anew
    assert saved == ["step-00000003", "step-00000005", "step-00000007"]
    assert json.loads((path / "summary.json").read_text())["steps"] == 7


def test_a_single_nan_is_skipped_when_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda call: call == 5)
    path = start(tmp_path, train=settings(on_non_finite="skip"))
    summary = json.loads((path / "summary.json").read_text())
    assert summary["skipped"] == {"net": 1}
    assert summary["steps"] == 8


def test_nan_that_stays_stops_after_the_rollbacks_and_names_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda call: call >= 5)
    with pytest.raises(NonFiniteError, match=r"after 2 rollbacks.*First bad value: ") as caught:
        start(tmp_path, train=settings(max_rollbacks=2))
    assert caught.value.exit_code == 6
    state = checkpoint.load(open_run(tmp_path / "run")).state["modules"]["net"]
    assert all(torch.isfinite(value).all() for value in state.values())


@pytest.mark.parametrize("on_non_finite", ["rollback", "skip"])
def test_a_static_scale_that_overflows_is_named_at_once_and_nothing_is_repeated(
    tmp_path: Path, on_non_finite: str
) -> None:
    precision = {"mode": "amp", "dtype": "float16", "loss_scale": 2.0**30}
    said = r"overflowed at precision.loss_scale=1073741824, which is static.* Try precision.loss_scale=dynamic, a lower"
    with pytest.raises(NonFiniteError, match=said):
        start(tmp_path, precision=precision, train=settings(on_non_finite=on_non_finite))
    assert "rollback" not in [event["kind"] for event in events(tmp_path / "run")]


def test_a_static_scale_that_overflows_is_rolled_back_where_something_is_changed_then(
    tmp_path: Path,
) -> None:
    precision = {"mode": "amp", "dtype": "float16", "loss_scale": 2.0**30}
    with pytest.raises(NonFiniteError):
        start(
            tmp_path,
            precision=precision,
            train=settings(after_rollback=["halve_lr"], max_rollbacks=1),
        )
    assert "rollback" in [event["kind"] for event in events(tmp_path / "run")]


def test_the_first_bad_module_and_operator_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mpt.nn.small_cnn import SmallCnn

    original = SmallCnn.forward

    def forward(self: SmallCnn, image: Tensor) -> Tensor:
        return torch.log(original(self, image).clamp(max=0) * 0 - (1.0 if self.training else -1.0))

    monkeypatch.setattr(SmallCnn, "forward", forward)
    with pytest.raises(NonFiniteError, match=r"First bad value: net: aten::log"):
        start(tmp_path, train=settings(on_non_finite="stop"))


def test_memory_that_was_not_written_yet_is_no_first_bad_value() -> None:
    """A GPU's allocator hands out what was freed last: after a NaN, blocks full of it."""
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        with FirstNonFinite(ModulePlaces(), 1) as watch:
            torch.log(torch.empty(4).fill_(2.0)) + torch.empty_like(torch.ones(4)).zero_()
            assert watch.finding is None
            torch.log(torch.full((4,), -2.0))
    finally:
        torch.use_deterministic_algorithms(False)
    assert watch.finding is not None
    assert watch.finding.startswith("the loss: aten::log in float32 (test_recovery.py:")


@pytest.mark.parametrize("mode", ["amp", "O1", "O2"])
def test_a_collapsing_scale_stops_at_its_floor_with_finite_parameters(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda call: call >= 2, float("inf"))
    precision = {"mode": mode, "dtype": "float16", "init_scale": 64.0, "min_scale": 8.0}
    with pytest.raises(NonFiniteError, match="smallest loss scale, 8"):
        start(tmp_path, precision=precision, train=settings(steps=40))
    state = checkpoint.load(open_run(tmp_path / "run")).state["modules"]["net"]
    assert all(torch.isfinite(v).all() for k, v in state.items() if k.endswith(("weight", "bias")))


def test_a_collapsing_scale_falls_back_to_bfloat16_when_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda call: 2 <= call < 9, 1e6)
    precision = {
        "mode": "amp",
        "dtype": "float16",
        "init_scale": 64.0,
        "min_scale": 8.0,
        "at_min_scale": "fall_back",
    }
    norms = {"name": "small_cnn", "features": 4, "image_size": 8}
    path = start(
        tmp_path, model=norms, precision=precision, train=settings(steps=14, on_non_finite="skip")
    )
    assert "fall_back" in [event["kind"] for event in events(path)]


def test_a_run_that_fell_back_to_bfloat16_goes_on_in_it_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = {
        "mode": "amp",
        "dtype": "float16",
        "init_scale": 64.0,
        "min_scale": 8.0,
        "at_min_scale": "fall_back",
    }
    with monkeypatch.context() as patch:
        poison(patch, lambda call: 2 <= call < 9, 1e6)
        start(tmp_path, precision=precision, train=settings(steps=12, on_non_finite="skip"))
    arguments = TrainArguments(config=Path("unused"), runs=str(tmp_path), quiet=True, resume="auto")
    path = train(
        load_config({**DATA, "precision": precision, "train": settings(steps=14)}), arguments
    )
    assert path is not None
    assert json.loads((path / "summary.json").read_text())["precision"]["dtype"] == "bfloat16"
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [line["scale"] for line in lines if line["kind"] == "train" and line["step"] > 12] == [
        {},
        {},
    ]
    assert not [e for e in events(path) if e["kind"] == "warning" and "bit-exact" in e["message"]]
    assert checkpoint.load(open_run(path)).state["precision"]["fell_back"] is True


def test_scale_changes_and_skips_are_events_and_the_scale_is_in_every_log_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda call: call == 3, float("inf"))
    path = start(tmp_path, precision={"mode": "amp", "dtype": "float16"})
    story = [(event["kind"], event["step"]) for event in events(path)]
    assert ("overflow", 3) in story
    assert ("scale", 3) in story
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    scales = [line["scale"]["net"] for line in lines if line["kind"] == "train"]
    assert scales == [65536.0] * 3 + [32768.0] * 5


def refuse_above(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Raise OutOfMemoryError for micro-batches above a size."""
    original = Classify.losses

    def losses(self: Classify, batch: dict[str, Tensor]) -> Any:
        if len(batch["image"]) > size:
            raise torch.OutOfMemoryError(f"no room for {len(batch['image'])} samples")
        yield from original(self, batch)

    monkeypatch.setattr(Classify, "losses", losses)


def test_out_of_memory_halves_the_micro_batch_and_keeps_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to a run that was split from the start: the retried step saw the same batch and random numbers."""
    expected = start(tmp_path / "split", memory={"micro_batch": 16})
    refuse_above(monkeypatch, 16)
    path = start(tmp_path / "adapted", memory={"on_oom": "adapt"})
    moves = [event["micro_batch"] for event in events(path) if event["kind"] == "out_of_memory"]
    assert moves == [32, 16]
    ours, theirs = (checkpoint.load(open_run(p)).state["modules"]["net"] for p in (path, expected))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_out_of_memory_at_one_sample_exits_7_and_says_what_to_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_above(monkeypatch, 0)
    with pytest.raises(MemoryBudgetError, match=r"micro-batch of 1.*try") as caught:
        start(tmp_path, memory={"on_oom": "adapt"})
    assert caught.value.exit_code == 7


def test_out_of_memory_without_adapting_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_above(monkeypatch, 16)
    with pytest.raises(MemoryBudgetError, match=r"memory\.micro_batch=32"):
        start(tmp_path)


def test_a_roll_back_reads_no_checkpoint_onto_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numpy's random state and Adam's step counts belong on the CPU. `meta` stands for a GPU: no value comes back."""
    calls = poison(monkeypatch, lambda call: call == 5)
    original = rollback.roll_back

    def roll_back(training: Training, why: str) -> None:
        run = training.run
        training.run = replace(run, device=torch.device("meta"))
        original(training, why)
        steps = [
            state["step"].device.type for state in training.run.optimizers["net"].state.values()
        ]
        assert steps
        assert set(steps) == {"cpu"}
        training.run = run

    monkeypatch.setattr(rollback, "roll_back", roll_back)
    path = start(tmp_path, optimizer="adam", train=settings(on_non_finite="rollback"))
    assert len(calls) == 11  # the step that failed is repeated under instruments
    assert [event["kind"] for event in events(path)].count("rollback") == 1


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (
            torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be ..."),
            True,
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        # without a card
        (RuntimeError("FIND was unable to find an engine to execute this computation"), False),
        (
            RuntimeError(
                "Storage size calculation overflowed with sizes=[64, 1, 2147483648, 2147483648]"
            ),
            True,
        ),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"
            ),
            False,
        ),
    ],
    ids=str,
)
def test_memory_runs_out_in_many_words(error: RuntimeError, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one


def test_a_poisoned_buffer_is_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Classify.after_step

    def after_step(self: Classify, step: int, samples_seen: int) -> None:
        original(self, step, samples_seen)
        if step == 5:
            self.net.stages[0][1].running_mean.fill_(float("nan"))  # type: ignore[index, operator, union-attr]

    monkeypatch.setattr(Classify, "after_step", after_step)
    with pytest.raises(NonFiniteError, match=r"stages\.0\.1\.running_mean"):
        start(tmp_path, train=settings(on_non_finite="stop"))
    loaded = checkpoint.load(open_run(tmp_path / "run"))
    assert loaded.step == 4


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_exits(
    number: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Classify.after_step

    def after_step(self: Classify, step: int, samples_seen: int) -> None:
        original(self, step, samples_seen)
        if step == 4:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Classify, "after_step", after_step)
    with pytest.raises(Interrupted) as caught:
        start(tmp_path)
    assert caught.value.exit_code == code
    command = f"mpt train --resume {shlex.quote(str(tmp_path / 'run'))}"
    assert str(caught.value).endswith(f" Step 5 is saved; continue with: {command}")
    assert checkpoint.load(open_run(tmp_path / "run")).step == 5


def test_memory_is_tracked_in_a_step_that_was_not_skipped(tmp_path: Path) -> None:
    """At 2^24 the first steps overflow; the optimizer has no state until one does not."""
    precision = {"mode": "amp", "dtype": "float16", "init_scale": 2.0**24}
    path = start(
        tmp_path,
        precision=precision,
        optimizer={"name": "adam", "lr": 1e-3},
        train=settings(steps=24),
    )
    summary = json.loads((path / "summary.json").read_text())
    assert summary["skipped"]["net"] > 1
    parameter_bytes = 4 * summary["parameters"]
    assert summary["peak_memory"]["optimizer_state"] >= 2 * parameter_bytes


def test_a_float32_run_is_not_advised_to_use_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda call: True)
    with pytest.raises(NonFiniteError) as error:
        start(tmp_path, train=settings(on_non_finite="stop"))
    assert "optimizer.lr" in str(error.value)
    assert "precision" not in str(error.value)


def test_buffers_of_one_dtype_are_kept_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's kernel for many tensors takes no mixed dtypes, and BatchNorm has two."""
    run = parts.classifier()
    calls: list[set[torch.dtype]] = []
    original = torch._foreach_copy_

    def copy(targets: list[Tensor], sources: list[Tensor]) -> None:
        calls.append({tensor.dtype for tensor in (*targets, *sources)})
        original(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    before = [buffer.clone() for buffer in run.buffers.buffers]
    run.buffers.remember()
    for buffer in run.buffers.buffers:
        buffer.add_(1)
    run.buffers.restore()
    assert all(map(torch.equal, run.buffers.buffers, before))
    assert sorted(map(str, calls[:2])) == ["{torch.float32}", "{torch.int64}"]


def test_the_samples_that_were_not_finite_are_named() -> None:
    with FirstNonFinite(ModulePlaces(), 4) as watch:
        torch.log_(torch.tensor([[1.0, 2.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]]))
    assert watch.finding is not None
    assert watch.finding.endswith(", at samples 1, 3 of the batch of 4")
