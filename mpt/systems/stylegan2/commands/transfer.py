"""Write a configuration that trains a published network on with one's own pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from mpt.errors import ConfigError
from mpt.run.process.files import write_new

LAYERS_OF_BLOCK = ("first", "second", "skip")
"""Of the discriminator, in the order in which Freeze-D counts them; the layer that reads the picture comes first."""


@dataclass(frozen=True)
class Command:
    """Write a configuration that starts from an NVIDIA network pickle (StyleGAN2-ADA), at its settings for transfer.

    Batch, rate, R1's weight and averages follow the size as in NVIDIA's `auto`; augmentation is adaptive, and fast at
    first. Blocks of resolutions that the network does not have begin anew.

    Examples:
      mpt stylegan2 transfer ffhq.pkl --data pictures --size 256 -o transfer.yaml
    """

    network: Annotated[Path, typer.Argument(metavar="NETWORK.pkl", show_default=False)]
    """The network pickle."""
    data: Annotated[Path, typer.Option(metavar="FOLDER", show_default=False)]
    """A folder of pictures, in any sub-folders; of a network with classes, a folder for each class."""
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE")] = Path("transfer.yaml")
    """The configuration to write."""
    size: int | None = None
    """Pixels of the new network's pictures; the published network's by default."""
    batch: Annotated[int | None, typer.Option(min=1)] = None
    """Pictures of a step."""
    freeze_d: Annotated[int, typer.Option(min=0)] = 0
    """Freeze-D: the first layers of the discriminator that stay as they are; NVIDIA's examples have 10."""


def run(command: Command) -> None:
    """Write the configuration and say how it is used."""
    from mpt.config.load import load_config
    from mpt.systems.stylegan2.nn.stylegan2 import SIZES
    from mpt.systems.stylegan2.nn.weights.names import settings_of
    from mpt.systems.stylegan2.nn.weights.network_pickle import (
        is_network_pickle,
        read_network_pickle,
    )

    if not is_network_pickle(command.network):
        raise ConfigError(
            f"NETWORK: {command.network} is no network pickle of NVIDIA's; name one (.pkl)"
        )
    opened = read_network_pickle(command.network)
    if "D" not in opened.networks or "G" not in opened.networks:
        raise ConfigError(
            f"NETWORK: {command.network} holds no G and D to train, only a G_ema to draw with"
        )
    model = settings_of(
        opened.networks["G"].arguments, opened.networks["D"].arguments, str(command.network)
    )
    size = command.size or model["image_size"]
    if size not in SIZES:
        raise ConfigError(f"--size: found {size}; allowed are {', '.join(map(str, SIZES))}")
    config = configuration(command, {**model, "image_size": size, "weights": str(command.network)})
    load_config(config)
    text = yaml.safe_dump(config, sort_keys=False, default_flow_style=False)
    write_new(command.output, f"# Trains {command.network.name} on with {command.data}.\n{text}")
    print(f"wrote {command.output}: mpt plan {command.output}, then mpt train {command.output}")


def configuration(command: Command, model: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration: NVIDIA's `auto` settings for one GPU, and those that a transfer changes."""
    size = model["image_size"]
    batch = command.batch or max(min(4096 // size, 32), 1)
    train: dict[str, Any] = {
        "ema": {"half_life_kimg": batch * 10 / 32, "rampup": None},
        "steps": 25_000_000 // batch,
        "batch_size": batch,
        "log_every": 50,
        "evaluate_every": 10000,
        "sample_every": 2000,
        "checkpoint_every": 2000,
    }
    frozen = frozen_layers(command.freeze_d, size)
    if frozen:
        train["freeze"] = frozen
    return {
        "model": model,
        "task": {
            "r1_gamma": round(0.0002 * size**2 / batch, 6),
            "ada_target": 0.6,
            "ada_kimg": 100.0,
        },
        "dataset": {
            "name": "image_folder",
            "root": str(command.data),
            "flat": not model["classes"],
        },
        "precision": {"mode": "native" if model["num_fp16_res"] else "fp32"},
        "optimizer": {
            "name": "adam",
            "lr": 0.002 if size >= 1024 else 0.0025,
            "betas": [0.0, 0.99],
        },
        "train": train,
        "name": f"transfer-{size}",
    }


def frozen_layers(count: int, size: int) -> list[str]:
    """Return globs of the discriminator's first layers, in Freeze-D's order. Raises ConfigError beyond the last."""
    blocks = size.bit_length() - 3
    layers = ["disc.from_image.*"]
    layers += [
        f"disc.blocks.{block}.{layer}.*" for block in range(blocks) for layer in LAYERS_OF_BLOCK
    ]
    if count > len(layers):
        raise ConfigError(
            f"--freeze-d: found {count}; a discriminator of {size} pixels has {len(layers)} such layers"
        )
    return layers[:count]
