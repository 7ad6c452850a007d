"""Training of the ECCV networks against the losses, gradients and steps of RIFE's own program."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.engine.step.step import update
from mpt.seams import DataSpec, FieldSpec
from mpt.systems.dain.losses.shared.laplacian import laplacian_distance
from mpt.systems.dain.nn.rife_published.eccv import EccvRife

from .rife_formula import formula_state, network, recorded


def batch_of(version: str, times: list[float], dtype: torch.dtype) -> dict[str, Tensor]:
    frames = torch.from_numpy(
        recorded()[f"{version}/train_frames"].astype(np.float32) / np.float32(255)
    ).to(dtype)
    first, middle, last = frames.unbind(1)
    return {
        "first": first,
        "middle": middle,
        "last": last,
        "time": torch.tensor(times, dtype=dtype),
    }


@pytest.mark.parametrize(
    ("version", "times", "key"),
    [
        ("ifnet", [0.5, 0.5], "float64"),
        ("ifnet_m", [0.25, 0.75], "times_float64"),
        pytest.param("ifnet_m", [0.5, 0.5], "float64", marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_are_the_originals(version, times, key):
    net = network(version).double().train()
    assert isinstance(net, EccvRife)
    batch = batch_of(version, times, torch.float64)
    taught = net(batch["first"], batch["last"], batch["time"], taught_by=batch["middle"])
    losses = [
        laplacian_distance(taught.image - batch["middle"]),
        laplacian_distance(taught.teacher_image - batch["middle"]),
        taught.distillation,
    ]
    found = torch.stack(losses).detach().numpy()
    assert np.abs(found / recorded()[f"{version}/{key}/losses"] - 1).max() < 1e-8
    (losses[0] + losses[1] + 0.01 * losses[2]).backward()
    norms = np.array(
        [float(value.grad.norm()) for value in net.parameters() if value.grad is not None]
    )
    assert np.abs(norms / recorded()[f"{version}/{key}/gradients"][:, 0] - 1).max() < 1e-7


@pytest.mark.slow
def test_three_steps_of_the_engine_are_the_originals():
    image = FieldSpec((3, 64, 64), torch.float32, "image")
    spec = DataSpec(
        {"first": image, "middle": image, "last": image, "time": FieldSpec((), torch.float32)},
        size=2,
    )
    config = load_config(
        {
            "model": {"name": "rife", "version": "ifnet"},
            "task": {"name": "interpolate", "loss": "laplacian"},
            "dataset": {"name": "procedural_triplets"},
            "optimizer": {"name": "adamw", "lr": 3e-4, "weight_decay": 1e-3},
            "precision": {"mode": "fp32"},
            "train": {"steps": 3, "batch_size": 2},
        }
    )
    run = build_run(config, torch.device("cpu"), spec)
    run.task.modules["net"].load_state_dict(formula_state("ifnet"))
    batch = batch_of("ifnet", [0.5, 0.5], torch.float32)
    found = []
    for _ in range(3):
        losses = update(run, run.phases[0], batch).losses
        found.append([float(losses[name]) for name in ("laplacian", "teacher", "distillation")])
    wanted = recorded()["ifnet/steps"][:3, 1:] * [1, 1, 0.01]
    assert np.abs(np.array(found) / wanted - 1)[0].max() < 1e-5
    # float32 against float64 in the original: 8e-5
    assert np.abs(np.array(found) / wanted - 1).max() < 3e-4


def test_flows_that_are_equal_have_a_finite_gradient():
    """In the original the root's gradient is infinite there, times a mask of 0."""
    net = network("ifnet").train()
    with torch.no_grad():
        net.block_tea.lastconv.weight.zero_()
        net.block_tea.lastconv.bias.zero_()
    batch = batch_of("ifnet", [0.5, 0.5], torch.float32)
    taught = net(batch["first"], batch["last"], batch["time"], taught_by=batch["middle"])
    taught.distillation.backward()
    assert all(value.grad is None or value.grad.isfinite().all() for value in net.parameters())
