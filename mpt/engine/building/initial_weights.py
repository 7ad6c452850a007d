"""Weights to start from (`model.weights`): a file's tensors into freshly built networks, and a line that says how it
went.

Names are matched by `mpt.weights.matching`. A file that fits less than half is refused. A model
file may have a `translate_weights` for files of related models (a detector's backbone for both of two cameras).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from mpt.config.text.messages import few
from mpt.engine.state.moving_averages import SUFFIX
from mpt.errors import CheckpointError
from mpt.memory.low_bit.packed_linear import PREFIX
from mpt.run.checkpoints import checkpoint
from mpt.run.checkpoints.manifest import TENSORS
from mpt.run.checkpoints.shards import SHARD
from mpt.run.checkpoints.state import pack
from mpt.weights.matching import (
    SHOWN,
    Match,
    best_match,
    check,
    describe,
    own_tensors,
    refuse_misfit,
)
from mpt.weights.weights_file import WeightsFile, read_weights_file

LEAST_SHARE, LEAST_TRANSLATED = 0.5, 0.25
"""Share of the model's tensors that must be in a file: by its own names, and as a related model's."""
Translate = Callable[[Mapping[str, nn.Module], Mapping[str, Tensor]], dict[str, Tensor] | None]
Read = Callable[[Path], dict[str, Tensor] | None]


@dataclass(frozen=True)
class Start:
    """The result of loading a file of weights."""

    message: str
    """One line that counts the loaded, ignored and new tensors."""
    newly_made: tuple[str, ...]
    """The names of tensors that keep their initial values."""
    is_own: bool
    """Whether mpt wrote the file: its names are those of the networks, not those of a library's model."""
    averages: Mapping[str, Tensor] = field(default_factory=dict)
    """If the file also has averages: the twins' tensors by name (`train.ema`)."""
    passed_over: tuple[str, ...] = ()
    """Which newer checkpoints of the run are damaged, why, and which one was read instead."""


def load_initial_weights(
    modules: Mapping[str, nn.Module],
    path: Path,
    translate: Translate | None = None,
    read: Read | None = None,
    keeps_averages: bool = True,
) -> Start:
    """Copy a file's tensors into networks that were just built.

    A file of mpt may have networks and their averages. Networks are as they are in it if the run `keeps_averages` of
    its own; else they begin as the averages, which are what was evaluated.

    Both functions are the model file's own: `read` reads a format that only it knows, and `translate` returns the
    tensors of a related model's file that this one can use, under its names. Each returns None for other files.
    Raises CheckpointError for a file that is refused, that fits less than half of the networks it touches, that holds
    another kind of numbers, or weights that are not finite.
    """
    path = path.expanduser()
    if not path.exists():
        looked = "" if path.is_absolute() else f" in {Path.cwd()}, nor beside the configuration"
        raise CheckpointError(f"model.weights: there is no file {path}{looked}")
    foreign = read(path) if read is not None else None
    path, file, passed_over = (
        read_start(path) if foreign is None else (path, WeightsFile(foreign), ())
    )
    refuse_packed(path, file)
    translated = translate(modules, file.tensors) if translate is not None else None
    tensors = file.tensors if translated is None else translated
    averages = averages_in(modules, tensors)
    given = {name: value for name, value in tensors.items() if name not in averages}
    averaged = [] if keeps_averages else [name for name in averages if averages[name] in given]
    match = best_match(modules, {**given, **{averages[name]: tensors[name] for name in averaged}})
    refuse_misfit(modules, match, path, LEAST_SHARE if translated is None else LEAST_TRANSLATED)
    refuse_adapters(path, match)
    check(modules, match.found, path)
    own = own_tensors(modules)
    with torch.no_grad():
        for name, tensor in match.found.items():
            own[name].copy_(tensor)
    is_own = any(name in file.tensors or f"modules.{name}" in file.tensors for name in match.found)
    made = tuple(name.partition(" ")[0] for name in match.new)
    message = describe(match, file, path)
    if averaged:
        names = sorted({averages[name].removeprefix("modules.").split(".")[0] for name in averaged})
        message += f"; {', '.join(names)}: the average, which was evaluated"
    twins = {name.removeprefix("modules."): tensors[name] for name in averages}
    return Start(message, made, is_own, twins, passed_over)


def averages_in(modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names of averages in a file -> those of their networks' tensors.

    A file that has averages alone, as an export has, has them for its networks.
    """
    found: dict[str, str] = {}
    for name in modules:
        for start in ("modules.", ""):
            plain, average = f"{start}{name}.", f"{start}{name}{SUFFIX}."
            if f"{name}{SUFFIX}" not in modules and any(one.startswith(plain) for one in tensors):
                found |= {
                    one: plain + one.removeprefix(average)
                    for one in tensors
                    if one.startswith(average)
                }
    return found


def read_start(path: Path) -> tuple[Path, WeightsFile, tuple[str, ...]]:
    """Return the weights' source, the weights, and notes on newer checkpoints that are damaged.

    A checkpoint is named by its folder, or its run's for the newest; one of shards by any of its files of tensors too,
    since none of them has all.
    """
    if not path.is_dir():
        is_part = path.name == TENSORS or SHARD.fullmatch(path.name)
        if not is_part or not any(SHARD.fullmatch(one.name) for one in path.parent.iterdir()):
            return path, read_weights_file(path), ()
        path = path.parent
    try:
        found = checkpoint.load(path)
    except CheckpointError as error:
        raise CheckpointError(f"model.weights: {error}") from error
    file = WeightsFile(pack({"modules": found.state.get("modules", {})})[1])
    return found.path, file, tuple(found.notes)


def refuse_packed(path: Path, file: WeightsFile) -> None:
    """Raise CheckpointError for the checkpoint of a run whose frozen weights are packed: its other weights may fit."""
    if any(name.endswith(f".{PREFIX}codes") for name in file.tensors):
        raise CheckpointError(
            f"model.weights: frozen weights of {path} are packed (memory.low_bit_base); write them plain with "
            "`mpt convert RUN --to safetensors`, and name that file"
        )


def refuse_adapters(path: Path, match: Match) -> None:
    """Raise CheckpointError for the checkpoint of a run with adapters, which would be left out: all that it learnt."""
    if any(name.endswith(".lora_b") for name in match.unused):
        raise CheckpointError(
            f"model.weights: {path} has adapters (memory.lora), which would be left out; add them into its weights "
            "with `mpt convert RUN --to safetensors`, and name that file"
        )


def never_learnt(networks: Mapping[str, nn.Module], made: Sequence[str]) -> list[str]:
    """Return a warning if parameters that no file gave are frozen: they would keep their random numbers."""
    frozen = [
        name
        for module_name, module in networks.items()
        for name in (
            f"{module_name}.{key}"
            for key, one in module.named_parameters()
            if not one.requires_grad
        )
        if name in made
    ]
    if not frozen:
        return []
    return [
        f"{few(frozen, SHOWN)} {'are' if len(frozen) > 1 else 'is'} newly made and will not be trained: "
        "let train.freeze leave it out, or name it in memory.lora.full"
    ]
