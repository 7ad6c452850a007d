"""Evaluation, previews and inference leave the training as they found it, whatever a task forgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from mpt.config.load import load_config
from mpt.data.loading.loader import Loader
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.state.details import write_details
from mpt.engine.state.evaluation import counted_samples, evaluate, evaluate_batches, infer, preview
from mpt.inference.evaluating import measure
from mpt.parallel.world import World
from mpt.seams import Batch, Dataset, Evidence, Inference, Phase, Run, Samples, gather
from tests.engine.parts import DIGITS, batch, classifier


class Careless(Samples):
    """A task that enters no mode, draws random numbers and looks at what is in force."""

    metric, higher_is_better, inputs, evaluation_samples = "mean", True, ("image",), 5

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.modules = self.trainable = {"net": net}
        self.seen: list[tuple[bool, bool, bool]] = []

    def phases(self, optimizers: Mapping[str, Optimizer]) -> Sequence[Phase]:
        return []

    def look(self, image: torch.Tensor) -> torch.Tensor:
        self.seen.append(
            (self.net.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
        )
        noise: torch.Tensor = self.net(image + torch.randn_like(image))
        return noise.float()

    def evaluate_batch(self, batch: Batch) -> Evidence:
        return {"mean": self.look(batch["image"]).mean(1)}

    def evaluate_samples(self, first: int, count: int) -> Evidence:
        return {"number": torch.arange(first, first + count)}

    def conclude(self, evidence: Sequence[Evidence]) -> dict[str, float]:
        assert gather(evidence, "number").tolist() == [0, 1, 2, 3, 4]
        return {"mean": float(gather(evidence, "mean").mean())}

    def preview(self, batch: Batch) -> torch.Tensor | None:
        return self.look(batch["image"])

    def infer(self, batch: Batch | None, count: int, seed: int) -> Inference:
        assert batch is not None
        return Inference(outputs=self.look(batch["image"]))


class Few(Dataset):
    """Some samples as a data set."""

    spec = DIGITS

    def __init__(self, samples: Batch) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples["image"])

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch:
        return {name: value[list(indices)] for name, value in self.samples.items()}


def careless_run() -> tuple[Run, Careless]:
    run = classifier("bf16")
    task = Careless(run.task.modules["net"])
    return replace(run, task=task), task


@pytest.mark.parametrize("what", ["evaluate", "preview", "infer"])
def test_a_task_that_enters_no_mode_changes_neither_buffers_nor_random_numbers(what: str) -> None:
    run, task = careless_run()
    dropout = next(module for module in task.net.modules() if isinstance(module, nn.BatchNorm2d))
    dropout.eval()  # a mode of its own, which has to come back
    state = {name: value.clone() for name, value in task.net.state_dict().items()}
    numbers = torch.get_rng_state()
    calls: dict[str, Any] = {
        "evaluate": lambda: evaluate_batches(run, [batch(), batch(1, 3)], chunk=2),
        "preview": lambda: preview(run, batch()),
        "infer": lambda: infer(run, batch(), 8),
    }
    first = calls[what]()
    assert task.seen == [(False, False, True)] * len(task.seen)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(value, state[name]) for name, value in task.net.state_dict().items())
    assert task.net.training
    assert not dropout.training
    again = calls[what]()
    if what == "evaluate":
        assert first == again
    else:
        one, other = (first, again) if what == "preview" else (first.outputs, again.outputs)
        assert torch.equal(one, other)
        assert not one.requires_grad


def test_evaluation_reads_the_test_set_with_the_data_sets_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    original = Loader.evaluation_batches

    def watched(self: Loader, *args: Any, **options: Any) -> Any:
        seen.append(self.workers)
        return original(self)

    monkeypatch.setattr(Loader, "evaluation_batches", watched)
    figures = []
    for workers in (0, 1):
        changes = [f"dataset.workers={workers}", "model.features=4", "precision=fp32"]
        config = load_config("configs/classify_digits.yaml", changes)
        _, test = build_datasets(config)
        figures.append(evaluate(build_run(config, torch.device("cpu"), test.spec), test, 64))
    assert seen == [0, 1]
    assert figures[0] == figures[1]


class OneOfTwo(World):
    """A rank of two that hold sharded weights, and so must compute equally often."""

    size, is_sharded = 2, True

    def __init__(self, rank: int, told: list[Any]) -> None:
        self.rank, self.told = rank, told

    def gather(self, value: Any) -> list[Any]:
        self.told.append(value)
        return self.told

    def ask(self, work: Any) -> Any:
        return work() if self.rank == 0 else None


@pytest.mark.parametrize("count", [11, 4], ids=["three batches", "one batch"])
def test_ranks_that_wait_for_each_other_evaluate_equally_often_and_count_nothing_twice(
    count: int,
) -> None:
    run, task = careless_run()
    data = Few(batch(0, count))
    alone = evaluate(run, data, 4)
    calls: list[int] = []
    evidence: list[Any] = []
    for rank in (1, 0):  # the first rank concludes, with what the other has told
        task.seen.clear()
        shared = evaluate(replace(run, world=OneOfTwo(rank, evidence)), data, 4)
        calls.append(len(task.seen))
    assert shared == alone
    assert calls[0] == calls[1] == (2 if count > 4 else 1)


def test_no_generator_of_another_device_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed would format a stack for each kind of device, at every batch."""
    asked: list[int] = []
    run, _ = careless_run()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", asked.append)
    first, again = (evaluate(run, Few(batch()), 4) for _ in range(2))
    assert first == again
    assert asked == []


