"""What every task promises, on the detector: resume to the bit, exact recomputation, a plan of its step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mpt.cli import main
from mpt.engine.step.step import back_propagate
from mpt.run.checkpoints.tensor_file import read_tensors
from mpt.run.records.layout import find_run
from mpt.seams import Batch, Loss
from mpt.seams.phase_losses import draw_batch
from mpt.systems.yolofuse.tasks.detect import Detect
from tests.programs import run_program
from tests.systems.yolofuse.tasks.small import build, config

GROWING = {"name": "sgd_warmup", "warmup": 8, "accumulation": 4, "schedule": "constant"}
"""Three steps of 1, 1 and 2 samples; other schedules depend on the run's length."""


def train(folder: Path, name: str, *words: str, optimizer: Any = GROWING) -> None:
    path = folder / "config.yaml"
    path.write_text(config(task={"multi_scale": 0.4}, optimizer=optimizer).to_yaml())
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "train",
                str(path),
                "--runs",
                str(folder),
                "--name",
                name,
                "--device",
                "cpu",
                "--quiet",
                "--no-report",
                *words,
            ]
        )
    assert not ended.value.code


def weights(folder: Path, name: str, step: int = 3) -> dict[str, torch.Tensor]:
    run, _ = find_run(name, folder)
    newest = sorted(Path(run.path).glob("checkpoints/step-*"))[-1]
    assert newest.name == f"step-{step:08d}"
    found: dict[str, torch.Tensor] = {}
    for path in sorted(newest.glob("*.safetensors")):
        with path.open("rb") as file:
            found |= read_tensors(file)[0]
    return found


def test_a_resumed_training_ends_bit_equal(tmp_path: Path) -> None:
    """The optimizer's warm-up and the batch that grows in it, multi-scale's sizes and the moving average go on."""
    train(tmp_path, "whole")
    train(tmp_path, "parts", "train.steps=2")
    train(tmp_path, "parts", "--resume", "auto", "train.steps=3")
    whole, parts = weights(tmp_path, "whole"), weights(tmp_path, "parts")
    assert whole.keys() == parts.keys()
    assert any("net_ema" in name for name in whole)
    assert [name for name, value in whole.items() if not torch.equal(value, parts[name])] == []


def test_memory_that_runs_out_leaves_a_run_as_if_split_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, average and BatchNorm's statistics, to the bit, though it runs out after they were touched."""
    words, whole = ("train.steps=1", "train.batch_size=4"), {"name": "sgd_warmup", "warmup": 2}
    train(
        tmp_path, "split", *words, "memory.micro_batch=2", "memory.recompute=sqrt", optimizer=whole
    )
    original = Detect.losses

    def losses(self: Detect, batch: Batch) -> Iterator[tuple[Loss, ...]]:
        together = original(self, batch)
        if len(batch["rgb"]) > 2:
            raise torch.OutOfMemoryError("no room")
        yield together

    monkeypatch.setattr(Detect, "losses", losses)
    train(tmp_path, "adapted", *words, "memory.on_oom=adapt", optimizer=whole)
    split, adapted = weights(tmp_path, "split", 1), weights(tmp_path, "adapted", 1)
    assert [name for name, value in split.items() if not torch.equal(value, adapted[name])] == []
    run, _ = find_run("adapted", tmp_path)
    events = (Path(run.path) / "events.jsonl").read_text()
    assert '"adapted":{"recompute":"sqrt","micro_batch":2}' in events


@pytest.mark.parametrize("fusion", ["mid", "decision"])
def test_recomputed_gradients_are_bit_equal(fusion: str) -> None:
    model = {"name": "yolofuse", "fusion": fusion, "image_size": 64}
    found = []
    for memory in ({}, {"recompute": "all"}):
        run, batch = build(model=model, memory=memory)
        phase = run.phases[0]
        back_propagate(run, phase, draw_batch(run, phase, batch))
        found.append([p.grad for p in run.task.trainable["net"].parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


@pytest.mark.slow
def test_a_plan_is_the_bytes_of_a_real_step() -> None:
    """Of YOLOFuse, and of a torchvision detector, whose shapes depend on values and are planned by bounds."""
    rows = [json.loads(line) for line in run_program("tests.systems.yolofuse.tasks.planned")]
    assert [row["name"] for row in rows] == ["yolofuse", "ssdlite"]
    for row in rows:
        assert row["planned"] == pytest.approx(row["tracked"], rel=0.001), row
