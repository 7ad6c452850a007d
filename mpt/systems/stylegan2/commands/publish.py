"""Write a run's networks as a network pickle, as NVIDIA's programs load it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.arguments import Runs


@dataclass(frozen=True)
class Command:
    """Write a run's networks as a network pickle (.pkl), or their tensors by NVIDIA's names (.pt).

    generate.py, style_mixing.py and train.py --resume of stylegan2-ada-pytorch load the pickle, and gen_images.py of
    stylegan3. It holds no text of theirs: their loader makes the networks by its own classes.

    Examples:
      mpt stylegan2 publish RUN network.pkl
    """

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)]
    """A run's name or folder, or a checkpoint's folder."""
    output: Annotated[Path, typer.Argument(metavar="OUT", show_default=False)]
    """The .pkl or .pt file to write."""
    like: Annotated[Path | None, typer.Option(metavar="NETWORK.pkl")] = None
    """A network pickle of the same architecture: only its numbers are exchanged."""
    overwrite: bool = False
    """Write over a file that is there."""
    runs: Runs = "runs"


def run(command: Command) -> None:
    """Write as the arguments say."""
    import io

    import torch

    from mpt.config.checking.precision_names import FLOAT32
    from mpt.engine.state.moving_averages import evaluated_module
    from mpt.errors import ConfigError
    from mpt.inference.half import rebuild
    from mpt.inference.trained import open_trained
    from mpt.run.process.files import write_atomically
    from mpt.systems.stylegan2.inference.publishing import (
        like_pattern,
        network_bytes,
        published_tensors,
    )
    from mpt.systems.stylegan2.nn.stylegan2 import Discriminator, Generator, Settings

    if command.output.suffix not in (".pkl", ".pt"):
        raise ConfigError(f"OUT: found {command.output}; name a .pkl or a .pt file")
    if command.output.exists() and not command.overwrite:
        raise ConfigError(f"{command.output} is there already; name another, or add --overwrite")
    trained = open_trained(command.run, Path(command.runs), "cpu")
    task = rebuild(trained, FLOAT32).task
    settings, gen, disc = (
        trained.config.model.native_settings(),
        task.modules.get("gen"),
        task.modules.get("disc"),
    )
    twin = evaluated_module(task, "gen") if gen is not None else None
    if not (
        isinstance(settings, Settings)
        and isinstance(gen, Generator)
        and isinstance(disc, Discriminator)
    ):
        raise ConfigError(
            f"RUN: its model is {trained.config.model.name}; only stylegan2 has NVIDIA's names"
        )
    assert isinstance(twin, Generator)
    tensors = published_tensors(settings, gen, twin, disc)
    if command.output.suffix == ".pt":
        content = io.BytesIO()
        torch.save(tensors, content)
        data = content.getvalue()
    elif command.like is not None:
        data = like_pattern(command.like, settings, tensors)
    else:
        data = network_bytes(settings, tensors)
    write_atomically(command.output, data)
    print(f"wrote {command.output}: {len(tensors)} tensors of G, D and G_ema")
    if command.output.suffix == ".pt":
        print(
            "load G with G.load_state_dict({k[2:]: v for k, v in torch.load(FILE).items() if k[:2] == 'G.'}, False)"
        )
