"""Put the face of one video into another: faces out of both, a model trained on them, the frames merged to a video."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

NAME = "swap"
QUALITY = 90
CONFIG = """\
# Written by `mpt deepfacelab swap`: SAEHD with its defaults. --config names another, KEY=VALUE sets one.
model:
  name: saehd
task:
  name: face_swap
dataset:
  name: faceset
  src: src
  dst: dst
optimizer:
  name: adabelief
train:
  steps: 100000
  batch_size: 8
  log_every: 50
  evaluate_every: 5000
  sample_every: 1000
  checkpoint_every: 1000
"""


@dataclass(frozen=True)
class Command:
    """Swap a face from video to video: extract, train and merge, each with its defaults.

    The same command continues where it stopped. Each step can be done again by its own command, in the folder --work.

    Examples:
      mpt deepfacelab swap src.mp4 dst.mp4 --output swapped.mp4 --facelib facelib
    """

    src: Annotated[Path, typer.Argument(metavar="SRC", show_default=False)]
    """The video, or folder of frames, with the face that is drawn."""
    dst: Annotated[Path, typer.Argument(metavar="DST", show_default=False)]
    """The video, or folder of frames, whose face is replaced."""
    output: Annotated[Path, typer.Option(metavar="VIDEO|DIR", show_default=False)]
    """The result."""
    facelib: Annotated[Path, typer.Option(metavar="DIR", show_default=False)]
    """Your DeepFaceLab, or its folder facelib, with S3FD.npy and 2DFAN.npy."""
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", show_default=False)
    ] = None
    """Settings of the training, such as train.steps=20000 or model.image_size=192."""
    work: Annotated[Path | None, typer.Option(metavar="DIR")] = None
    """Folder of the faces and the run; by default alongside the result."""
    config: Annotated[Path | None, typer.Option(metavar="FILE")] = None
    """Another configuration for the training."""
    face_type: Literal["h", "mf", "f", "wf", "head"] = "wf"
    """How much of the head is replaced."""
    size: Annotated[int, typer.Option(min=32, max=4096)] = 512
    """Sides of the extracted faces in pixels."""
    max_faces: Annotated[int, typer.Option(min=0)] = 0
    """The largest that many faces of a frame; 0 for all."""
    device: str | None = None
    """cpu, cuda, ...; by default the best there is."""


def run(command: Command) -> None:
    """Do all three steps. Raises their errors."""
    from mpt.commands.train import Command as TrainArguments
    from mpt.commands.train import run as train
    from mpt.run.process.files import failures_explained, write_atomically
    from mpt.systems.deepfacelab.commands import merge
    from mpt.systems.deepfacelab.commands.shared.extract_faces import extract_faces

    work = command.work or command.output.with_name(f"{command.output.stem}-work")
    with failures_explained(work):
        work.mkdir(parents=True, exist_ok=True)
    faces = {"src": work / "src", "dst": work / "dst"}
    for side, source in (("src", command.src), ("dst", command.dst)):
        print(f"faces of {source}:")
        extract_faces(
            source,
            faces[side],
            command.facelib,
            face_type=command.face_type,
            size=command.size,
            quality=QUALITY,
            most=command.max_faces,
            device=command.device,
        )
    config = command.config
    if config is None:
        config = work / "config.yaml"
        write_atomically(config, CONFIG)
    folders = [f"dataset.{side}={path.resolve()}" for side, path in faces.items()]
    overrides = (*folders, f"dataset.face_type={command.face_type}", *(command.overrides or ()))
    runs = str(work / "runs")
    train(
        TrainArguments(
            str(config), overrides, resume="auto", name=NAME, device=command.device, runs=runs
        )
    )
    merge.run(
        merge.Command(
            run=str(work / "runs" / NAME),
            frames=command.dst,
            aligned=faces["dst"],
            output=command.output,
            device=command.device,
            runs=runs,
            overwrite=True,  # frames of this command that an earlier step of the training drew
        )
    )
