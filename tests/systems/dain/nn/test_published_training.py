"""Training of the published network against five steps that DAIN itself took."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.engine.step.step import update
from mpt.seams import DataSpec, FieldSpec

from .formula_weights import formula_state

RECORDED = Path(__file__).parents[1] / "fixtures" / "steps.npz"
RATES = {"net.flownets.*": {"lr_scale": 0.01}, "net.depthNet.*": {"lr_scale": 0.001}}


@pytest.mark.parametrize(
    ("gradients", "steps"),
    [
        ("original", 2),
        pytest.param("original", 5, marks=pytest.mark.slow),
        pytest.param("true", 5, marks=pytest.mark.slow),
    ],
)
def test_steps_have_dains_losses(gradients, steps):
    with np.load(RECORDED, allow_pickle=False) as archive:
        recorded = dict(archive)
    first, middle, last = torch.from_numpy(recorded["frames"])
    image = FieldSpec((3, 64, 64), torch.float32, "image")
    spec = DataSpec(
        {"first": image, "middle": image, "last": image, "time": FieldSpec((), torch.float32)},
        size=1,
    )
    config = load_config(
        {
            "model": {"name": "dain", "original_gradients": gradients == "original"},
            "dataset": {"name": "procedural_triplets"},
            "optimizer": {"name": "adamax", "lr": float(recorded["f64_lr_base"]), "parts": RATES},
            "precision": {"mode": "fp32"},
            "train": {"steps": steps, "batch_size": 1},
        }
    )
    run = build_run(config, torch.device("cpu"), spec)
    net = run.task.modules["net"]
    net.load_state_dict(formula_state(net))
    batch = {"first": first, "middle": middle, "last": last, "time": torch.tensor([0.5])}
    found = [float(update(run, run.phases[0], batch).losses["charbonnier"]) for _ in range(steps)]
    wanted = recorded[f"f64_losses_{gradients}"][:steps, 1]
    assert np.abs(np.array(found) / wanted - 1).max() < 1e-3
    other = recorded[f"f64_losses_{'true' if gradients == 'original' else 'original'}"][:steps, 1]
    assert np.abs(np.array(found) - wanted)[-1] < np.abs(np.array(found) - other)[-1]
