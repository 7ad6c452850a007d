"""Scalars for TensorBoard, for those who have the habit. Needs the package `tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from mpt.errors import ConfigError
from mpt.run.layout import RunDirectory


def check_installed() -> None:
    """Raise ConfigError if TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "train.tensorboard: TensorBoard is not installed: `pip install tensorboard`, or leave it off."
        )


class TensorBoardWriter:
    """Writes scalars into `tensorboard/` of a run. Call `check_installed` first."""

    def __init__(self, run: RunDirectory) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(log_dir=str(run.path / "tensorboard"))

    def write(self, step: int, values: Mapping[str, Any], prefix: str = "") -> None:
        """Write the numbers of a mapping, nested ones under `outer/inner`; what is no number is left out."""
        for name, value in values.items():
            if isinstance(value, Mapping):
                self.write(step, value, f"{prefix}{name}/")
            elif isinstance(value, int | float) and not isinstance(value, bool):
                self.writer.add_scalar(f"{prefix}{name}", value, step)

    def close(self) -> None:
        """Write out what is pending and close the file."""
        self.writer.close()
