"""Ranks that save a sharded state and are killed at a chosen system call of it.

The states are small and no network is trained: what is tried is the writing, the agreement around it, and what is found
afterwards. A kill is SIGKILL, before the call, or in the middle of a write.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mpt.config.load import load_config
from mpt.parallel.local import local
from mpt.parallel.start import joined
from mpt.parallel.world import World
from mpt.run.checkpoints import checkpoint
from mpt.run.checkpoints.background_save import BackgroundSave
from mpt.run.checkpoints.background_shards import finish_beside, start_beside
from mpt.run.checkpoints.checkpoint import LoadedCheckpoint
from mpt.run.checkpoints.retention import clean_temporaries
from mpt.run.checkpoints.shards import Shards, write_shards
from mpt.run.records.layout import RunDirectory

from .forked import run_ranks

CALLS = ("mkdir", "open", "write", "fsync", "rename", "replace", "unlink", "rmdir")
CONFIG = {
    "model": "small_cnn",
    "dataset": "digits",
    "train": {"batch_size": 8},
    "parallel": {"timeout": 120},
}
ROWS = (7, 2, 4000)
"""Of three tensors: not divisible, fewer than some worlds have ranks, and large enough for a write of its own."""


def whole_state(step: int) -> dict[str, Any]:
    """Return what is saved at a step, whole."""
    draw = torch.Generator().manual_seed(step)
    tensors = {f"w{rows}": torch.randn(rows, 100, generator=draw) for rows in ROWS}
    return {"modules": {"net": tensors}, "loop": {"step": step, "sum": torch.tensor(float(step))}}


def sharded_state(step: int, size: int) -> dict[str, Any]:
    """Return the same with this rank's rows of the tensors."""
    mesh = init_device_mesh("cpu", (size,))
    state = whole_state(step)
    own = {
        name: distribute_tensor(value, mesh, [Shard(0)])
        for name, value in state["modules"]["net"].items()
    }
    return {**state, "modules": {"net": own}}


def save(
    world: World,
    run: RunDirectory,
    step: int,
    beside: BackgroundSave | None = None,
    keep_last: int = 2,
    is_whole: bool = False,
) -> None:
    """Save a step as a training does, between steps or beside them; `is_whole` as one with ddp."""
    if is_whole:
        save_whole(world, run, step, beside or BackgroundSave(False), keep_last)
        return
    state = sharded_state(step, world.size)
    if beside is not None:

        def commit(encoded: checkpoint.EncodedState, shards: Shards | None) -> None:
            checkpoint.write(run, step, encoded, keep_last=keep_last, shards=shards)

        assert start_beside(world, beside, run, step, state, commit)
        for value in state["modules"]["net"].values():
            local(value).zero_()  # the training goes on
        finish_beside(world, beside)
        return
    shards = write_shards(world, run, state)
    world.ask(lambda: checkpoint.save(run, step, state, keep_last=keep_last, shards=shards))


def save_whole(
    world: World, run: RunDirectory, step: int, saver: BackgroundSave, keep_last: int
) -> None:
    """Save a step that all ranks have alike: the first one writes."""
    state = whole_state(step)

    def start() -> None:
        encoded = checkpoint.encode(state)
        saver.start(
            step, encoded, lambda copied: checkpoint.write(run, step, copied, keep_last=keep_last)
        )

    world.ask(start)
    if saver.beside:
        for value in state["modules"]["net"].values():
            value.zero_()  # the training goes on
    world.ask(saver.finish)


class Calls:
    """Counts this process's calls that change files; dies at the one of a given number."""

    def __init__(self, last: int | None) -> None:
        self.count, self.last = 0, last
        for name in CALLS:
            setattr(os, name, self.counted(name, getattr(os, name)))

    def counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts and calls the original."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.count == self.last:
                if name == "write":
                    original(args[0], memoryview(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1
            return original(*args, **kwargs)

        return call


def saving(
    rank: int,
    folder: Path,
    steps: tuple[int, ...],
    killed: tuple[int, int] | None,
    is_beside: bool = False,
    is_whole: bool = False,
) -> int:
    """Save some steps; in the last one, die at a call. Returns the number of calls of the last save."""
    run = RunDirectory(folder)
    beside = BackgroundSave(True) if is_beside else None
    with joined(load_config(CONFIG)) as world:
        for step in steps[:-1]:
            save(world, run, step, beside, is_whole=is_whole)
        calls = Calls(killed[1] if killed is not None and killed[0] == rank else None)
        save(world, run, steps[-1], beside, is_whole=is_whole)
        return calls.count


def loading(rank: int, folder: Path) -> tuple[int, bool, list[str]]:
    """Return what a rank finds: the step, whether it is as it was saved, and what was passed over."""
    with joined(load_config(CONFIG)) as world:
        loaded = checkpoint.load(RunDirectory(folder), world)
        return loaded.step, is_as_saved(loaded), loaded.notes


def is_as_saved(loaded: LoadedCheckpoint) -> bool:
    """Return whether a loaded state is that of its step, bit for bit."""
    saved, found = whole_state(loaded.step), loaded.state
    tensors = saved["modules"]["net"]
    same = all(torch.equal(found["modules"]["net"][name], value) for name, value in tensors.items())
    return (
        same and found["loop"]["step"] == loaded.step and float(found["loop"]["sum"]) == loaded.step
    )


def kill_and_look(
    folder: Path, size: int, rank: int, call: int, is_beside: bool = False, is_whole: bool = False
) -> dict[str, Any]:
    """Save steps 1, 2 and 3 in `size` ranks, kill one in the third; return how all ended and what is found then."""
    ends = run_ranks(size, saving, folder, (1, 2, 3), (rank, call), is_beside, is_whole)
    run = RunDirectory(folder)
    cleaned = clean_temporaries(run)
    loaded = checkpoint.load(run)
    left = [name for name in os.listdir(run.checkpoints) if name.startswith(".")]
    return {
        "ends": ends,
        "step": loaded.step,
        "whole": is_as_saved(loaded),
        "cleaned": len(cleaned),
        "left": left,
    }
