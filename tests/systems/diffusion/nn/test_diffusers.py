"""Networks of diffusers by config.json: they train, and losses and samples are those of its own code."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from mpt.config.load import load_config
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.state.evaluation import evaluate_batches, preview
from mpt.engine.step.step import update
from mpt.errors import ConfigError
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import find_gpu
from mpt.seams import Batch, Run
from mpt.systems.diffusion.nn.shared.embedding import to_ticks
from mpt.systems.diffusion.tasks.diffusion import Diffusion
from tests.systems.diffusion.latent_files import write_latents
from tests.systems.diffusion.library import diffusers
from tests.systems.diffusion.pipelines import vae as autoencoder

UNET: dict[str, Any] = {
    "_class_name": "UNet2DModel",
    "sample_size": 8,
    "in_channels": 1,
    "out_channels": 1,
    "layers_per_block": 1,
    "block_out_channels": [8, 16],
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}
TEXT_UNET: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 8,
    "layers_per_block": 1,
    "block_out_channels": [8, 16],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "norm_num_groups": 4,
    "attention_head_dim": 4,
    "cross_attention_dim": 12,
}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "unet": UNET | {"in_channels": 4, "out_channels": 4, "num_class_embeds": 3},
    "dit": {
        "_class_name": "DiTTransformer2DModel",
        "in_channels": 4,
        "out_channels": 8,
        "sample_size": 8,
        "num_embeds_ada_norm": 2,
        **HEADS,
    },
    "sd15": TEXT_UNET,
    "sdxl": TEXT_UNET
    | {
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 4,
        "projection_class_embeddings_input_dim": 10 + 6 * 4,
    },
    "sd3": {
        "_class_name": "SD3Transformer2DModel",
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "joint_attention_dim": 12,
        "caption_projection_dim": 16,
        "pooled_projection_dim": 10,
        "pos_embed_max_size": 8,
        **HEADS,
    },
    "flux": {
        "_class_name": "FluxTransformer2DModel",
        "in_channels": 16,
        "num_single_layers": 1,
        "joint_attention_dim": 12,
        "pooled_projection_dim": 10,
        "guidance_embeds": True,
        "axes_dims_rope": [2, 2, 4],
        **HEADS,
        "num_layers": 1,
    },
}


def write_network(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_data(folder: Path, count: int = 6) -> Path:
    numbers = torch.Generator().manual_seed(1)
    for split in ("train", "test"):
        shapes = {"latent": (4, 8, 8), "text": (5, 12), "pooled": (10,), "sizes": (6,)}
        tensors = {
            name: torch.randn(count, *shape, generator=numbers) for name, shape in shapes.items()
        }
        write_latents(
            folder / f"{split}.safetensors",
            tensors | {"label": torch.arange(count) % 2},
            ("a", "b"),
        )
    return folder


def build(
    tmp_path: Path, config: dict[str, Any], data: str = "latents", **sections: Any
) -> tuple[Run, Batch]:
    diffusers()
    given: dict[str, Any] = {
        "model": {
            "name": "diffusers",
            "folder": str(write_network(tmp_path / "net" / "unet", config).parent),
        },
        "dataset": {"name": "latents", "root": str(write_data(tmp_path / "data"))},
        "precision": "fp32",
        "train": {"steps": 4, "batch_size": 4, "ema": None},
        "task": {"sampling_steps": 2, "preview_count": 2, "metric_samples": 8},
    }
    if data == "digits":
        given["dataset"] = "digits"
        given["model"] |= {"image_size": 8, "channels": 1}
    merged = load_config({name: {**value, **sections.get(name, {})} if isinstance(value, dict) else value
                          for name, value in given.items()})  # fmt: skip
    train, _ = build_datasets(merged)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build_run(merged, torch.device("cpu"), train.spec), train.spec.as_floats(
            train.fetch(range(4), 0)
        )


def task_of(run: Run) -> Diffusion:
    assert isinstance(run.task, Diffusion)
    return run.task


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_and_is_evaluated_on_cached_latents(
    family: str, tmp_path: Path
) -> None:
    objective = "flow" if family in ("sd3", "flux") else "epsilon"
    dropout = 0.1 if family in ("unet", "dit") else 0.0
    run, batch = build(
        tmp_path, FAMILIES[family], task={"objective": objective, "condition_dropout": dropout}
    )
    assert update(run, run.phases[0], batch).finite
    assert evaluate_batches(run, [batch], 4).keys() == {"test_loss"}
    assert preview(run, batch) is None


@pytest.mark.parametrize("family", ["sd15", "sdxl", "sd3", "flux"])
def test_loss_and_gradients_are_those_of_a_step_written_with_diffusers(
    family: str, tmp_path: Path
) -> None:
    library = diffusers()
    is_flow = family in ("sd3", "flux")
    run, batch = build(
        tmp_path, FAMILIES[family], task={"objective": "flow" if is_flow else "epsilon"}
    )
    task = task_of(run)
    task.net.eval()
    drawn = task.draw(batch, run.phases[0]) | {"left_out": torch.ones(4)}
    clean, noise, inner = batch["latent"], drawn["noise"], task.net.inner
    conditions = {"encoder_hidden_states": batch["text"], "return_dict": False}
    if is_flow:
        scheduler = library.FlowMatchEulerDiscreteScheduler()
        places = torch.tensor([10, 300, 700, 990])
        drawn["level"], times = scheduler.sigmas[places], scheduler.timesteps[places]
        noisy, wanted = scheduler.scale_noise(clean, times, noise), noise - clean
        conditions["pooled_projections"] = batch["pooled"]
    else:
        scheduler = library.DDPMScheduler(beta_schedule="squaredcos_cap_v2")
        times = drawn["level"]
        noisy, wanted = scheduler.add_noise(clean, noise, times), noise
    if family == "sdxl":
        conditions["added_cond_kwargs"] = {
            "text_embeds": batch["pooled"],
            "time_ids": batch["sizes"],
        }
    if family == "flux":
        pipeline = library.FluxPipeline
        packed = pipeline._pack_latents(noisy, 4, 4, 8, 8)
        ids = pipeline._prepare_latent_image_ids(4, 4, 4, torch.device("cpu"), torch.float32)
        answer = inner(packed, timestep=times / 1000, guidance=torch.ones(4), img_ids=ids,
                       txt_ids=torch.zeros(5, 3), **conditions)[0]  # fmt: skip
        answer = pipeline._unpack_latents(answer, 64, 64, 8)
    else:
        answer = inner(noisy, timestep=times, **conditions)[0]
    other = functional.mse_loss(answer, wanted)
    weights = list(inner.parameters())
    theirs = torch.autograd.grad(other, weights, allow_unused=True)
    (loss,) = task.losses(drawn)
    ours = torch.autograd.grad(loss.value, weights, allow_unused=True)
    torch.testing.assert_close(loss.value, other, rtol=1e-6, atol=1e-6)
    for mine, other_gradient in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("sampler", "pipeline"),
    [("DDIMScheduler", "DDIMPipeline"), ("euler", "DDIMPipeline"), ("DDPMScheduler", None)],
)
def test_samples_are_those_of_the_pipeline_with_the_same_noise(
    sampler: str, pipeline: str | None, tmp_path: Path
) -> None:
    library = diffusers()
    task = {
        "objective": "epsilon",
        "sampler": sampler,
        "sampling_steps": 5,
        "beta_schedule": "linear",
    }
    run, _ = build(tmp_path, UNET, "digits", task=task)
    made = task_of(run)
    made.net.eval()
    betas = {"timestep_spacing": "trailing", "clip_sample": False}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if pipeline is None:
            noise = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3))
            scheduler = library.DDPMScheduler(**betas)
            scheduler.set_timesteps(5)
            numbers, wanted = torch.Generator().manual_seed(0), noise
            for time in scheduler.timesteps:
                said = made.net.inner(wanted, time).sample
                wanted = scheduler.step(said, time, wanted, generator=numbers).prev_sample
            wanted = (wanted / 2 + 0.5).clamp(0, 1)
        else:
            pipe = library.DDIMPipeline(made.net.inner, library.DDIMScheduler(**betas))
            pipe.set_progress_bar_config(disable=True)
            numbers = torch.Generator().manual_seed(3)
            noise = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3))
            found = pipe(2, generator=numbers, num_inference_steps=5, output_type="np").images
            wanted = torch.from_numpy(found).permute(0, 3, 1, 2)
        ours = made.sample_with(noise, ())
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)


# diffusers' own call of numpy
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize(
    ("objective", "sampler"),
    [
        ("flow", "FlowMatchEulerDiscreteScheduler"),
        ("flow", "DPMSolverMultistepScheduler"),
        ("edm", "EDMEulerScheduler"),
        ("edm", "EDMDPMSolverMultistepScheduler"),
        ("v", "EulerDiscreteScheduler"),
        ("v", "HeunDiscreteScheduler"),
        ("v", "DPMSolverMultistepScheduler"),
    ],
)
def test_the_library_s_samplers_agree_with_ours_in_many_steps(
    objective: str, sampler: str, tmp_path: Path
) -> None:
    """With the answer for data that are one picture, whichever way leads there."""
    diffusers()
    run, _ = build(
        tmp_path,
        UNET,
        "digits",
        task={"objective": objective, "sampler": sampler, "sampling_steps": 50},
    )
    task = task_of(run)
    picture = torch.linspace(-0.9, 0.9, 64).view(1, 1, 8, 8)

    def perfect(seen: torch.Tensor, ticks_b: torch.Tensor, *_: Any) -> torch.Tensor:
        level = levels_of(task, ticks_b)
        noisy = seen * (level.view(-1, 1, 1, 1) ** 2 + 0.25).sqrt() if objective == "edm" else seen
        return answer_for(task, noisy, picture, level)

    task.guided = perfect  # type: ignore[method-assign]
    noise = torch.randn(2, 1, 8, 8)
    made = task.sample_with(noise, ())
    torch.testing.assert_close(made, ((picture + 1) / 2).expand(2, -1, -1, -1), rtol=0, atol=0.02)


def levels_of(task: Diffusion, ticks_b: torch.Tensor) -> torch.Tensor:
    """Return the objective's levels of what the network sees."""
    time = ticks_b.double() / 2**20
    kinds = {"flow": time / 1000, "edm": (4 * time).exp(), "v": time.round().long().clamp(0, 999)}
    return kinds[task.settings.objective]


