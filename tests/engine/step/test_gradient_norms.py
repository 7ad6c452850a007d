"""The norm of all gradients, at the steps that are logged and at no others."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mpt.config.load import load_config
from mpt.engine.step.step import update
from mpt.precision.shared import policy, scaler
from mpt.workflows.training.train import train
from tests.engine.step.test_logged import doubles, watched
from tests.engine.step.test_step import run_with

DCGAN: dict[str, Any] = {
    "model": {"name": "dcgan", "image_size": 16, "features": 8, "latent_size": 8},
    "train": {
        "steps": 5,
        "batch_size": 8,
        "log_every": 2,
        "threads": 1,
        "device": "cpu",
        "evaluate_every": 0,
    },
}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


@pytest.mark.parametrize("mode", ["fp32", "amp", "bf16-sr"])
def test_norms_are_logged_without_clipping_and_measured_at_logged_steps_alone(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[float] = []
    clip = policy.clip_gradients
    monkeypatch.setattr(
        policy, "clip_gradients", lambda p, limit: measured.append(limit) or clip(p, limit)
    )
    directory = train(load_config(DCGAN, [f"precision={mode}", "name=run"]), runs=tmp_path)
    assert directory is not None
    lines = lines_of(directory)
    assert [line["step"] for line in lines] == [2, 4, 5]
    assert measured == [math.inf] * 6  # two phases at each of the three
    for line in lines:
        assert set(line["grad_norm"]) == {"gen", "disc"}
        assert all(math.isfinite(norm) and norm > 0 for norm in line["grad_norm"].values())


def test_measuring_changes_no_gradient_and_the_norm_is_that_of_all_elements() -> None:
    weights = []
    for is_logged in (False, True):
        torch.manual_seed(0)
        run, phase = run_with(watched)
        done = update(run, phase, doubles(), is_logged=is_logged)
        weights.append([parameter.detach().clone() for parameter in phase.module.parameters()])
        expected = torch.cat(
            [parameter.grad.flatten() for parameter in phase.module.parameters()]
        ).norm()
        if is_logged:
            assert float(done.stats.grad_norm) == pytest.approx(float(expected))
        else:
            assert done.stats.grad_norm is None
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_sparse_gradients_have_the_norm_of_their_sums() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1, 1, 2])).sum().backward()
    assert float(scaler.gradient_norm(list(embedding.parameters()))) == pytest.approx(math.sqrt(10))


def test_where_gradients_are_released_in_the_backward_there_is_no_norm(tmp_path: Path) -> None:
    settings = ["memory.optimizer_in_backward=true", "precision=fp32", "name=run"]
    directory = train(load_config(DCGAN, settings), runs=tmp_path)
    assert directory is not None
    assert not any("grad_norm" in line for line in lines_of(directory))
