"""Weights to start from (`model.weights`): a file's tensors into freshly built networks, and a line that says how it
went.

Names are matched as they are, and without the prefixes of training's wrappers: a first component that all of the file's
names share ("module.", "model.", "_orig_mod."), "modules." of mpt's own checkpoints, "net." of its exports, "_ema".
Names without a dot alongside names that all begin alike are counters of an average (torch's `AveragedModel`).
If a file is of another size of head, the head stays as it was made; position embeddings of another image size are
interpolated (`mpt.nn.shared.position_grids`). A file that fits less than half is refused. A model
file may have a `translate_weights` for files of related models (a detector's backbone for both of two cameras).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from mpt.config.messages import few
from mpt.engine.state.moving_averages import SUFFIX
from mpt.errors import CheckpointError
from mpt.memory.low_bit.packed_linear import PREFIX
from mpt.nn.shared.position_grids import resample
from mpt.run.checkpoints import checkpoint
from mpt.run.checkpoints.manifest import TENSORS
from mpt.run.checkpoints.shards import SHARD
from mpt.run.checkpoints.state import pack
from mpt.run.checkpoints.state_checks import shown_shape
from mpt.weights.weights_file import WeightsFile, read_weights_file

SHOWN = 5
LEAST_SHARE, LEAST_TRANSLATED = 0.5, 0.25
"""Share of the model's tensors that must be in a file: by its own names, and as a related model's."""
Translate = Callable[[Mapping[str, nn.Module], Mapping[str, Tensor]], dict[str, Tensor] | None]
Read = Callable[[Path], dict[str, Tensor] | None]
MOST_PREFIXES = 3


@dataclass
class Match:
    """How a file's tensors meet a model's: own name -> the file's tensor, and the rest on either side."""

    found: dict[str, Tensor]
    new: list[str] = field(default_factory=list)
    """Tensors that keep their initial values, with the reason if the file has them."""
    unused: list[str] = field(default_factory=list)
    """The file's weights that nothing was found for."""
    resampled: list[str] = field(default_factory=list)
    """Position embeddings that were interpolated to the model's image size, with both grids."""

    @property
    def count(self) -> int:
        return len(self.found) + len(self.new)


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
) -> Start:
    """Copy a file's tensors into networks that were just built.

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
    given, twins = split_averages(
        modules, file.tensors if translated is None else translated, translated is not None
    )
    match = best_match(modules, given)
    refuse_misfit(modules, match, path, LEAST_SHARE if translated is None else LEAST_TRANSLATED)
    refuse_adapters(path, match)
    check(modules, match.found, path)
    own = own_tensors(modules)
    with torch.no_grad():
        for name, tensor in match.found.items():
            own[name].copy_(tensor)
    is_own = any(name in file.tensors or f"modules.{name}" in file.tensors for name in match.found)
    made = tuple(name.partition(" ")[0] for name in match.new)
    return Start(describe(match, file, path), made, is_own, twins, passed_over)


def split_averages(
    modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor], translated: bool
) -> tuple[Mapping[str, Tensor], dict[str, Tensor]]:
    """Return the networks' tensors, and those of their averages' twins, which only a translated file has by name."""
    if not translated:
        return tensors, {}
    averages = tuple(f"{name}{SUFFIX}." for name in modules)
    twins = {name: value for name, value in tensors.items() if name.startswith(averages)}
    return {name: value for name, value in tensors.items() if name not in twins}, twins


def refuse_misfit(modules: Mapping[str, nn.Module], match: Match, path: Path, least: float) -> None:
    """Raise CheckpointError for a file that gives less than this share of the tensors of the networks it touches."""
    if not match.found or len(match.found) < least * match.count:
        raise CheckpointError(
            f"model.weights: only {len(match.found)} of the model's {match.count or len(own_tensors(modules))} tensors "
            f"are in {path} with the same names and shapes; it is of another model{details(match)}"
        )


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


def best_match(modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> Match:
    """Return the match of most tensors over the ways in which names may be written."""
    own = own_tensors(modules)
    prefixes = dict.fromkeys(("", *(f"{name}." for name in modules)))
    children = [
        f"{name}.{child}."
        for name, module in modules.items()
        for child, _ in module.named_children()
    ]
    best, best_name_of = Match({}), {name: name for name in tensors}
    for renamed in renamings(tensors):
        for prefix in (*prefixes, *children):
            name_of = {f"{prefix}{new}": old for new, old in renamed.items()}
            found = {
                name: tensors[name_of[name]]
                for name in own
                if name in name_of and tensors[name_of[name]].shape == own[name].shape
            }
            if len(found) > len(best.found):
                best, best_name_of = Match(found), name_of
    return complete(best, best_name_of, own, tensors)


def complete(
    match: Match,
    name_of: Mapping[str, str],
    own: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
) -> Match:
    """Fill in the rest on either side, in the networks that the match touches."""
    # without any match all is to be shown
    touched = {name.partition(".")[0] for name in match.found or own}
    for name, tensor in own.items():
        if name in match.found or name.partition(".")[0] not in touched:
            continue
        there = tensors.get(name_of.get(name, ""))
        if (
            there is not None
            and match.found
            and (resized := resample(name, there, tensor)) is not None
        ):
            match.found[name], grids = resized
            match.resampled.append(f"{name} ({grids})")
            continue
        reason = (
            f" (the file's is {shown_shape(there)}, not {shown_shape(tensor)})"
            if there is not None
            else ""
        )
        match.new.append(name + reason)
    used = {name_of[name] for name in match.found}
    tried = {name_of[name] for name in own if name in name_of}
    rest = set(name_of.values()) - used - tried
    # A tensor that a renaming does not keep (the optimizer's state in a checkpoint) is no weight.
    match.unused += [name for name in tensors if name in rest]
    return match


def renamings(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, str]]:
    """Yield mappings from a possible name to the file's name: as written, then without the names' common prefix."""
    names = {name: name for name in tensors}
    for _ in range(MOST_PREFIXES + 1):
        yield names
        yield {new.replace("_ema.", ".", 1): old for new, old in names.items()}
        dotted = {new: old for new, old in names.items() if "." in new}
        if len({new.partition(".")[0] for new in dotted}) != 1:
            # Of a checkpoint with several networks and averages, "modules." may not be all that there is.
            names = {
                new.removeprefix("modules."): old
                for new, old in names.items()
                if new.startswith("modules.")
            }
            if not names:
                return
            continue
        names = {new.partition(".")[2]: old for new, old in dotted.items()}


def own_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the tensors of several networks by dotted names; writing to them changes the networks."""
    return {
        f"{name}.{key}": value
        for name, module in modules.items()
        for key, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }


