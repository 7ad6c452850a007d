"""A run's adapters alone as a file for other programs, proved by reading it back into networks without them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpt.config.checking.precision_names import FLOAT32
from mpt.engine.state.moving_averages import SUFFIX
from mpt.errors import ConfigError
from mpt.inference.exported import description
from mpt.inference.half import networks, rebuild
from mpt.inference.proof import Calls, Expected, computes_alike, expect, outputs_of, refuse_beyond
from mpt.inference.trained import Trained
from mpt.memory.adapters.names import Place, places
from mpt.memory.adapters.reading import load_adapters, read_adapters
from mpt.memory.adapters.writing import FORMATS, drop_adapters, write
from mpt.seams import Run

__all__ = ["FORMATS", "default_name", "export_adapters"]


def default_name(run: str, wanted: str) -> str:
    """Return the name of the file, or of PEFT's folder, of a run's adapters."""
    return f"{run}-peft" if wanted == "peft" else f"{run}-{wanted}.safetensors"


@dataclass(frozen=True)
class Written:
    """The files that were written."""

    count: int
    networks: str
    bytes: int
    proof: str
    """A sentence on how far the file's adapters are from the run's."""


def export_adapters(trained: Trained, called: Calls, wanted: str, path: Path) -> Written:
    """Write the adapters of the networks that inference calls.

    Raises ConfigError for a run without adapters and for adapters that the format cannot hold, CheckpointError if a
    file that is read back computes something else than the run.
    """
    found = adapted_places(trained.run, called)
    expected = expect(called, "float32")
    about = description(trained, trained.run.task, list(called), "float32")
    partial = path.with_name(f".partial-{path.name}")
    remove(partial)
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        write(wanted, found, partial, about)
        apart = prove_adapters(trained, partial, path, expected)
        remove(path)
        os.replace(partial, path)
    finally:
        remove(partial)
    count, names = (
        sum(len(place.adapted()) for place in found),
        ", ".join(place.name for place in found),
    )
    return Written(count, names, size_of(path), computes_alike(apart))


def adapted_places(run: Run, called: Calls) -> list[Place]:
    """Return the called models that have adapters; an average's weights count as trained as its network's do."""
    chosen = {name: module for name, module in networks(run.task.modules) if name in called}
    for name, module in chosen.items():
        source = dict(networks(run.task.modules)).get(name.removesuffix(SUFFIX))
        if source is None or source is module:
            continue
        for own, other in zip(module.parameters(), source.parameters(), strict=True):
            own.requires_grad_(other.requires_grad)
    found = list(places(chosen))
    if not found:
        raise ConfigError(
            "--to: this run has no adapters (memory.lora); --to safetensors writes its weights"
        )
    return found


def prove_adapters(
    trained: Trained, partial: Path, path: Path, expected: Mapping[str, Expected]
) -> float:
    """Return how far the base with the file's adapters is from the run. Raises CheckpointError beyond rounding."""
    run = rebuild(trained, FLOAT32, folds=False)
    drop_adapters(run.task.modules)
    found = dict(networks(run.task.modules))
    load_adapters({name: found[name] for name in expected}, read_adapters(partial))
    return max(
        refuse_beyond(one, outputs_of(found[name], one.inputs), f"{path}: its network {name}")
        for name, one in expected.items()
    )


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of the files in a folder."""
    return (
        sum(one.stat().st_size for one in path.iterdir()) if path.is_dir() else path.stat().st_size
    )


def remove(path: Path) -> None:
    """Remove a file, or a folder that mpt has written."""
    with contextlib.suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
