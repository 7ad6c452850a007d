"""Every shipped configuration begins with the command that runs it, is valid, and takes a step."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from mpt.config.finding.shipped import shipped_configs
from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.step.step import update
from mpt.seams import Dataset

ROOT = Path(__file__).parent.parent
RECIPES = [*shipped_configs().values()]
UNET = (
    "block_out_channels: [8, 16], down_block_types: [DownBlock2D, CrossAttnDownBlock2D], norm_num_groups: 4, "
    "up_block_types: [CrossAttnUpBlock2D, UpBlock2D], layers_per_block: 1, attention_head_dim: 4"
)
SMALLER = {
    "resnet50_imagefolder": ["model.image_size=32"],
    "yolofuse_mid": ["model.image_size=64"],
    "dain_vimeo": ["model.size=small", "optimizer.parts={}"],
    "stylegan2_256": ["model.image_size=32", "model.channel_base=256"],
    "sd15_lora": ["model.options={" + UNET + ", cross_attention_dim: 12}"],
    "sdxl_lora": [
        "model.options={" + UNET + ", cross_attention_dim: 12, transformer_layers_per_block: 1, "
        "addition_time_embed_dim: 4, projection_class_embeddings_input_dim: 34}"
    ],
    "sd3_lora": [
        "model.options={num_layers: 1, num_attention_heads: 2, attention_head_dim: 8, caption_projection_dim: 16, "
        "joint_attention_dim: 12, pooled_projection_dim: 10, pos_embed_max_size: 8, sample_size: 8}"
    ],
    "flux_lora": [
        "model.options={num_layers: 1, num_single_layers: 1, num_attention_heads: 2, attention_head_dim: 8, "
        "joint_attention_dim: 12, pooled_projection_dim: 10, axes_dims_rope: [2, 2, 4]}"
    ],
    "xseg": ["model.image_size=64", "model.width=4"],
    "saehd_512": [
        f"model.{size}"
        for size in ("image_size=64", "ae_dims=16", "e_dims=8", "d_dims=8", "d_mask_dims=8")
    ],
}
"""Files that describe training for days: the same parts at sizes that a CPU takes a step of."""
BATCH = {"dain_vimeo": 1, "dain_demo": 1, "rife_demo": 2}
"""Where even four samples take long."""


def head_command(path: Path) -> list[str]:
    """Return the words of the command that the first line gives."""
    return shlex.split(path.read_text("utf-8").splitlines()[0].removeprefix("# "))


def named(path: Path) -> str:
    return path.stem


def folder_of_images(folder: Path) -> Path:
    """Write two classes of small pictures, to train and to test on."""
    for split in ("train", "val"):
        for number, colour in enumerate(("red", "blue")):
            (folder / split / colour).mkdir(parents=True)
            for sample in range(4):
                Image.new("RGB", (40, 36), (200 * number, 10 * sample, 90)).save(
                    folder / split / colour / f"{sample}.png"
                )
    return folder


def folder_of_triplets(folder: Path) -> Path:
    """Write four sequences of three frames in Vimeo-90K's layout."""
    names = [f"00001/{number:04d}" for number in range(1, 5)]
    for name in names:
        (folder / "sequences" / name).mkdir(parents=True)
        for frame in (1, 2, 3):
            Image.new("RGB", (64, 64), (60 * frame, 40, 90)).save(
                folder / "sequences" / name / f"im{frame}.png"
            )
    for split in ("train", "test"):
        (folder / f"tri_{split}list.txt").write_text("\n".join(names) + "\n")
    return folder


def folder_of_latents(folder: Path, channels: int) -> Path:
    """Write four random latents with embeddings of text, to train and to test on."""
    shapes = {"latent": (channels, 8, 8), "text": (5, 12), "pooled": (10,), "sizes": (6,)}
    for split in ("train", "test"):
        save_file(
            {name: torch.randn(4, *shape) for name, shape in shapes.items()},
            folder / f"{split}.safetensors",
        )
    return folder