def answer_for(
    task: Diffusion, noisy: torch.Tensor, clean: torch.Tensor, level: torch.Tensor
) -> torch.Tensor:
    """Return what a network answers that knows the only picture there is."""
    clean = clean.expand_as(noisy)
    if task.settings.objective == "flow":
        return ((noisy - clean) / level.view(-1, 1, 1, 1)).float()
    if task.settings.objective == "edm":
        noise = (noisy - clean) / level.view(-1, 1, 1, 1)
        return task.objective.target(clean.double(), noise, level).float()
    alpha, sigma = task.objective.at(level, noisy)  # type: ignore[attr-defined]
    return alpha * (noisy - alpha * clean) / sigma - sigma * clean


def test_previews_of_latents_are_what_the_autoencoder_decodes(tmp_path: Path) -> None:
    diffusers()
    torch.manual_seed(0)
    network = autoencoder(4, 0.1).eval()
    network.save_pretrained(str(tmp_path / "vae"))
    task = {"objective": "flow", "condition_dropout": 0.0, "decoder": str(tmp_path / "vae")}
    run, batch = build(tmp_path, FAMILIES["sd3"], task=task)
    tiles = preview(run, batch)
    assert tiles is not None
    assert tiles.shape == (2, 3, 16, 16)
    latent = torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        wanted = network.decode(latent / network.config.scaling_factor + 0.1).sample
    torch.testing.assert_close(
        task_of(run).to_image(latent), (wanted / 2 + 0.5).clamp(0, 1), rtol=0, atol=1e-5
    )