def check(modules: Mapping[str, nn.Module], found: Mapping[str, Tensor], path: Path) -> None:
    """Raise CheckpointError for numbers of another kind (complex, truth values) and weights that are not finite."""
    own = own_tensors(modules)
    for name, tensor in found.items():
        if kind(tensor) != kind(own[name]):
            raise CheckpointError(
                f"model.weights: {name} in {path} is {kind(tensor)} numbers, not {kind(own[name])}; it is no weight"
            )
        # A buffer may hold infinity, as attention masks do.
        if isinstance(own[name], nn.Parameter) and not bool(torch.isfinite(tensor.float()).all()):
            raise CheckpointError(
                f"model.weights: {name} in {path} holds NaN or infinity; use an earlier checkpoint"
            )


def kind(tensor: Tensor) -> str:
    if tensor.is_complex():
        return "complex"
    if tensor.is_floating_point():
        return "floating"
    return "truth" if tensor.dtype == torch.bool else "whole"


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


def describe(match: Match, file: WeightsFile, path: Path) -> str:
    """Describe the loaded, omitted and new tensors in one line."""
    source = f"{path}" + (f" (its {file.wrapper!r})" if file.wrapper else "")
    number = f"all {match.count}" if not match.new else f"{len(match.found)} of {match.count}"
    return f"model.weights: loaded {number} tensors from {source}{details(match)}"


def details(match: Match) -> str:
    """Return the resampled, the new and the omitted tensors."""
    parts = [
        f"{title}: {few(names, SHOWN)}"
        for title, names in (
            ("resampled", match.resampled),
            ("new", match.new),
            ("left out", match.unused),
        )
        if names
    ]
    return "".join(f"; {part}" for part in parts)
