"""An optimizer's parameters, or groups of them with settings of their own.

Groups come from `optimizer.parts`, globs over the dotted names of parameters ("net.trunk.*"), and from
`optimizer.no_decay`. Without either there is one plain list, as if groups did not exist. The learning rate of a group
is the run's rate times its `lr_scale`, which the loop applies at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mpt.config.options import OptimizerOptions, setting_of
from mpt.errors import ConfigError

Parameters = list[nn.Parameter] | list[dict[str, Any]]

NORMALISATION = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Modules whose parameters `no_decay: [norm]` means in addition to all whose class name holds "Norm" (timm's, one's
own)."""


def group_parameters(
    name: str, module: nn.Module, parameters: Sequence[nn.Parameter], settings: OptimizerOptions
) -> Parameters:
    """Return a trained module's parameters, in groups if the settings ask for any.

    `parameters` are those that the optimizer updates, one for each of the module's that require gradients and in their
    order (masters under O2); `name` is the module's, with which the dotted names begin. If some are frozen there is
    a group too, for its names: a resume may freeze others. Groups without an `lr_scale` come first. Raises ConfigError
    if the optimizer has no such setting.
    """
    some_frozen = any(not parameter.requires_grad for parameter in module.parameters())
    if (
        not settings.parts
        and not settings.no_decay
        and not settings.splits_matrices
        and not some_frozen
    ):
        return list(parameters)
    names = [
        f"{name}.{key}" for key, parameter in module.named_parameters() if parameter.requires_grad
    ]
    assert len(names) == len(parameters), (
        "a precision mode must keep the module's order of parameters"
    )
    undecayed = {f"{name}.{key}" for key in undecayed_names(module, settings.no_decay)}
    hidden = (
        hidden_matrices(name, module, setting_of(settings, "adam", []))
        if settings.splits_matrices
        else set()
    )
    groups: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}
    for full_name, parameter in zip(names, parameters, strict=True):
        changes: dict[str, Any] = {"weight_decay": 0.0} if full_name in undecayed else {}
        if settings.splits_matrices:
            changes["muon"] = full_name in hidden
        for glob, part in settings.parts.items():
            if fnmatchcase(full_name, glob):
                changes |= part.model_dump(exclude_none=True)
        group = groups.setdefault(
            tuple(sorted(changes.items())), {"params": [], "param_names": [], **changes}
        )
        group["params"].append(parameter)
        group["param_names"].append(full_name)
    for group in groups.values():
        check_settings(group, settings)
        if "lr_scale" in group:
            group["lr"] = settings.lr * group["lr_scale"]
    return sorted(groups.values(), key=lambda group: "lr_scale" in group)


def hidden_matrices(name: str, module: nn.Module, excluded: Sequence[str]) -> set[str]:
    """Return the names of a module's matrices that are neither embeddings nor the first or the last layer's."""
    embeddings = {
        p
        for m in module.modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag)
        for p in m.parameters()
    }
    matrices = [
        f"{name}.{key}"
        for key, parameter in module.named_parameters()
        if parameter.requires_grad and parameter.dim() >= 2 and parameter not in embeddings
    ]
    inner = matrices[1:-1] if not embeddings else matrices[:-1]
    return {key for key in inner if not any(fnmatchcase(key, glob) for glob in excluded)}


def undecayed_names(module: nn.Module, kinds: Sequence[str]) -> set[str]:
    """Return the names of the parameters of these kinds: "bias", "norm", "vector"."""
    found: set[str] = set()
    if "vector" in kinds:
        named: Any = getattr(module, "no_weight_decay", tuple)
        globs = list(named())
        found |= {
            key
            for key, parameter in module.named_parameters()
            if parameter.dim() <= 1 or any(fnmatchcase(key, glob) for glob in globs)
        }
    for owner_name, owner in module.named_modules(remove_duplicate=False):
        is_norm = isinstance(owner, NORMALISATION) or any(
            "Norm" in kind.__name__ for kind in type(owner).__mro__
        )
        for key, _ in owner.named_parameters(recurse=False, remove_duplicate=False):
            # torch's attention calls its biases in_proj_bias, bias_k and bias_v.
            is_bias = key == "bias" or key.endswith("_bias") or key.startswith("bias_")
            if ("bias" in kinds and is_bias) or ("norm" in kinds and is_norm):
                found.add(f"{owner_name}.{key}".lstrip("."))
    return found


def check_settings(group: dict[str, Any], settings: OptimizerOptions) -> None:
    """Raise ConfigError for a setting that this optimizer does not have."""
    for key in group:
        if (
            key not in ("params", "param_names", "lr_scale", "muon")
            and key not in type(settings).model_fields
        ):
            where = "no_decay" if key == "weight_decay" and settings.no_decay else "parts"
            raise ConfigError(
                f"optimizer.{where}: this optimizer has no {key}; leave it out or choose an optimizer that has it "
                "(adamw, sgd)"
            )


def fit_saved_groups(
    saved: dict[str, Any], optimizer: Optimizer, trained: Sequence[str], every: Sequence[str]
) -> dict[str, Any]:
    """Return a saved optimizer state in the groups of this optimizer, by the parameters' names.

    `trained` and `every` are the names of the module's parameters, without and with those that are frozen, for states
    without groups. So a run may be resumed with other `optimizer.parts`, and with other parts frozen: parameters that
    were frozen have no state yet. Raises ValueError if the parameters are of another module.
    """
    own = names_of(optimizer.param_groups, trained)
    count = sum(len(group["params"]) for group in saved["param_groups"])
    old = names_of(saved["param_groups"], every if count == len(every) else trained)
    sizes = [
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, saved["param_groups"])
    ]
    if own == old and sizes[0] == sizes[1]:
        return saved
    unknown = sorted((set(own) ^ set(old)) - set(every))
    if unknown or len(old) != count:
        raise ValueError(
            f"it is for other parameters ({unknown[0] if unknown else f'{count} of them'}, for one)"
        )
    old_indices = [index for group in saved["param_groups"] for index in group["params"]]
    by_name = {
        name: saved["state"][index]
        for name, index in zip(old, old_indices, strict=True)
        if index in saved["state"]
    }
    state = {index: by_name[name] for index, name in enumerate(own) if name in by_name}
    groups, start = [], 0
    for group in optimizer.param_groups:
        indices = list(range(start, start + len(group["params"])))
        # Counters (leras' iterations) are in every group alike; the caller puts the settings back.
        own_names = {key: group[key] for key in ("param_names", "muon") if key in group}
        groups.append({**group, **saved["param_groups"][0], "params": indices, **own_names})
        start += len(indices)
    return {**saved, "state": state, "param_groups": groups}


def names_of(groups: Sequence[dict[str, Any]], module_order: Sequence[str]) -> list[str]:
    """Return the names of an optimizer's parameters in its order."""
    named = all("param_names" in group for group in groups)
    return (
        [name for group in groups for name in group["param_names"]] if named else list(module_order)
    )


def check_globs(
    trained: dict[str, nn.Module], globs: Sequence[str], where: str = "optimizer.parts"
) -> None:
    """Raise ConfigError for a glob that matches no parameter of the trained modules."""
    names = [
        f"{name}.{key}" for name, module in trained.items() for key, _ in module.named_parameters()
    ]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            near = get_close_matches(glob, names, n=3, cutoff=0.4) or names[:3]
            raise ConfigError(
                f"{where}: {glob!r} matches no trained parameter; there are {', '.join(near)}, ... (globs go over "
                "whole dotted names, so a part of the network is written 'net.layer.*')"
            )
