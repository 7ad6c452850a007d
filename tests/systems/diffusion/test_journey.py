"""From a folder of pictures to a file that diffusers loads, as a user goes, for each family with random weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mpt.commands import convert
from mpt.commands.convert import Command as Convert
from mpt.commands.train import Command as Train
from mpt.commands.train import run as train
from mpt.errors import CheckpointError
from mpt.systems.diffusion.commands import prepare
from mpt.systems.diffusion.nn.shared.embedding import to_ticks
from mpt.systems.diffusion.nn.shared.library_networks import wrap
from tests.systems.diffusion.library import diffusers
from tests.systems.diffusion.pipelines import make_pictures, make_pipeline

KINDS = [
    "StableDiffusionPipeline",
    "StableDiffusionXLPipeline",
    "StableDiffusion3Pipeline",
    "FluxPipeline",
]


@pytest.fixture
def quiet() -> Any:
    """Leave out what the libraries warn of in their own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@torch.no_grad()
def answer(network: Any, data: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what a library's network answers to the first sample of a file."""
    net = wrap(network.eval().float(), 0)
    torch.manual_seed(0)
    conditions = [data[name][:1] for name in net.conditions]
    found: torch.Tensor = net(
        torch.randn_like(data["latent"][:1]), to_ticks(torch.tensor([500.0])), *conditions
    )
    return found


def trained(config: Path, runs: Path, *overrides: str, resume: str | None = None) -> Path:
    name, few = overrides[-1].partition("=")[2], "task.sampling_steps=3"
    overrides = (few, *overrides)
    train(Train(config=config, overrides=overrides, runs=runs, device="cpu", resume=resume))
    return runs / name


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("kind", KINDS)
def test_a_lora_goes_from_a_folder_of_pictures_into_the_pipeline(kind: str, tmp_path: Path) -> None:
    folder = make_pipeline(kind, tmp_path / "pipeline")
    pictures, data = make_pictures(tmp_path / "pictures"), tmp_path / "data"
    prepare.run(
        prepare.Command(pipeline=folder, pictures=pictures, output=data, size="16", device="cpu")
    )
    runs = tmp_path / "runs"
    settings = ("precision=fp32", "optimizer.lr=0.05", "train.batch_size=2", "name=lora")
    trained(data / "train.yaml", runs, "train.steps=1", *settings)
    run = trained(data / "train.yaml", runs, "train.steps=2", *settings, resume="auto")
    for kind_of_file in ("diffusers", "safetensors"):
        convert.run(Convert(run=str(run), runs=str(runs), to=kind_of_file))
    pipeline = getattr(diffusers(), kind).from_pretrained(str(folder))
    name = "unet" if hasattr(pipeline, "unet") else "transformer"
    samples = load_file(data / "test.safetensors")
    plain = answer(getattr(pipeline, name), samples)
    pipeline.load_lora_weights(str(run), weight_name="lora-diffusers.safetensors")
    adapted = answer(getattr(pipeline, name), samples)
    assert float((adapted - plain).abs().max()) > 1e-3
    if name == "unet":
        convert.run(Convert(run=str(run), runs=str(runs), to="kohya"))
        pipeline.unload_lora_weights()
        pipeline.load_lora_weights(str(run), weight_name="lora-kohya.safetensors")
        torch.testing.assert_close(answer(pipeline.unet, samples), adapted)
    merged = getattr(getattr(diffusers(), kind).from_pretrained(str(folder)), name)
    tensors = load_file(run / "lora.safetensors")
    merged.load_state_dict(
        {key.removeprefix("net.inner."): value for key, value in tensors.items()}
    )
    torch.testing.assert_close(answer(merged, samples), adapted, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("quiet")
def test_a_packed_base_is_resumed_to_the_bit_and_its_adapters_begin_another_run(
    tmp_path: Path,
) -> None:
    folder = make_pipeline("StableDiffusionPipeline", tmp_path / "pipeline")
    pictures, data, runs = (
        make_pictures(tmp_path / "pictures"),
        tmp_path / "data",
        tmp_path / "runs",
    )
    prepare.run(
        prepare.Command(pipeline=folder, pictures=pictures, output=data, size="16", device="cpu")
    )
    packed = (
        "memory.low_bit_base=nf4",
        "memory.stream_weights.min_kibibytes=0",
        "memory.recompute=all",
    )
    steps = ("optimizer.lr=0.05", "train.batch_size=2", *packed)
    through = trained(data / "train.yaml", runs, *steps, "train.steps=4", "name=through")
    first = trained(data / "train.yaml", runs, *steps, "train.steps=2", "name=first")
    words = ("task.sampling_steps=3", *steps, "train.steps=4", "name=first")
    train(
        Train(config=data / "train.yaml", overrides=words, runs=runs, device="cpu", resume="auto")
    )
    left, right = (newest(one) for one in (through, first))
    assert any(name.endswith("weight_codes") for name in left)
    assert all(torch.equal(left[name], right[name]) for name in left)
    convert.run(Convert(run=str(first), runs=str(runs), to="kohya"))
    file = f"memory.lora.weights={first / 'first-kohya.safetensors'}"
    again = trained(
        data / "train.yaml", runs, *steps, file, "train.steps=1", "optimizer.lr=1e-12", "name=again"
    )
    begun = newest(again)
    for name, value in begun.items():
        torch.testing.assert_close(value, right[name], rtol=1e-4, atol=1e-5)
    with pytest.raises(CheckpointError, match=r"has rank 16, and memory.lora gives it 4"):
        trained(data / "train.yaml", runs, *steps, file, "memory.lora.rank=4", "name=other")


def newest(run: Path) -> dict[str, torch.Tensor]:
    """Return the network's tensors in a run's newest checkpoint."""
    from mpt.run.checkpoints import checkpoint
    from mpt.run.records.layout import open_run

    found: dict[str, torch.Tensor] = checkpoint.load(open_run(run)).state["modules"]["net"]
    return found