def test_a_preview_by_an_autoencoder_is_planned_with_it(tmp_path: Path) -> None:
    diffusers()
    autoencoder(4, 0.1).save_pretrained(str(tmp_path / "vae"))
    task = {"objective": "flow", "condition_dropout": 0.0, "decoder": str(tmp_path / "vae")}
    run, _ = build(tmp_path, FAMILIES["sd3"], task=task)
    with Session(find_gpu("rtx3060"), Calibration()) as session:
        plan = session.plan([run.config], whole_run=True)[0].get()
    assert plan.moments["preview"].problem == ""
    assert plan.moments["preview"].allocated > 0


def test_levels_reach_the_library_s_network_in_float32(tmp_path: Path) -> None:
    run, _ = build(tmp_path, UNET, "digits", precision={"mode": "bf16-pure"})
    seen = []
    task = task_of(run)
    task.net.inner.time_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        task.net(torch.zeros(2, 1, 8, 8), to_ticks(torch.tensor([801.0, 803.5])))
    assert seen[0].tolist() == [801.0, 803.5]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"_class_name": "PixArtTransformer2DModel"},
            "its config.json is of PixArtTransformer2DModel; known here",
        ),
        (FAMILIES["unet"] | {"num_class_embeds": 7}, "has 7 classes, and the data set 2"),
        (FAMILIES["unet"] | {"in_channels": 3}, "sees 3 channels, and the data's latent has 4"),
        (
            FAMILIES["unet"] | {"num_class_embeds": 2},
            "task.condition_dropout: the network has vectors for 2 classes",
        ),
        (UNET | {"block_out_channels": [8]}, "diffusers refused to build UNet2DModel"),
    ],
)
def test_folders_that_do_not_fit_are_one_line(
    config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        build(tmp_path, config)


def test_a_folder_without_a_config_is_one_line(tmp_path: Path) -> None:
    diffusers()
    config = load_config(
        {"model": {"name": "diffusers", "folder": str(tmp_path)}, "dataset": "digits"}
    )
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        build_run(config, torch.device("cpu"), build_datasets(config)[0].spec)


@pytest.mark.parametrize(
    ("shape", "millions"),
    [
        ("sd15", 859.5),
        ("sdxl", 2567.5),
        ("sd3_medium", 2028.3),
        ("flux_dev", 11901.4),
        ("dit_xl_2", 749.8),
    ],
)
def test_published_shapes_have_the_published_number_of_weights(shape: str, millions: float) -> None:
    library = diffusers()
    from mpt.systems.diffusion.nn.shared.published_shapes import SHAPES

    config = dict(SHAPES[shape])
    kind = getattr(library, config.pop("_class_name"))
    with torch.device("meta"):
        network = kind(**config)
    assert sum(p.numel() for p in network.parameters()) / 1e6 == pytest.approx(millions, rel=0.005)
