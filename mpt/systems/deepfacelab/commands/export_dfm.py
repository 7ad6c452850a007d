"""Write a trained model as one `.dfm` file for DeepFaceLive."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpt.commands.cli.arguments import Runs
from mpt.config.checking.precision_names import FLOAT32
from mpt.version import VERSION

if TYPE_CHECKING:
    from torch import Tensor

    from mpt.inference.trained import Trained

FACES = 16


@dataclass(frozen=True)
class Command:
    """Write a model as one .dfm file for DeepFaceLive.

    Examples:
      mpt deepfacelab export-dfm RUN model.dfm
    """

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)]
    """A trained run or a checkpoint."""
    output: Annotated[Path, typer.Argument(metavar="FILE", show_default=False)]
    """The file, ending in .dfm."""
    quantized: bool = False
    """Write convolutions in float16, as DeepFaceLab's "Export quantized": a smaller file, faster on cards."""
    gate: float = 40.0
    """The least PSNR in dB of the file's swaps of test faces against float32's, if the run's data are here."""
    runs: Runs = "runs"


def run(command: Command) -> None:
    """Write the file and say how it was checked."""
    from mpt.config.sizes import describe_bytes
    from mpt.engine.state.moving_averages import evaluated_module
    from mpt.errors import ConfigError
    from mpt.inference.half import rebuild
    from mpt.inference.trained import open_trained
    from mpt.systems.deepfacelab.inference.dfm import write_dfm

    if command.output.suffix != ".dfm":
        raise ConfigError(f"{command.output} does not end in .dfm")
    trained = open_trained(command.run, Path(command.runs), "cpu", which="newest")
    if trained.config.model.name != "saehd":
        raise ConfigError(
            f"{trained.directory.path}: its model is {trained.config.model.name}; a .dfm holds a saehd"
        )
    size = trained.config.model.settings.image_size
    autoencoder = evaluated_module(rebuild(trained, FLOAT32).task, "autoencoder")
    faces, about = (
        faces_to_try(trained),
        {"mpt_run": trained.directory.name, "mpt_step": str(trained.loaded.step)},
    )
    about |= {"mpt_version": VERSION, "mpt_dtype": "float16" if command.quantized else "float32"}
    checked = write_dfm(
        command.output,
        autoencoder,
        size,
        in_half=command.quantized,
        faces=faces,
        gate=command.gate,
        about=about,
    )
    said = "install onnxruntime to have it run"
    if checked is not None:
        seen = (
            f"{checked.faces} test faces"
            if checked.are_real
            else "noise: the run's data are not here"
        )
        said = f"ONNX Runtime differs by {checked.difference:.1g}; swaps PSNR {checked.psnr:.0f} dB, on {seen}"
    print(
        f"wrote {command.output}: {size} pixels, {describe_bytes(command.output.stat().st_size)}; {said}"
    )


def faces_to_try(trained: Trained) -> Tensor | None:
    """Return destination faces (b 3 h w) in [0, 1] of the run's test data, None if they are not here."""
    from mpt.data.loading.absent import AbsentDataset

    if isinstance(trained.test_data, AbsentDataset):
        return None
    data = trained.test_data
    batch = data.fetch(range(min(FACES, len(data))), 0)
    faces: Tensor = batch["dst_target"].float().clamp(0, 1)
    return faces
