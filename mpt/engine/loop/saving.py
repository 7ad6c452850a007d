"""The checkpoints that a training writes: at once or outside its steps, by one process or by ranks together.

The contents of a state are the training's affair (`mpt.engine.loop.training`), how a folder is made durable that of
`mpt.run.checkpoints.checkpoint`; here is when it is written, which saves are waited for, and the effect of a failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mpt import accelerator
from mpt.engine.state.journal import Journal
from mpt.errors import MptError
from mpt.run.checkpoints import checkpoint
from mpt.run.checkpoints.background_save import BackgroundSave
from mpt.run.checkpoints.background_shards import finish_beside, start_beside
from mpt.run.checkpoints.shards import Shards, write_shards
from mpt.run.records.layout import RunDirectory
from mpt.seams import Run

OTHERS_SECONDS = 3.0
"""How long a rank that fails waits for the others' parts of a checkpoint that is being written."""


class CheckpointSaver:
    """Writes the checkpoints of a run, one at a time."""

    def __init__(self, run: Run, directory: RunDirectory, journal: Journal) -> None:
        self.run, self.directory, self.journal = run, directory, journal
        beside = run.config.train.asynchronous_save
        # Several processes share a machine's memory, so that none can say alone whether there is room.
        self.background = BackgroundSave(beside if run.world.size == 1 else bool(beside))

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint that was written to its end, or that the run was restored from."""
        return self.background.newest

    @newest.setter
    def newest(self, step: int | None) -> None:
        self.background.newest = step

    def start(self, step: int, state: Mapping[str, Any], metric: float | None) -> None:
        """Write a checkpoint, or begin to if that happens during the training; call on all ranks, after `finish`.

        `metric` is this step's evaluation, by which the best checkpoint is kept; None if there was none. Raises
        InputOutputError.
        """
        world, background = self.run.world, self.background
        commit = self.committer(step, metric)

        def write(shards: Shards | None) -> None:
            self.tell_removed_files()
            encoded = checkpoint.encode(state, is_sharded=shards is not None)
            if shards is None:
                background.start(step, encoded, lambda copied: commit(copied, None))
                return
            commit(encoded, shards)
            background.newest = step

        if not world.is_sharded:
            world.ask(lambda: write(None))
        elif not (
            background.beside
            and start_beside(world, background, self.directory, step, state, commit)
        ):
            shards = write_shards(world, self.directory, state)
            world.ask(lambda: write(shards))

    def committer(
        self, step: int, metric: float | None
    ) -> Callable[[checkpoint.EncodedState, Shards | None], None]:
        """Return a writer of this step's checkpoint: an encoded state, alongside the shards that ranks have written."""
        about: checkpoint.About = {
            "keep_last": self.run.config.train.keep_last,
            "metric": metric,
            "higher_is_better": self.run.task.higher_is_better,
            "extra_manifest": {"conditions": conditions(self.run)},
        }

        def commit(encoded: checkpoint.EncodedState, shards: Shards | None) -> None:
            whole: checkpoint.About = {**about, "shards": shards}
            # first: a power loss may not leave a checkpoint whose own line is lost
            self.journal.recorder.sync()
            checkpoint.write(self.directory, step, encoded, **whole)

        return commit

    def note_written(self) -> None:
        """Notice the end of a save during the training. Raises InputOutputError if it failed.

        Several processes notice it together, at the next save, rollback or end.
        """
        if self.run.world.size == 1 and self.background.is_written:
            self.background.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written; call on all ranks. Raises InputOutputError on all alike."""
        world = self.run.world
        if world.size == 1:
            self.background.finish()
        elif self.background.beside:
            if world.is_sharded:
                finish_beside(world, self.background)
            else:
                world.ask(self.background.finish)  # only the first one writes

    def settle(self) -> None:
        """Let a save during the training end before a failure ends the program; a further failure is a warning."""
        world = self.run.world
        if world.is_sharded and self.background.writing is not None:
            # it may be one of them that has failed
            world.mail().until = time.monotonic() + OTHERS_SECONDS
        try:
            self.background.finish()
        except (MptError, OSError, RuntimeError) as error:
            if world.is_first:
                self.journal.console.warning(str(error))

    def tell_removed_files(self) -> None:
        """Warn of files that somebody removed since the last save: the run continues without their contents.

        Raises InputOutputError if a link has taken the place of the run's folder, before anything is written behind it.
        """
        self.directory.refuse_link()
        removed = self.journal.recorder.reopen_removed()
        newest = self.newest
        if newest is not None and not self.directory.checkpoint_path(newest).is_dir():
            removed.append(f"the checkpoint of step {newest}")
        if removed:
            self.journal.warn(
                f"removed while the run goes on: {', '.join(removed)}; what was in it is lost"
            )


def conditions(run: Run) -> dict[str, Any]:
    """Return the conditions of a bit-exact resume."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "workers": run.config.dataset.settings.workers,
        "precision": run.config.precision.mode,
        "dtype": str(run.precision.numerics.dtype).removeprefix("torch."),
        "device": run.device.type,
        **(
            {"gpu": accelerator.name_of(run.device)}
            if run.device.type not in ("cpu", "mps")
            else {}
        ),
        "batch_size": run.config.train.batch_size,
        "seed": run.config.seed,
        "processes": run.world.size,
    }
