"""`mpt train --smoke N`: N steps of everything a run does, in a throw-away folder: train, save, stop, resume,
evaluate, infer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mpt.config.schema import Config
from mpt.errors import Interrupted
from mpt.run.records.layout import THROWN_AWAY
from mpt.run.records.temporary import temporary_folder

if TYPE_CHECKING:
    from mpt.parallel.world import World

SMOKE: dict[str, Any] = {
    "epochs": None,
    "log_every": 1,
    "evaluate_every": 0,
    "early_stopping": None,
    "sample_every": 0,
    "checkpoint_every": 0,
    "plan_memory": False,
    "on_end": None,
    "tensorboard": False,
    "boards": [],
}
"""Changes of a smoke run to the settings of `train`, in addition to the number of steps."""


class Train(Protocol):
    """Trains below a folder of runs, as far as a step; returns the run's folder."""

    def __call__(
        self, config: Config, *, runs: str, resume: str | None, stop_after: int | None = None
    ) -> Path | None: ...


def smoke(
    config: Config, steps: int, device: str | None, train: Train, world: World | None
) -> None:
    """Run N steps in two halves with a resume between them, then inference. Raises the errors of a real run."""
    from mpt.commands import infer

    short = dataclasses.replace(
        config, train=config.train.model_copy(update={"steps": steps, **SMOKE})
    )
    with temporary_folder(THROWN_AWAY) as own:
        folder = str(own) if world is None else world.tell(str(own))
        try:
            if steps > 1:
                train(short, runs=folder, resume=None, stop_after=steps // 2)
            path = train(short, runs=folder, resume="auto" if steps > 1 else None)
        except Interrupted as stop:  # the run was saved in the folder that goes now
            raise Interrupted(
                "smoke: interrupted; nothing of it is kept", stop.exit_code - 128
            ) from stop
        if world is None or world.is_first:
            with contextlib.redirect_stdout(io.StringIO()):
                infer.run(
                    infer.Command(
                        run=str(path), output=str(Path(folder) / "out"), runs=folder, device=device
                    )
                )
