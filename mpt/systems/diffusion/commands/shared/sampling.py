"""Pictures from a caption by a whole pipeline, each with a seed of its own."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import torch

from mpt.errors import ConfigError
from mpt.run.process.files import failures_explained, write_atomically
from mpt.systems.diffusion.commands.shared.pipelines import Pipeline


@dataclass(frozen=True)
class Wanted:
    """A kind of picture."""

    caption: str
    width: int
    height: int
    steps: int
    seed: int


def make_pictures(pipeline: Pipeline, wanted: Wanted, folder: Path, count: int) -> int:
    """Write the pictures that are missing of `count`, with their captions; return how many those were.

    Raises ConfigError for a size that the pipeline refuses.
    """
    folder = folder.expanduser()
    with failures_explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    pipeline.parts.set_progress_bar_config(disable=True)
    made = 0
    for number in range(count):
        path = folder / f"{number:05d}.png"
        if path.is_file() and path.with_suffix(".txt").is_file():
            continue
        picture = io.BytesIO()
        try:
            image = pipeline.parts(
                wanted.caption,
                width=wanted.width,
                height=wanted.height,
                num_inference_steps=wanted.steps,
                generator=torch.Generator().manual_seed(wanted.seed * 1_000_003 + number),
            ).images[0]
        except ValueError as error:
            raise ConfigError(
                f"--size: {wanted.width}x{wanted.height}: {str(error).splitlines()[0]}"
            ) from error
        image.save(picture, format="PNG")
        with failures_explained(path):
            write_atomically(path, picture.getvalue())
            write_atomically(path.with_suffix(".txt"), wanted.caption.encode())
        made += 1
    return made
