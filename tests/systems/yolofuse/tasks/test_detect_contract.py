"""What every task promises, on the detector: resume to the bit, exact recomputation, a plan of its step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mpt.cli import main
from mpt.engine.step import back_propagate
from mpt.phase_losses import draw_batch
from mpt.run.layout import find_run
from mpt.run.tensor_file import read_tensors
from tests.systems.yolofuse.tasks.small import build, config


def train(folder: Path, name: str, *words: str) -> None:
    path = folder / "config.yaml"
    # Three steps of 1, 1 and 2 samples; other schedules depend on the run's length.
    optimizer = {"name": "sgd_warmup", "warmup": 8, "accumulation": 4, "schedule": "constant"}
    path.write_text(config(task={"multi_scale": 0.4}, optimizer=optimizer).to_yaml())
    with pytest.raises(SystemExit) as ended:
        main(["train", str(path), "--runs", str(folder), "--name", name, "--device", "cpu", "--quiet", *words])
    assert not ended.value.code


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    run, _ = find_run(name, folder)
    newest = sorted(Path(run.path).glob("checkpoints/step-*"))[-1]
    assert newest.name == "step-00000003"
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