def data_for(config: Config, folder: Path) -> Dataset:
    """Return what the configuration is trained on, or something of the same layout where that is not shipped."""
    if config.dataset.name == "image_folder":
        settings = [f"dataset.root={folder_of_images(folder)}", "dataset.workers=0"]
        config = load_config(
            config.to_data(),
            settings,
        )
    elif config.dataset.name == "faceset":
        model = {"name": "saehd", "image_size": config.model.settings.image_size}
        config = load_config(
            {"model": model, "dataset": {"name": "procedural_faces", "count": 4, "test_count": 1}}
        )
    elif config.dataset.name == "labelled_faces":
        model = {"name": "xseg", "image_size": config.model.settings.image_size}
        config = load_config(
            {"model": model, "dataset": {"name": "procedural_masks", "count": 2, "test_count": 1}}
        )
    elif config.dataset.name == "latents":
        channels = config.to_data()["dataset"]["assumed"]["latent"][0]
        config = load_config(
            config.to_data(), [f"dataset.root={folder_of_latents(folder, channels)}"]
        )
    elif config.dataset.name == "detection_files":
        model = {"name": "yolofuse", "image_size": config.model.settings.image_size}
        config = load_config(
            {"model": model, "dataset": {"name": "rgb_ir_scenes", "count": 4, "test_count": 1}}
        )
    elif config.dataset.name == "frame_triplets":
        settings = [
            f"dataset.root={folder_of_triplets(folder)}",
            "dataset.workers=0",
            "dataset.crop=[64, 64]",
        ]
        config = load_config(config.to_data(), settings)
    return build_datasets(config)[0]


@pytest.mark.parametrize("path", RECIPES, ids=named)
def test_the_first_line_is_the_command_that_runs_it(path: Path) -> None:
    assert path.read_text("utf-8").startswith("# mpt train ")
    assert head_command(path)[:3] == ["mpt", "train", f"@{path.stem}"]


@pytest.mark.parametrize("path", RECIPES, ids=named)
def test_the_head_says_more_than_the_command(path: Path) -> None:
    """What it is; and what it reaches in how long, or that it was not run."""
    head = path.read_text("utf-8").split("\n", 1)[1]
    comment = re.match(r"(?:#.*\n)+", head)
    assert comment
    assert len(comment.group().replace("#", "").split()) >= 8


@pytest.mark.parametrize("path", RECIPES, ids=named)
def test_the_file_is_valid_with_the_overrides_of_its_command(path: Path) -> None:
    words = head_command(path)[3:]
    overrides = [word for word in words if "=" in word]
    config = load_config(path, overrides)
    assert load_config(config.to_yaml()) == config


@pytest.mark.parametrize("path", RECIPES, ids=named)
def test_the_file_takes_a_step(path: Path, tmp_path: Path) -> None:
    overrides = [word for word in head_command(path)[3:] if "=" in word]
    batch_size = BATCH.get(path.stem, 4)
    config = load_config(
        path, [*overrides, *SMALLER.get(path.stem, []), f"train.batch_size={batch_size}"]
    )
    if config.model.name == "diffusers" and importlib.util.find_spec("diffusers") is None:
        pytest.skip("diffusers is not installed (pip install 'mpt-trainer[diffusion]')")
    data = data_for(config, tmp_path)
    run = build_run(config, torch.device("cpu"), data.spec)
    batch = data.spec.as_floats(data.fetch(range(batch_size), 0))
    for phase in run.phases:
        done = update(run, phase, batch)
        assert done.finite
        assert done.losses
        assert all(torch.isfinite(value).all() for value in done.losses.values())


def test_the_demos_differ_in_their_precision_alone() -> None:
    """`dcgan_fp32` is what the others are compared with, so everything else must be the same."""
    configs = [
        load_config(ROOT / "configs" / f"dcgan_{mode}.yaml").to_data()
        for mode in ("fp32", "amp", "o1")
    ]
    for config in configs:
        del config["precision"], config["name"]
    assert configs[0] == configs[1] == configs[2]
