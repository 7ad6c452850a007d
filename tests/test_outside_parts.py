"""A detector from outside of the package: model, data set of padded boxes, and task, each in one file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mpt

PARTS = Path(__file__).parent / "outside_parts"
CONFIG = {
    "model": "grid_net",
    "dataset": "drawn_boxes",
    "precision": "fp32",
    "optimizer": {"name": "adam", "lr": 3e-3},
    "train": {"steps": 60, "batch_size": 16},
    "name": "detector",
}


@pytest.fixture(autouse=True)
def no_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPT_PARTS", "")


def test_it_learns_and_its_run_infers_from_the_record_alone(tmp_path: Path) -> None:
    config = mpt.load(CONFIG, parts=[PARTS])
    untrained = mpt.build(config).evaluate()
    run = mpt.train(config, runs=tmp_path)
    assert run.figures["pixels_off"] < 0.7 * untrained["pixels_off"]
    (result, *_) = mpt.infer(run.path)
    assert set(result.rows[0]) == {"score", "box"}


def test_micro_batches_are_exact_though_losses_are_divided_by_the_number_of_boxes() -> None:
    weights = []
    for micro_batch in ("false", "5"):
        built = mpt.build(mpt.load(CONFIG, f"memory.micro_batch={micro_batch}", "optimizer.name=sgd", parts=[PARTS]))
        for step, batch in zip(range(2), built.batches(), strict=False):
            mpt.update(built, batch, step)
        weights.append(list(built.modules["net"].parameters()))
    for whole, parts in zip(*weights, strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-6)


def test_it_is_planned() -> None:
    plan = mpt.plan(mpt.load(CONFIG, parts=[PARTS])).plan
    assert plan["allocated"] > 0


@pytest.mark.slow
def test_it_is_compared(tmp_path: Path) -> None:
    comparison = mpt.compare(mpt.load(CONFIG, "train.steps=4", parts=[PARTS]), "fp32", "bf16", seeds=1, runs=tmp_path)
    assert [row.group.label for row in comparison.rows] == ["fp32", "bf16"]
