"""`mpt train --smoke N`: N steps of everything a run does, in a throw-away folder: train, save, stop, resume,
evaluate, infer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mpt.commands.cli.arguments import InferArguments, TrainArguments
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
"""What a smoke run changes in the settings of `train`, beside the number of steps."""


class Train(Protocol):
    """`mpt.commands.train.train`."""

    def __call__(
        self, config: Config, arguments: TrainArguments, stop_after: int | None = None, world: World | None = None
    ) -> Path | None: ...


def smoke(config: Config, arguments: TrainArguments, train: Train, world: World | None) -> None:
    """Run N steps in two halves with a resume between them, then inference. Raises what a real run would raise."""
    from mpt.commands import infer

    steps = arguments.smoke
    assert steps is not None
    short = dataclasses.replace(config, train=config.train.model_copy(update={"steps": steps, **SMOKE}))
    is_first = world is None or world.is_first
    with temporary_folder(THROWN_AWAY) as own:
        folder = str(own) if world is None else world.tell(str(own))
        once = dataclasses.replace(arguments, runs=folder, smoke=None, resume=None)
        try:
            if steps > 1:
                train(short, once, steps // 2, world)
                once = dataclasses.replace(once, resume="auto")
            path = train(short, once, world=world)
        except Interrupted as stop:  # the run was saved in the folder that goes now
            raise Interrupted("smoke: interrupted; nothing of it is kept", stop.exit_code - 128) from stop
        assert path is not None
        if not is_first:
            return
        quiet = contextlib.redirect_stdout(io.StringIO())
        with quiet:
            infer.run(
                InferArguments(run=str(path), output=str(Path(folder) / "out"), runs=folder, device=arguments.device)
            )
    if not (arguments.quiet or arguments.json):
        done = f"{steps} steps trained, saved, resumed, evaluated" if steps > 1 else "1 step trained, saved, evaluated"
        print(f"smoke: {done} and inferred; nothing of it is kept")
