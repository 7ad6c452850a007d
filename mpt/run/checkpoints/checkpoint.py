"""Checkpoints that are whole or not there: a directory per step, a hash per file, no pickle.

`state.safetensors` holds the tensors, `state.json` the structure around them, and `manifest.json`, written last, the
size and SHA-256 of both and of itself; if networks are sharded, files of their rows lie alongside
(`mpt.run.checkpoints.shards`). torch.load checks no integrity, and a flipped bit in a weight loads silently; here it is
refused and the checkpoint before it is used, by name. A checkpoint is written under a temporary name, synced, renamed,
and its directory synced, so a kill or a full disk at any moment leaves the earlier ones as they were. The hash guards
against accidents, not against an author, whom the format bounds: there is no code in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

import torch
from torch import Tensor

from mpt.errors import CheckpointError
from mpt.parallel.world import ALONE, World
from mpt.run.checkpoints.manifest import (
    FORMAT,
    LARGEST_MANIFEST_BYTES,
    MANIFEST,
    SHARDED_FORMAT,
    STRUCTURE,
    TENSORS,
    hash_manifest,
    read_manifest,
)
from mpt.run.checkpoints.retention import (
    REPLACED,
    list_steps,
    prune,
    read_index,
    remove,
    write_index,
)
from mpt.run.checkpoints.shards import Shards, begin_folder, join, shard_names
from mpt.run.checkpoints.state import pack_parts, unpack
from mpt.run.checkpoints.tensor_file import build_header, read_tensors, write_tensors
from mpt.run.process.files import (
    failures_explained,
    open_new,
    open_regular,
    sync_directory,
    write_fully,
)
from mpt.run.process.operating_system import Folder, opened, opened_below, sync_folder
from mpt.run.records.layout import CHECKPOINT_NAME, RunDirectory, open_run, refuse_links


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that was read and found whole. `notes` names the ones that were passed over on the way to it, and
    why."""

    step: int
    state: dict[str, Any]
    path: Path
    manifest: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class EncodedState:
    """A state as it goes into files: the text of its structure, and its tensors by name."""

    structure: bytes
    tensors: Mapping[str, Tensor]

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class About(TypedDict, total=False):
    """Facts about a checkpoint that is written."""

    keep_last: Required[int]
    """How many of the newest checkpoints stay, in addition to the best."""
    metric: float | None
    """This step's evaluation, if there was one."""
    higher_is_better: bool
    """By the metric; true if unknown."""
    extra_manifest: Mapping[str, Any]
    """Further entries of the manifest."""
    shards: Shards | None
    """The files that the ranks of a sharded training have written of it already."""


def save(run: RunDirectory, step: int, state: Mapping[str, Any], **about: Unpack[About]) -> Path:
    """Write one checkpoint durably, then remove all but the last `keep_last` and the best; return its path.

    Raises InputOutputError, leaving the earlier checkpoints as they were; PartError for a state that is not plain (see
    `mpt.run.checkpoints.state`).
    """
    return write(run, step, encode(state, is_sharded=about.get("shards") is not None), **about)


def encode(state: Mapping[str, Any], *, is_sharded: bool = False) -> EncodedState:
    """Return a state as it goes into files; its tensors are those of the state, not copies. Raises as `save` does."""
    structure, tensors, parts = pack_parts(state)
    assert is_sharded or not parts, "a sharded state is written by all ranks together"
    return EncodedState(
        json.dumps(structure, allow_nan=False, separators=(",", ":")).encode(), tensors
    )


