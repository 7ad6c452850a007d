"""Small generative runs for the tests of their tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.engine.state.moving_averages import follow_step
from mpt.engine.step.step import Update, update
from mpt.seams import Batch, DataSpec, FieldSpec, Run

SIDE = 8
ADVERSARIAL = (
    *(
        "vanilla_gan",
        "lsgan",
        "wgan",
        "wgan_gp",
        "cgan",
        "acgan",
        "infogan",
        "began",
        "ebgan",
        "aae",
        "bigan",
    ),
)
STYLEGAN2: dict[str, Any] = {
    "name": "stylegan2",
    "image_size": 16,
    "latent_size": 8,
    "style_size": 8,
    "mapping_layers": 2,
    "channel_base": 128,
    "channel_max": 8,
}


def build(
    model: str | Mapping[str, Any],
    precision: Mapping[str, Any] | str = "fp32",
    device: str = "cpu",
    **sections: Any,
) -> Run:
    """Build a run: 8x8 grey digits, or 16x16 colour pictures for StyleGAN2."""
    if model == "stylegan2":
        model = STYLEGAN2
    if isinstance(model, str):
        model = {"name": model, "image_size": SIDE, "hidden": 16}
    config = {
        "model": dict(model),
        "dataset": "digits",
        "precision": precision,
        "optimizer": {"name": "adam", "lr": 1e-3},
        "train": {"steps": 4, "batch_size": 8},
        "task": {"metric_samples": 64, "preview_count": 4},
        **sections,
    }
    colour = model["name"] == "stylegan2"
    side, channels = (model["image_size"], 3 if colour else 1)
    fields = {
        "image": FieldSpec((channels, side, side), torch.float32),
        "label": FieldSpec((), torch.int64),
    }
    data = DataSpec(fields, 64, ("disc", "square") if colour else tuple("0123456789"))
    return build_run(load_config(config), torch.device(device), data)


def make_batch(run: Run, size: int = 8, seed: int = 0) -> Batch:
    """Return random images and labels of the run's layout."""
    numbers = torch.Generator().manual_seed(seed)
    batch = {
        "image": torch.rand(size, *run.data.fields["image"].shape, generator=numbers),
        "label": torch.randint(0, len(run.data.classes), (size,), generator=numbers),
    }
    return {name: value.to(run.device) for name, value in batch.items()}


def take_step(run: Run, step: int = 0, size: int = 8) -> dict[str, Update]:
    """Perform every phase that is due at this step, and what follows it."""
    batch = make_batch(run, size, seed=step)
    done = {
        phase.name: update(run, phase, batch) for phase in run.phases if step % phase.every == 0
    }
    follow_step(run, step)
    return done


def weights(run: Run) -> dict[str, list[torch.Tensor]]:
    """Return copies of what the optimizers update, masters where there are any."""
    trained = run.task.trainable
    return {
        name: [p.detach().clone() for p in run.precision.parameters(trained[name])]
        for name in trained
    }
