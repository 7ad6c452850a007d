"""Draw a generator's pictures: by seeds, as a grid, as a walk between styles, as a table of mixed styles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mpt.commands.cli.arguments import Device, Runs


@dataclass(frozen=True)
class Command:
    """Draw pictures from a run of stylegan2 or an NVIDIA network pickle (StyleGAN2-ADA, StyleGAN3).

    A seed's picture is that of NVIDIA's program: NumPy's normal numbers, G_ema, the network's own mean style.

    Examples:
      mpt stylegan2 generate ffhq.pkl --seeds 85,100 --noise none
      mpt stylegan2 generate RUN --seeds 1,5,9 --walk
    """

    run: Annotated[str, typer.Argument(metavar="RUN|NETWORK.pkl", show_default=False)]
    """A run's name or folder, a checkpoint's folder, or a network pickle."""
    output: Annotated[str, typer.Option("--output", "-o", metavar="DIR")] = "pictures"
    """The folder to write into."""
    seeds: Annotated[str | None, typer.Option(metavar="0-8,11")] = None
    """The pictures' seeds; by default --count of them from --seed on."""
    count: Annotated[int | None, typer.Option(min=1)] = None
    """How many pictures, 16 by default."""
    seed: Annotated[int | None, typer.Option(min=0)] = None
    """The first seed, 0 by default."""
    truncation: Annotated[float | None, typer.Option(min=0, max=1)] = None
    """How far styles go from their mean; 1, the default, leaves them as they are."""
    cutoff: Annotated[int | None, typer.Option(min=1)] = None
    """The number of layers that are truncated; all by default."""
    noise: str = "const"
    """const (the network's fixed noise), random or none."""
    label: Annotated[int | None, typer.Option("--class", min=0, metavar="NUMBER")] = None
    """The class, of a network that has classes."""
    walk: bool = False
    """Write walk.mp4 too: the way through the styles of all seeds and back to the first."""
    mix: Annotated[str | None, typer.Option(metavar="SEEDS:SEEDS")] = None
    """Write mix.png and mix.mp4 too: rows with the styles of the columns in some layers; as 85,100:55,821."""
    mix_layers: Annotated[str, typer.Option(metavar="0-6")] = "0-6"
    """The layers that come from the columns."""
    frames: Annotated[int, typer.Option(min=2)] = 60
    """Frames of a video from one seed to the next, at 30 a second."""
    half: bool = False
    """Compute the resolutions that the network has for it in float16."""
    batch_size: Annotated[int, typer.Option(min=1)] = 8
    """Pictures at once."""
    device: Device = None
    runs: Runs = "runs"


def from_infer(
    task: str | None, inputs: Sequence[tuple[str | None, Path]]
) -> dict[str, Any] | None:
    """Return this command's fields for `mpt infer NETWORK.pkl`."""
    from mpt.systems.stylegan2.nn.weights.network_pickle import is_network_pickle

    return {} if task is None and len(inputs) == 1 and is_network_pickle(inputs[0][1]) else None


def run(command: Command) -> None:
    """Draw as the arguments say."""
    from mpt.systems.stylegan2.inference.drawing import Wishes, draw

    count = 16 if command.count is None else command.count
    first = command.seed or 0
    wishes = Wishes(
        seeds=command.seeds or f"{first}-{first + count - 1}",
        truncation=1.0 if command.truncation is None else command.truncation,
        cutoff=command.cutoff,
        noise=command.noise,
        label=command.label,
        walk=command.walk,
        mix=command.mix,
        mix_layers=command.mix_layers,
        frames=command.frames,
        batch_size=command.batch_size,
    )
    where = (command.run, Path(command.runs), command.device or "auto", command.half)
    draw(where, Path(command.output), wishes)
