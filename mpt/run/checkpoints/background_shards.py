"""A sharded checkpoint that all ranks write during their training: each copies its rows and writes them in a thread.

When a rank's file is durable, its thread leaves the entry for the manifest in the ranks' store. The first rank's thread
waits for all of them, writes the common tensors and the manifest, gives the folder its name, and says so; the others'
wait for that. So a checkpoint is there as soon as its last file is, without a collective that the training would have
to stop for, and whatever goes wrong is raised by `BackgroundSave.finish` on all ranks alike. A rank that is killed
leaves a folder without a name, as in a save between steps (`mpt.run.checkpoints.shards`).
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mpt.errors import InputOutputError
from mpt.parallel.local import local, place_of
from mpt.parallel.mail import LOOK_SECONDS, Mail
from mpt.parallel.world import World
from mpt.run.checkpoints.background_save import BackgroundSave
from mpt.run.checkpoints.checkpoint import EncodedState, encode
from mpt.run.checkpoints.shards import (
    Shards,
    accept,
    begin_folder,
    checksum,
    shard_name,
    write_rows,
)
from mpt.run.checkpoints.state import pack_parts
from mpt.run.process.files import failures_explained
from mpt.run.records.layout import RunDirectory


@dataclass(frozen=True)
class Copied:
    """One rank's copy of its part."""

    shard: str | None
    """Its file's name; None if another rank writes the same rows."""
    rows: Mapping[str, Tensor]
    names: int
    """A checksum of the names of all sharded tensors."""
    common: EncodedState | None
    """The part that all ranks have alike, on the rank that writes it."""


def start_beside(
    world: World,
    saver: BackgroundSave,
    run: RunDirectory,
    step: int,
    state: Mapping[str, Any],
    commit: Callable[[EncodedState, Shards | None], object],
) -> bool:
    """Begin to write a sharded state during the training; call on all ranks, after `saver.finish`.

    `commit` writes the rest of the checkpoint on the first rank. Returns False, on all ranks, if one has no host
    memory for its copy; then nothing was begun.
    """
    copied = copy(world, saver, state)
    if not all(world.collect(copied is not None)):
        return False
    assert copied is not None
    with failures_explained(run.checkpoints):
        folder = world.ask(lambda: begin_folder(run))
    saver.saves += 1
    mail, number = world.mail(), saver.saves
    saver.write(step, lambda: write_and_wait(mail, number, folder, copied, commit))
    return True


def finish_beside(world: World, saver: BackgroundSave) -> None:
    """Wait for the checkpoint that is being written; call on all ranks. Raises InputOutputError on all alike.

    They ask each other meanwhile, so that one that was killed is found at once.
    """
    while not all(world.collect(not saver.is_writing)):
        time.sleep(LOOK_SECONDS)
    saver.finish()


def copy(world: World, saver: BackgroundSave, state: Mapping[str, Any]) -> Copied | None:
    """Return a copy of this rank's part of a state, or None if there is no room for it."""
    parts = pack_parts(state)[2]
    name = shard_name(*place_of(parts.values()))
    held = (
        {f"row {key}": local(tensor).detach() for key, tensor in parts.items()}
        if name is not None
        else {}
    )
    common = encode(state, is_sharded=True) if world.is_first else None
    if common is not None:
        held |= {f"all {key}": tensor for key, tensor in common.tensors.items()}
    copies = saver.copies.of(held, sum(tensor.nbytes for tensor in held.values()), True)
    if copies is None:
        return None
    rows, alike = (
        {key[4:]: one for key, one in copies.items() if key[:4] == kind}
        for kind in ("row ", "all ")
    )
    return Copied(
        name,
        rows,
        checksum(parts),
        None if common is None else EncodedState(common.structure, alike),
    )


def write_and_wait(
    mail: Mail,
    number: int,
    folder: Path,
    copied: Copied,
    commit: Callable[[EncodedState, Shards | None], object],
) -> None:
    """Write this rank's file and wait until the checkpoint is there. Raises InputOutputError on all ranks alike."""
    entry, reason = None, None
    try:
        entry = None if copied.shard is None else write_rows(folder, copied.shard, copied.rows)
    except InputOutputError as error:
        reason = str(error)
    mail.post(f"{number}/rank/{mail.rank}", json.dumps([entry, reason, copied.names]))
    if copied.common is None:
        (failure,) = mail.wait([f"{number}/end"])
        if failure:
            raise InputOutputError(failure)
        return
    try:
        told = [
            json.loads(text)
            for text in mail.wait([f"{number}/rank/{rank}" for rank in range(mail.size)])
        ]
        commit(
            copied.common,
            accept(folder, [(tuple(e) if e else None, why, names) for e, why, names in told]),
        )
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)  # still under its first name
        mail.post(f"{number}/end", str(error) or type(error).__name__)
        raise
    mail.post(f"{number}/end", "")
