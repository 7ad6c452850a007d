"""How the tensors of a file meet those of networks: by their names, as they are written or by a renaming.

Names are matched as they are, and without the prefixes of training's wrappers: a first component that all of the file's
names share ("module.", "model.", "_orig_mod."), "modules." of mpt's own checkpoints, "net." of its exports, "_ema".
Names without a dot alongside names that all begin alike are counters of an average (torch's `AveragedModel`).
If a file is of another size of head, the head stays as it was made; position embeddings of another image size are
interpolated (`mpt.weights.position_grids`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from mpt.config.text.messages import few
from mpt.errors import CheckpointError
from mpt.run.checkpoints.state_checks import shown_shape
from mpt.weights.position_grids import resample
from mpt.weights.weights_file import WeightsFile

SHOWN = 5
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


def refuse_misfit(modules: Mapping[str, nn.Module], match: Match, path: Path, least: float) -> None:
    """Raise CheckpointError for a file that gives less than this share of the tensors of the networks it touches."""
    if not match.found or len(match.found) < least * match.count:
        raise CheckpointError(
            f"model.weights: only {len(match.found)} of the model's {match.count or len(own_tensors(modules))} tensors "
            f"are in {path} with the same names and shapes; it is of another model{details(match)}"
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
