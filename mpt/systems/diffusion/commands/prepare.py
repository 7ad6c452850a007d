"""Encode pictures and captions once, for fine-tuning: latents and text embeddings in files, and a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.arguments import Device


@dataclass(frozen=True)
class Command:
    """Encode pictures and captions once, for fine-tuning.

    Writes train.safetensors and test.safetensors, as dataset latents reads them, and train.yaml, which trains a LoRA
    on them. Encoders are not needed after that. Files that were made of the same are kept.

    Examples:
      mpt diffusion prepare PIPELINE pictures -o data/mine --size 512
    """

    pipeline: Annotated[Path, typer.Argument(metavar="PIPELINE", show_default=False)]
    """A local folder in diffusers' layout: Stable Diffusion 1, 2, SDXL, SD3 or Flux."""
    pictures: Annotated[Path, typer.Argument(metavar="PICTURES", show_default=False)]
    """A folder of pictures, each with a caption in a .txt of its name; a folder 10_name counts ten times."""
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR")] = Path("data/latents")
    """The folder to write into."""
    size: Annotated[str, typer.Option(metavar="SIDE|WIDTHxHEIGHT")] = "512"
    """Pictures are cut around the centre to these proportions, and resized."""
    buckets: Annotated[int | None, typer.Option(min=8, metavar="STEP", show_default=False)] = None
    """Keep proportions: several sizes of at most --size's pixels, their sides multiples of this; 64 is usual."""
    masks: Path | None = None
    """A folder of masks by the pictures' names: the loss counts at white pixels. Also read: a-masklabel.png."""
    prior: Path | None = None
    """A folder of pictures of the class with captions (`mpt diffusion prior`), of which as many are trained on."""
    prior_weight: Annotated[float, typer.Option(min=0)] = 1.0
    """How much the loss of those counts."""
    caption: str | None = None
    """The caption of pictures without one."""
    test_fraction: Annotated[float, typer.Option(min=0, max=0.9)] = 0.1
    """The share held out; two pictures at least."""
    text_encoders: bool = False
    """Keep captions as tokens: the text encoders stay with the network, and adapters train them too."""
    seed: int = 0
    """Of the latents' noise."""
    device: Device = None


def run(command: Command) -> None:
    """Encode as the arguments say."""
    from mpt.systems.diffusion.commands.shared.encoding import Wish, prepare
    from mpt.systems.diffusion.commands.shared.sizes import read_size

    width, height = read_size(command.size)
    prepare(
        Wish(
            command.pipeline,
            command.pictures,
            command.output,
            width,
            height,
            command.caption,
            command.test_fraction,
            command.seed,
            command.device or "auto",
            command.buckets,
            command.masks,
            command.prior,
            command.prior_weight,
            command.text_encoders,
        )
    )