def write(run: RunDirectory, step: int, state: EncodedState, **about: Unpack[About]) -> Path:
    """Write an encoded state as `save` does. May run in a thread during the training if nothing changes the tensors."""
    keep_last, metric, shards = about["keep_last"], about.get("metric"), about.get("shards")
    assert keep_last >= 1, "a run keeps at least one checkpoint"
    assert step >= 0, "steps are counted from zero"
    manifest = {
        "format": FORMAT if shards is None else SHARDED_FORMAT,
        "step": step,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "metric": metric if metric is not None and math.isfinite(metric) else None,
        "higher_is_better": about.get("higher_is_better", True),
        "extra": dict(about.get("extra_manifest", {})),
    }
    needed = state.tensor_bytes + len(build_header(state.tensors)[0]) + len(state.structure)
    path = run.checkpoint_path(step)
    fewer = " or lower train.keep_last" if keep_last > 1 else ""
    with failures_explained(path, needed, fewer):
        temporary = begin_folder(run) if shards is None else shards.folder
        try:
            others = {} if shards is None else shards.files
            write_files(run, temporary.name, state.tensors, state.structure, manifest, others)
            put_in_place(run, temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        prune(run, step, keep_last)
    write_index(run, step)
    return path


def write_files(
    run: RunDirectory,
    name: str,
    tensors: Mapping[str, Tensor],
    structure: bytes,
    manifest: dict[str, Any],
    shards: Mapping[str, Any],
) -> None:
    """Write a checkpoint's three files alongside its shards into a directory of that name and sync all of it."""
    # Everything goes through descriptors of directories that are no links, so a link planted meanwhile is not followed.
    with contextlib.ExitStack() as folders:
        checkpoints = folders.enter_context(opened(run.checkpoints))
        directory = folders.enter_context(opened_below(name, checkpoints))
        with new_file(TENSORS, directory, syncs=False) as descriptor:  # write_tensors does it
            digest, size = write_tensors(descriptor, tensors)
        with new_file(STRUCTURE, directory) as descriptor:
            write_fully(descriptor, structure)
        manifest["files"] = {
            TENSORS: {"sha256": digest, "bytes": size},
            STRUCTURE: {"sha256": hashlib.sha256(structure).hexdigest(), "bytes": len(structure)},
            **shards,
        }
        text = json.dumps(
            {**manifest, "sha256": hash_manifest(manifest)}, indent=2, allow_nan=False
        ).encode()
        assert len(text) <= LARGEST_MANIFEST_BYTES, "extra_manifest is meant for a few figures"
        with new_file(MANIFEST, directory) as descriptor:
            write_fully(descriptor, text)
        sync_folder(directory)


@contextlib.contextmanager
def new_file(name: str, directory: Folder, syncs: bool = True) -> Iterator[int]:
    """Create a file, hand out its descriptor, and sync it at the end."""
    descriptor = open_new(name, directory)
    try:
        yield descriptor
        if syncs:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(run: RunDirectory, temporary: Path, path: Path) -> None:
    """Give a finished checkpoint its name, replacing one of the same step."""
    replaced = run.checkpoints / f"{REPLACED}{path.name}-{secrets.token_hex(8)}"
    exists = os.path.lexists(path)
    if exists:
        # Two renames are not one step. `clean_temporaries` undoes the first if the second never came.
        os.rename(path, replaced)
    os.rename(temporary, path)
    sync_directory(run.checkpoints)
    if exists:
        remove(replaced)


def load(source: RunDirectory | Path, world: World = ALONE) -> LoadedCheckpoint:
    """Read a checkpoint by its path, or the newest whole one of a run. Its tensors are on the CPU.

    They are for copying from: random states and optimizers' step counts belong on the CPU, and a GPU that is nearly
    full has no room for the weights twice.

    A run's damaged checkpoints are passed over, and `notes` names them and the one used. Of several processes all load,
    and a file that one of them cannot read is damaged for all. Raises CheckpointError if the one that was named is
    damaged, if all are, or if there is none.
    """
    if isinstance(source, RunDirectory):
        return load_newest(source, world)
    source = source.resolve()  # a link that the user names is meant; one inside a run is not
    if not source.is_dir():
        what = "is a file; checkpoints are directories" if source.exists() else "does not exist"
        raise CheckpointError(
            f"{source} {what}. Name a run, or a directory like RUN/checkpoints/step-00000100."
        )
    if CHECKPOINT_NAME.fullmatch(source.name) or (source / MANIFEST).exists():
        try:
            return read_alike(source, world)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{source} is refused: {reason_of(error)}. Name another checkpoint, or its run to use "
                "the newest whole one."
            ) from error
    return load_newest(open_run(source), world)


def load_newest(run: RunDirectory, world: World) -> LoadedCheckpoint:
    """Read the newest checkpoint that is whole; see `load`."""
    steps, notes = world.ask(lambda: look_around(run))
    for step in reversed(steps):
        path = run.checkpoint_path(step)
        try:
            found = read_alike(path, world)
        except (OSError, ValueError) as error:
            notes.append(f"{path.name} is refused: {reason_of(error)}")
            continue
        if notes:
            notes.append(f"{path.name} is used instead")
        return LoadedCheckpoint(found.step, found.state, found.path, found.manifest, notes)
    remedy = "Start a new run, or restore a checkpoint from a backup."
    if not steps and not notes:
        gone = (
            "no checkpoint yet" if run.checkpoints.is_dir() else "no checkpoints directory any more"
        )
        raise CheckpointError(f"{run.path} has {gone}. {remedy}")
    raise CheckpointError(f"{run.path} has no whole checkpoint: {'; '.join(notes)}. {remedy}")