class WithBad(Dataset):
    """Samples of which some turn out to be bad when they are read; the next good one stands in."""

    def __init__(self, samples: Batch, bad: Sequence[int]) -> None:
        self.samples, self.bad = samples, set(bad)
        self.spec = replace(DIGITS, size=len(samples["image"]))

    def is_left_out(self, index: int) -> bool:
        return str(index) in self.bad_files

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch:
        used = []
        for index in indices:
            while index % len(self) in self.bad:
                self.bad_files = {**self.bad_files, str(index % len(self)): "bad"}
                index += 1
            used.append(index % len(self))
        return {name: value[used] for name, value in self.samples.items()}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [1, 3, 11])
def test_a_bad_sample_is_left_out_of_an_evaluation_and_its_neighbour_counts_once(
    size: int, workers: int
) -> None:
    changes = [f"dataset.workers={workers}", "model.features=4", "precision=fp32"]
    run = build_run(
        load_config("configs/classify_digits.yaml", changes), torch.device("cpu"), DIGITS
    )
    samples, bad = batch(0, 11), [1, 2, 6, 10]
    good = [index for index in range(11) if index not in bad]
    data = WithBad(samples, bad)
    figures = evaluate(run, data, size)
    alone = evaluate(run, WithBad({name: value[good] for name, value in samples.items()}, []), size)
    assert figures == pytest.approx(alone, rel=1e-6)
    assert counted_samples(data) == good
    if not workers:
        assert (
            measure(run, WithBad(samples, bad), size, "float32").figures.items() >= figures.items()
        )


def test_the_worst_samples_keep_their_names_behind_a_bad_one(tmp_path: Path) -> None:
    data = WithBad(batch(0, 5), [1])
    data.fetch(range(5), 0)
    content = write_details(
        tmp_path / "evaluation.json", {"worst": [{"index": 0}, {"index": 1}]}, 3, data
    )
    assert [(one["index"], one["name"]) for one in content["worst"]] == [
        (0, "sample 0"),
        (2, "sample 2"),
    ]


@pytest.mark.parametrize("size", [1, 4])
def test_ranks_that_wait_for_each_other_leave_bad_samples_out(size: int) -> None:
    run, task = careless_run()
    alone = evaluate(run, WithBad(batch(0, 7), [2, 6]), size)
    calls: list[int] = []
    evidence: list[Any] = []
    for rank in (1, 0):
        task.seen.clear()
        data = WithBad(batch(0, 7), [2, 6])
        shared = evaluate(replace(run, world=OneOfTwo(rank, evidence)), data, size)
        calls.append(len(task.seen))
    assert shared == alone
    assert calls[0] == calls[1]
