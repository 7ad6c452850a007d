"""Weights & Biases, by its own settings: project, entity and mode come from `WANDB_PROJECT` and the like, as its
documentation says. `WANDB_MODE=offline` writes into the run's folder `wandb`, for `wandb sync` later.

A resume continues in the same W&B run, whose number is kept in the run's folder.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpt.boards.feed import Board
from mpt.foreign.files import read_text
from mpt.run.process.files import write_atomically
from mpt.run.records.layout import RunDirectory


class WeightsAndBiases(Board):
    """One W&B run."""

    def __init__(self, run: RunDirectory, settings: Mapping[str, Any]) -> None:
        import wandb

        self.wandb: Any = wandb
        known = run.path / "wandb-id.txt"
        if not known.is_file():
            write_atomically(known, uuid.uuid4().hex[:12] + "\n")
        self.run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "mpt"),
            name=run.name,
            dir=str(run.path),
            id=read_text(known, 1 << 10).strip(),
            resume="allow",
            config=dict(settings),
            settings=wandb.Settings(silent=True),
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def picture(self, step: int, path: Path, name: str = "preview") -> None:
        self.run.log({name: self.wandb.Image(str(path))}, step=step)

    def close(self) -> None:
        self.run.finish()


open_board = WeightsAndBiases
