"""Make pictures of a class with a pipeline, for prior preservation: what the network is to keep while it learns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.arguments import Device


@dataclass(frozen=True)
class Command:
    """Make pictures of a class with a pipeline, for `mpt diffusion prepare --prior`.

    Each has a seed of its own: what is there already is kept, and a second call continues.

    Examples:
      mpt diffusion prior PIPELINE "a photo of a dog" -o prior
    """

    pipeline: Annotated[Path, typer.Argument(metavar="PIPELINE", show_default=False)]
    """A local folder in diffusers' layout: Stable Diffusion 1, 2, SDXL, SD3 or Flux."""
    caption: Annotated[str, typer.Argument(metavar="CAPTION", show_default=False)]
    """The class, such as "a photo of a dog": the text that they are made from, and their caption."""
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR")] = Path("data/prior")
    """The folder to write into."""
    count: Annotated[int, typer.Option(min=1)] = 100
    """How many."""
    size: Annotated[str, typer.Option(metavar="SIDE|WIDTHxHEIGHT")] = "512"
    """Their size in pixels."""
    steps: Annotated[int, typer.Option(min=1)] = 30
    """Of the pipeline's scheduler."""
    seed: int = 0
    """Of the noise."""
    device: Device = None


def run(command: Command) -> None:
    """Make what is missing."""
    from mpt.engine.building.devices import choose_device
    from mpt.systems.diffusion.commands.shared.pipelines import open_pipeline
    from mpt.systems.diffusion.commands.shared.sampling import Wanted, make_pictures
    from mpt.systems.diffusion.commands.shared.sizes import read_size

    width, height = read_size(command.size)
    pipeline = open_pipeline(command.pipeline, choose_device(command.device or "auto"), whole=True)
    made = make_pictures(
        pipeline,
        Wanted(command.caption, width, height, command.steps, command.seed),
        command.output,
        command.count,
    )
    print(f"{command.output}: {made} pictures made, {command.count - made} were there")
