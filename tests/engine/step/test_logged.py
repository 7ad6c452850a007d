"""What tasks and networks log: means over samples, micro-batches and steps, read when a line is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import mpt
from mpt.boards.boards import flat_numbers
from mpt.config.load import load_config
from mpt.engine.state.progress import Progress
from mpt.engine.step.step import update
from mpt.errors import PartError
from mpt.parallel.start import joined
from mpt.report.run_page.page import write_report
from mpt.seams import Batch, Loss, log
from mpt.workflows.training.train import train
from tests.engine.parts import batch, classifier
from tests.engine.step.test_step import run_with
from tests.parallel.forked import run_ranks

PARTS = Path(__file__).parents[2] / "outside_parts"


def watched(net: nn.Module, part: Batch) -> Iterator[Loss]:
    logits = net(part["image"])
    log("logit", logits)
    log("label", part["label"])
    log("constant", 3)
    yield Loss("loss", functional.cross_entropy(logits, part["label"]))


def doubles(size: int = 8) -> Batch:
    return {
        name: value.double() if value.is_floating_point() else value
        for name, value in batch(size=size).items()
    }


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_a_figure_is_the_mean_of_all_elements_of_the_steps_since_the_last_line(
    micro_batch: int | None,
) -> None:
    run, phase = run_with(watched)
    run.adaptation.micro_batch_size = micro_batch
    progress, expected = Progress(), []
    for size in (8, 5):
        with torch.no_grad():
            expected.append(phase.module(doubles(size)["image"]))
        progress.add_figures("net", update(run, phase, doubles(size)))
    means = progress.take_figures()
    assert means["net/logit"] == pytest.approx(float(torch.cat(expected).mean()), rel=1e-5)
    labels = torch.cat([doubles(size)["label"] for size in (8, 5)]).double()
    assert means["net/label"] == pytest.approx(float(labels.mean()))
    assert means["net/constant"] == 3
    assert progress.take_figures() == {}


def test_what_is_changed_in_place_afterwards_is_logged_as_it_was() -> None:
    state = torch.zeros(())

    def losses(net: nn.Module, part: Batch) -> Iterator[Loss]:
        log("state", state)
        state.add_(1)
        yield Loss("loss", net(part["image"]).mean())

    run, phase = run_with(losses)
    assert float(update(run, phase, doubles()).figures.sums["state"]) == 0


class Loud(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        answer = super().forward(input)
        log("answer", answer)
        return answer


@pytest.mark.parametrize("recompute", [False, True])
def test_a_network_logs_in_an_updates_forward_alone(recompute: bool) -> None:
    run = classifier("fp32", memory={"recompute": {"modules": ["net.head"]}} if recompute else {})
    head = run.task.modules["net"].head
    found = next(module for module in head.modules() if isinstance(module, nn.Linear))
    found.__class__ = Loud  # type: ignore[assignment]
    done = update(run, run.phases[0], batch(size=8))
    assert done.figures.counts == {"answer": 8 * found.out_features}, (
        "not again where it is computed again"
    )
    log("nobody", torch.ones(()))
    found(torch.zeros(1, found.in_features))  # outside of an update: nothing


def test_what_is_no_number_is_refused_by_name() -> None:
    def losses(net: nn.Module, part: Batch) -> Iterator[Loss]:
        log("name", "text")  # type: ignore[arg-type]
        yield Loss("loss", net(part["image"]).mean())

    run, phase = run_with(losses)
    with pytest.raises(
        PartError, match=r"log\('name', ...\): expected a tensor or a number, found str"
    ):
        update(run, phase, doubles())


def on_rank(rank: int) -> dict[str, float]:
    config = load_config(
        {"model": "small_cnn", "dataset": "digits", "precision": "fp32", "train": {"steps": 1}}
    )
    with joined(config) as world:
        progress = Progress()
        progress.logged = {
            "net/both": torch.tensor(1.0 + rank),
            **({"net/one": torch.tensor(8.0)} if rank else {}),
        }
        progress.logged_counts = {"net/both": 1 + rank, **({"net/one": 2} if rank else {})}
        return progress.take_figures(world)


def test_ranks_log_the_mean_over_all_of_them() -> None:
    assert run_ranks(2, on_rank) == [{"net/both": 3 / 3, "net/one": 4.0}, {}]


def test_figures_are_in_the_lines_the_report_and_the_boards_and_go_on_at_a_resume(
    tmp_path: Path,
) -> None:
    def configure(name: str) -> Any:
        data = {"model": "grid_net", "dataset": "drawn_boxes", "precision": "fp32", "name": name}
        data["train"] = {
            "steps": 8,
            "batch_size": 8,
            "log_every": 4,
            "evaluate_every": 0,
            "checkpoint_every": 6,
        }
        return mpt.load(data, parts=[PARTS])

    def lines_of(name: str) -> list[Any]:
        return [
            json.loads(line)
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]

    train(configure("whole"), runs=tmp_path)
    path, lines = tmp_path / "whole", lines_of("whole")
    logged = [line["logged"] for line in lines if line["kind"] == "train"]
    assert [set(one) for one in logged] == [{"net/boxes", "net/answer"}] * 2
    assert all(1 <= one["net/boxes"] <= 3 for one in logged)
    assert {"net/score", "net/box"} == set(lines[0]["losses"])
    write_report(path)
    assert set(json.loads((path / "report.json").read_text())["curves"]["logged"]) == {
        "net/boxes",
        "net/answer",
    }
    assert dict(flat_numbers({"logged": logged[0]})).keys() == {
        "logged/net/boxes",
        "logged/net/answer",
    }
    (middle,) = (path / "checkpoints").glob("*6")  # between two lines
    train(configure("whole"), runs=tmp_path, resume_from=str(middle))
    again = lines_of("whole")
    assert [line["logged"] for line in again if line["kind"] == "train"] == logged
