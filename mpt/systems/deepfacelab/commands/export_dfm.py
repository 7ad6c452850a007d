"""Write a trained model as one `.dfm` file for DeepFaceLive."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.arguments import Runs
from mpt.config.precision_names import FLOAT32


@dataclass(frozen=True)
class Command:
    """Write a model as one .dfm file for DeepFaceLive."""

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)]
    """A trained run or a checkpoint."""
    output: Annotated[Path, typer.Argument(metavar="FILE", show_default=False)]
    """The file, ending in .dfm."""
    quantized: bool = False
    """Write convolutions in float16, as DeepFaceLab's "Export quantized": a smaller file, faster on cards."""
    runs: Runs = "runs"


def run(command: Command) -> None:
    """Write the file and say how it was checked."""
    from mpt.config.sizes import describe_bytes
    from mpt.errors import ConfigError
    from mpt.inference.half import rebuild
    from mpt.inference.trained import open_trained
    from mpt.systems.deepfacelab.inference.dfm import write_dfm

    if command.output.suffix != ".dfm":
        raise ConfigError(f"{command.output} does not end in .dfm")
    trained = open_trained(command.run, Path(command.runs), "cpu", which="newest")
    if trained.config.model.name != "saehd":
        raise ConfigError(f"{trained.directory.path}: its model is {trained.config.model.name}; a .dfm holds a saehd")
    size = trained.config.model.settings.image_size
    difference = write_dfm(
        command.output, rebuild(trained, FLOAT32).task.modules["autoencoder"], size, in_half=command.quantized
    )
    checked = (
        "install onnxruntime to have it run" if difference is None else f"ONNX Runtime differs by {difference:.1g}"
    )
    print(f"wrote {command.output}: {size} pixels, {describe_bytes(command.output.stat().st_size)}; {checked}")
