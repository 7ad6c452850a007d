"""TensorBoard: the configuration, scalars, previews, drawn evaluations and plots in the run's folder `tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import yaml
from PIL import Image

from mpt.boards.feed import Board
from mpt.run.records.layout import RunDirectory


class TensorBoard(Board):
    """Writes event files."""

    def __init__(self, run: RunDirectory, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(log_dir=str(run.path / "tensorboard"))
        lines = (
            f"    {line}" for line in yaml.safe_dump(dict(settings), sort_keys=False).splitlines()
        )
        self.writer.add_text("configuration", "\n".join(lines), 0)  # Markdown: a block of code

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def picture(self, step: int, path: Path, name: str = "preview") -> None:
        with Image.open(path) as image:
            self.writer.add_image(
                name, numpy.asarray(image.convert("RGB")), step, dataformats="HWC"
            )

    def close(self) -> None:
        self.writer.close()


open_board = TensorBoard
