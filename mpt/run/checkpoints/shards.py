"""A checkpoint's shard files: each rank of a sharded training writes the rows it holds, and nothing is gathered.

`state.safetensors` has the tensors that all ranks have in common, and is the first rank's. Alongside it lies a file per
rank, in the same format, with the rows of every sharded tensor that the rank holds; `state.json` names those tensors as
if they were whole, and the manifest, which the first rank writes last, lists all files with their sizes and hashes. So
a checkpoint is there when all of it is durable, and a file that is missing, cut short or of another save is refused.

Rows lie in the order of the ranks (`torch.chunk`, as FSDP2 cuts its weights), so a reader puts the files together by
their numbers and needs to know nothing of the ranks that wrote them.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpt.errors import InputOutputError
from mpt.parallel.local import local, place_of
from mpt.parallel.world import World
from mpt.run.checkpoints.retention import remove
from mpt.run.checkpoints.state import pack_parts
from mpt.run.checkpoints.tensor_file import write_tensors
from mpt.run.process.files import failures_explained, open_new, temporary_name
from mpt.run.process.operating_system import make_folder, opened
from mpt.run.records.layout import RunDirectory

SHARD = re.compile(r"shard-([0-9]{5})-of-([0-9]{5})\.safetensors")


@dataclass(frozen=True)
class Shards:
    """The ranks' files of a checkpoint: the folder it will be renamed from, and the manifest's entries."""

    folder: Path
    files: Mapping[str, Any]


def write_shards(world: World, run: RunDirectory, state: Mapping[str, Any]) -> Shards:
    """Write this rank's rows of a state durably into a new folder; call on all ranks.

    Raises InputOutputError, on all ranks alike and with the folder removed, if any could not write.
    """
    with failures_explained(run.checkpoints):
        folder = world.ask(lambda: begin_folder(run))
    parts = pack_parts(state)[2]
    entry, reason = None, None
    try:
        entry = write_shard(folder, parts)
    except InputOutputError as error:
        reason = str(error)
    told = world.collect((entry, reason, checksum(parts)))
    return world.ask(lambda: accept(folder, told))


def begin_folder(run: RunDirectory) -> Path:
    """Make the folder that a checkpoint is written in before it gets its name."""
    folder = run.checkpoints / temporary_name()
    run.checkpoints.mkdir(exist_ok=True)
    with opened(run.checkpoints) as checkpoints:
        make_folder(folder.name, checkpoints)
    return folder


def write_shard(folder: Path, parts: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Write the rows of sharded tensors that this rank holds; return the file's name and its entry in the manifest.

    A rank whose rows another one writes (a replica) writes nothing and returns None.
    """
    name = shard_name(*place_of(parts.values()))
    if name is None:
        return None
    return write_rows(
        folder, name, {key: local(tensor).detach().contiguous() for key, tensor in parts.items()}
    )


def checksum(names: Iterable[str]) -> int:
    """Return a number by which ranks see that they write the same tensors."""
    return zlib.crc32("\n".join(names).encode())


def shard_name(number: int, count: int, writes: bool) -> str | None:
    """Return the name of a rank's file, by its part of how many (`place_of`); None if it writes none."""
    return f"shard-{number:05d}-of-{count:05d}.safetensors" if writes else None


def write_rows(folder: Path, name: str, own: Mapping[str, Tensor]) -> tuple[str, dict[str, Any]]:
    """Write a rank's rows durably; return the file's name and its entry in the manifest."""
    size = sum(tensor.nbytes for tensor in own.values())
    with failures_explained(folder / name, size), opened(folder) as directory:
        descriptor = open_new(name, directory)
        try:
            digest, size = write_tensors(descriptor, own)
        finally:
            os.close(descriptor)
    return name, {"sha256": digest, "bytes": size}


def accept(
    folder: Path, told: Sequence[tuple[tuple[str, dict[str, Any]] | None, str | None, int]]
) -> Shards:
    """Return all ranks' files. Removes the folder and raises InputOutputError if a rank could not write its own."""
    failures = [
        f"rank {rank}: {reason}" for rank, (_, reason, _) in enumerate(told) if reason is not None
    ]
    if failures:
        remove(folder)
        raise InputOutputError(failures[0])
    assert len({names for _, _, names in told}) == 1, "ranks would write different tensors"
    return Shards(folder, dict(entry for entry, _, _ in told if entry is not None))


def shard_names(files: Iterable[str]) -> list[str]:
    """Return the shard files among a checkpoint's, in the order of their rows. Raises ValueError if they are no set."""
    found = sorted(name for name in files if SHARD.fullmatch(name))
    if found != [
        f"shard-{number:05d}-of-{len(found):05d}.safetensors" for number in range(len(found))
    ]:
        raise ValueError(
            f"its manifest lists {len(found)} shards that are not all of a checkpoint's"
        )
    return found


def join(shards: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return whole tensors out of each shard's rows. Raises ValueError if shards hold different tensors."""
    if any(set(shard) != set(shards[0]) for shard in shards):
        raise ValueError("its shards hold the rows of different tensors")
    whole = {}
    for name in shards[0] if shards else ():
        try:
            whole[name] = torch.cat([shard[name] for shard in shards])
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"the rows of tensor {name!r} do not fit together: {error}") from error
    return whole
