"""What a run says of itself before its first step, and of its plan when that is there."""

import json
import types
from pathlib import Path

import pytest
import torch

from mpt.config.load import load_config
from mpt.engine.loop.assembly import build_explained, supply
from mpt.engine.loop.plan_notice import PlanNotice
from mpt.planner.recipes.patch_origin import MARK
from mpt.workflows.training.start_summary import count, summarize
from mpt.workflows.training.train import strange_cards


def lines(*overrides: str) -> list[str]:
    config = load_config(
        {"model": {"name": "dcgan", "image_size": 16, "features": 8, "latent_size": 8}}, overrides
    )
    supplied = supply(config)
    return list(
        summarize(build_explained(config, supplied.device, supplied.train_data.spec), supplied)
    )


def test_data_networks_and_rates_are_said_as_they_were_built() -> None:
    length, data, networks, *optimizers, precision = lines(
        "train.epochs=2",
        "memory.micro_batch=16",
        "optimizer={lr: 2e-4, clip_grad_norm: 1, phases: {disc: {lr: 4e-4}}}",
        "train.device=cpu",
    )
    assert length == "dcgan on digits, 44 steps of 64 in micro-batches of 16 (2 epochs), cpu"
    assert data == "data: 1437 training and 360 test samples, 10 classes"
    assert networks.startswith("networks: ")
    assert "gen 0.0" in networks
    assert "disc 0.0" in networks
    assert sorted(optimizers) == [
        "optimizer of disc: adam, learning rate 0.0004, gradients clipped at 1",
        "optimizer of gen: adam, learning rate 0.0002, gradients clipped at 1",
    ]
    assert precision.startswith("precision amp: ")


def test_one_is_not_said_in_the_plural() -> None:
    assert (
        lines("train.steps=1", "train.device=cpu")[0]
        == "dcgan on digits, 1 step of 64 (0.0455 epochs), cpu"
    )
    assert (
        lines("train.epochs=1", "train.device=cpu")[0]
        == "dcgan on digits, 22 steps of 64 (1 epoch), cpu"
    )


def test_frozen_weights_and_rates_by_part_are_told_apart() -> None:
    config = load_config(
        {
            "model": {"name": "small_cnn", "image_size": 8, "features": 4},
            "train": {"freeze": ["net.stages.*"], "device": "cpu"},
        }
    )
    supplied = supply(config)
    run = build_explained(config, supplied.device, supplied.train_data.spec)
    trained = sum(
        weight.numel() for weight in run.task.trainable["net"].parameters() if weight.requires_grad
    )
    assert count(run.task.trainable["net"]).endswith(
        f" parameters, {trained / 1e6:.4f} M of them trained"
    )


def test_a_plan_is_told_once_when_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    config = load_config({"model": "small_cnn"})
    # nothing is planned there: nothing is looked for
    assert PlanNotice(config, "cpu", path).path is None
    told = PlanNotice(config, "cuda", path)
    assert told.take() is None
    gib = 2**30
    plan = {
        "peak_bytes": 3 * gib,
        "reserved_bytes": 4 * gib,
        "context_bytes": gib,
        "step_seconds": 0.1234,
    }
    path.write_text(json.dumps(plan))
    assert (
        told.take()
        == "planned for this training: peak 3.00 GiB, 5.00 GiB taken from the card, 123 ms per step"
    )
    assert told.take() is None


def test_a_patch_that_was_planned_for_a_larger_card_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = types.SimpleNamespace(
        name="NVIDIA GeForce GTX 1650", total_memory=4 << 30, major=7, minor=5
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    patch = tmp_path / "plan.yaml"
    patch.write_text(MARK + json.dumps({"gpu": "rtx2060", "budget_bytes": 6 << 30}) + "\n{}\n")
    (said,) = strange_cards([patch], torch.device("cuda"))
    assert said.endswith(
        "planned for rtx2060 with 6 GiB, not gtx1650 with 4 GiB: plan again, or memory may run out"
    )
    assert strange_cards([patch], torch.device("cpu")) == []
