"""Several processes train a LoRA on pictures of several sizes as one does, and a denoiser sharded or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mpt.config.load import load_config
from mpt.data.loading.loader import Loader
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.step.rank_inputs import inputs_of
from mpt.engine.step.step import update
from mpt.parallel.local import full
from mpt.parallel.start import joined
from mpt.parallel.world import ALONE, World
from tests.parallel.forked import run_ranks
from tests.systems.diffusion.latent_files import write_latents
from tests.systems.diffusion.library import diffusers
from tests.systems.diffusion.nn.test_diffusers import TEXT_UNET

LORA = {"lora": {"rank": 4, "targets": ["attention"], "full": []}}
SMALL_BASE = {"low_bit_base": "int8", "stream_weights": {"min_kibibytes": 0}}


def folder_of_data(folder: Path) -> dict[str, Any]:
    """Write a network's folder and latents of two sizes; return a configuration."""
    (folder / "net").mkdir()
    (folder / "net" / "config.json").write_text(json.dumps(TEXT_UNET))
    numbers = torch.Generator().manual_seed(0)
    tensors = {
        "latent_8x8": torch.randn(6, 4, 8, 8, generator=numbers),
        "latent_8x4": torch.randn(3, 4, 8, 4, generator=numbers),
        "text": torch.randn(9, 5, 12, generator=numbers),
        "weight": torch.tensor([1.0, 0.5, 1] * 3),
    }
    for split in ("train", "test"):
        write_latents(folder / f"{split}.safetensors", tensors, ())
    return {
        "model": {"name": "diffusers", "folder": str(folder / "net")},
        "dataset": {"name": "latents", "root": str(folder)},
        "task": {"name": "diffusion", "objective": "epsilon", "condition_dropout": 0.0},
        "precision": "fp32",
        "optimizer": {"name": "sgd", "lr": 0.5},
        "train": {"steps": 4, "batch_size": 4, "ema": None},
    }


def steps(world: World, config: Any) -> tuple[list[float], list[list[int]]]:
    """Perform the steps as the loop does; return the trained weights and the sizes of the batches."""
    data, _ = build_datasets(config)
    run = build_run(config, torch.device("cpu"), data.spec, world=world)
    count = config.train.batch_size
    stream = Loader(data, count, 0, place=world.place).batches()
    sizes = []
    for _ in range(config.train.steps):
        inputs = inputs_of(run, next(stream), count)
        sizes.append(list(inputs["latent"].shape[2:]))
        assert update(run, run.phases[0], inputs).finite
    trained = [
        full(one).detach().flatten()
        for one in run.task.trainable["net"].parameters()
        if one.requires_grad
    ]
    return torch.cat(trained).tolist(), sizes


def on_rank(rank: int, settings: dict[str, Any]) -> tuple[list[float], list[list[int]]]:
    config = load_config(settings)
    with joined(config) as world:
        return steps(world, config)


@pytest.mark.parametrize(("strategy", "memory"), [("ddp", LORA | SMALL_BASE), ("fsdp", {})])
def test_ranks_train_what_one_process_trains(
    strategy: str, memory: dict[str, Any], tmp_path: Path
) -> None:
    diffusers()
    torch.set_num_threads(1)
    settings = folder_of_data(tmp_path) | {"memory": memory}
    alone, sizes = steps(ALONE, load_config(settings))
    assert {tuple(size) for size in sizes} == {(8, 8), (8, 4)}
    ranks = run_ranks(2, on_rank, settings | {"parallel": {"strategy": strategy}}, limit=300)
    assert all(isinstance(one, tuple) for one in ranks), ranks
    for weights, seen in ranks:
        assert seen == sizes, "both ranks have the same size at each step"
        torch.testing.assert_close(torch.tensor(weights), torch.tensor(alone), rtol=1e-5, atol=1e-6)