def look_around(run: RunDirectory) -> tuple[list[int], list[str]]:
    """Return the steps that have a checkpoint, whole or not, and a note if the newest one is missing."""
    refuse_links(run)
    steps, newest = list_steps(run), read_index(run)
    if newest is None or newest in steps:
        return steps, []
    return steps, [f"{run.checkpoint_path(newest).name}, which was saved last, is missing"]


def read_alike(path: Path, world: World) -> LoadedCheckpoint:
    """Read one checkpoint on all ranks. Raises OSError or ValueError, on all of them, if any cannot read it.

    On several machines a rank may meet an old or incomplete copy of a directory that they share.
    """
    if world.size == 1:
        return read_checkpoint(path)
    found, told = None, ("", "")
    try:
        found = read_checkpoint(path)
        told = "", str(found.manifest["sha256"])
    except (OSError, ValueError) as error:
        told = reason_of(error), ""
    for rank, (reason, digest) in enumerate(every := world.collect(told)):
        if reason:
            raise ValueError(
                f"{reason} (seen by rank {rank})" if every[0] != every[rank] else reason
            )
        if digest != every[0][1]:
            raise ValueError(f"rank {rank} finds another checkpoint of that name than rank 0")
    assert found is not None
    return found


def reason_of(error: OSError | ValueError) -> str:
    """Return why a checkpoint was refused, in a clause."""
    if isinstance(error, OSError):
        name = Path(os.fsdecode(error.filename)).name if error.filename else "a file"
        return f"{name} cannot be read ({error.strerror or error})"
    return str(error)


def read_checkpoint(path: Path) -> LoadedCheckpoint:
    """Read one checkpoint. Raises OSError or ValueError with the reason if it is damaged."""
    manifest = read_manifest(path)
    step, files = manifest.get("step"), manifest.get("files")
    named = CHECKPOINT_NAME.fullmatch(path.name)
    if not isinstance(step, int) or (named and int(named.group(1)) != step):
        raise ValueError(f"its manifest is of step {step}, which its name is not")
    if not isinstance(files, dict) or not files.keys() >= {TENSORS, STRUCTURE}:
        raise ValueError("its manifest does not list the files of a checkpoint")
    names = shard_names(files.keys() - {TENSORS, STRUCTURE})
    with opened(path) as directory:
        tensors = read_expected(TENSORS, directory, files[TENSORS])
        tensors |= join([read_expected(name, directory, files[name]) for name in names])
        with open_expected(STRUCTURE, directory, files[STRUCTURE]) as file:
            text = file.read()
        check_hash(STRUCTURE, hashlib.sha256(text).hexdigest(), files[STRUCTURE])
    try:
        structure = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{STRUCTURE} is nested too deeply") from error
    state = unpack(structure, tensors)
    if not isinstance(state, dict):
        raise ValueError("its state is not a mapping")
    return LoadedCheckpoint(step, state, path, manifest)


def read_expected(name: str, directory: Folder, entry: Any) -> dict[str, Tensor]:
    """Read one of a checkpoint's files of tensors. Raises ValueError if it is not the one that was written."""
    with open_expected(name, directory, entry) as file:
        try:
            tensors, digest = read_tensors(file)
        except ValueError as error:
            raise ValueError(f"{name} is damaged: {error}") from error
    check_hash(name, digest, entry)
    return tensors


def open_expected(name: str, directory: Folder, entry: Any) -> BufferedReader:
    """Open one of a checkpoint's files and compare its size with the manifest's before a byte is read."""
    file = os.fdopen(open_regular(name, directory), "rb")
    size = os.fstat(file.fileno()).st_size
    if not isinstance(entry, dict) or entry.get("bytes") != size:
        file.close()
        expected = entry.get("bytes") if isinstance(entry, dict) else None
        raise ValueError(f"{name} has {size} bytes instead of the manifest's {expected}")
    return file


def check_hash(name: str, digest: str, entry: Mapping[str, Any]) -> None:
    """Raise ValueError if a file is not the one that was written."""
    if entry.get("sha256") != digest:
        raise ValueError(f"{name} is damaged: its SHA-256 is not the one in its manifest")
