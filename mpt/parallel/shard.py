"""Sharded networks: FSDP2's `fully_shard` on a task's networks, and whole tensors out of shards and back.

Each rank holds a part of every weight, of its gradient and of the optimizer's state; a unit's weights are gathered for
its forward and backward and released after. Units are the children of a network, through containers, and the network
itself for the rest, so that a task may call a part of a network alone. Averages of a network are sharded as it
is. Gradients are summed, not averaged: losses carry their share of the samples already.

A collective is in every forward and backward, so a rank that fails inside one cannot meet the others any more: the
watch ends them (`mpt.parallel.watch`), and running out of memory is not adapted to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

# DTensor imports it at its first use, and torch.fx.wrap, called meanwhile, keeps its own frame and so its callers: they
# hold the whole weight that is sharded first until the cyclic collector comes.
import torch._dynamo
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from mpt.config.finding.registry import INSTALLED, Plugin
from mpt.config.schema import Config, Parallel
from mpt.errors import ConfigError
from mpt.parallel.world import World

FOR_FROZEN = ("low_bit_base", "stream_weights")
"""Tricks that make weights smaller that are not trained."""
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def refuse(config: Config, world: World) -> None:
    """Raise ConfigError, with the way out, for settings that are not trained sharded."""
    size = world.size
    mode, optimizer = config.precision, config.optimizer
    tricks = [name for name in config.memory.tricks if not is_sharded(config.memory.plugins[name])]
    reasons = []
    if not is_sharded(mode.plugin):
        known = ", ".join(sharded_names("precision"))
        reasons.append(f"precision {mode.name} is not for sharded weights; use one of {known}")
    if not is_sharded(optimizer.plugin):
        known = ", ".join(sharded_names("optim"))
        reasons.append(f"optimizer {optimizer.name} was not tried on shards; use one of {known}")
    if len(tricks) == 1:
        reasons.append(f"memory.{tricks[0]} does not go with it; leave it out")
    elif tricks:
        reasons.append(f"memory.{', '.join(tricks)} do not go with it; leave them out")
    if config.memory.on_oom == "adapt":
        reasons.append("memory.on_oom=adapt needs ranks that can fail alone; use stop")
    if config.train.recent_states:
        reasons.append(
            "train.recent_states keeps whole states in memory; set it to 0, checkpoints are returned to"
        )
    if config.train.batch_size % size:
        reasons.append(
            f"train.batch_size={config.train.batch_size} cannot be shared out evenly over {size} processes; change it"
        )
    together = config.parallel.shard_ranks or world.on_machine
    if config.parallel.shard == "hybrid" and size % together:
        reasons.append(
            f"parallel.shard: hybrid over {together} processes does not divide the {size} that there are"
        )
    if reasons:
        raise ConfigError(
            f"parallel.strategy: fsdp cannot train this: {'; '.join(reasons)}. {way_out(tricks)}"
        )


def way_out(tricks: Sequence[str]) -> str:
    """Return the remedy of the message."""
    if "lora" not in tricks:
        return "Or use ddp"
    smaller = " and ".join(f"memory.{name}" for name in FOR_FROZEN if name not in tricks)
    more = f"; for smaller frozen weights add {smaller}" if smaller else ""
    return f"Or use ddp, which sums the gradients of the adapters alone{more}"


def is_sharded(plugin: Plugin) -> bool:
    """Return whether a mode, a trick or an optimizer says of itself that it works on shards."""
    return bool(plugin.literals.get("SHARDED"))


def sharded_names(kind: str) -> list[str]:
    """Return the names of a kind that work on shards."""
    return [
        name
        for name in INSTALLED.names(kind)
        if (found := INSTALLED.find(kind, name)) and is_sharded(found)
    ]


def shard(
    networks: Iterable[nn.Module],
    device_type: str,
    world: World,
    settings: Parallel,
    in_half: Collection[Tensor],
    half: torch.dtype,
    *,
    stays_gathered: bool = False,
) -> list[FSDPModule]:
    """Shard networks over all ranks, in place; return their parts. Parameters `in_half` are gathered in that dtype.

    `stays_gathered` keeps the weights that a forward has gathered until the update's last backward is done. A gradient
    that is differentiated again needs it: its graph holds the gathered weights, and FSDP2 gathers into them for the
    first backward alone.
    """
    in_half = give_rows(networks := list(networks), in_half)
    mesh = make_mesh(device_type, world, settings)
    offload = (
        CPUOffloadPolicy(pin_memory=device_type == "cuda") if settings.offload else OffloadPolicy()
    )
    found: list[FSDPModule] = []
    for network in networks:
        for part in parts(network, in_half):
            part.register_forward_hook(own_results)
            sharded = fully_shard(
                part,
                mesh=mesh,
                reshard_after_forward=settings.shard != "grad" and not stays_gathered,
                mp_policy=make_policy(part, settings, in_half, half),
                offload_policy=offload,
            )
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_reshard_after_backward(not stays_gathered, recurse=False)
            sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
            found.append(sharded)
    return found


def give_rows(networks: Iterable[nn.Module], in_half: Collection[Tensor]) -> set[Tensor]:
    """Replace single numbers (a noise's strength) by weights of one row, in place, which alone FSDP2 shards.

    If such a weight is multiplied or added it is broadcast, and nothing changes. Returns `in_half` with the new.
    """
    rows: dict[Tensor, nn.Parameter] = {}
    for module in (module for network in networks for module in network.modules()):
        for name, weight in module._parameters.items():
            if weight is not None and not weight.dim():
                if weight not in rows:
                    rows[weight] = nn.Parameter(
                        weight.detach().reshape(1), requires_grad=weight.requires_grad
                    )
                module._parameters[name] = rows[weight]
    return {rows.get(weight, weight) for weight in in_half}


def numbers(networks: Mapping[str, nn.Module]) -> list[str]:
    """Return the dotted names, sorted, of the weights that `give_rows` replaces."""
    return sorted(
        f"{name}.{key}"
        for name, network in networks.items()
        for key, weight in network.named_parameters(remove_duplicate=False)
        if not weight.dim()
    )


def parts(network: nn.Module, in_half: Collection[Tensor]) -> Iterator[nn.Module]:
    """Yield the parts of a network that are sharded alone, inner parts first: its units and itself.

    A part gathers one dtype; a unit with several is taken apart. Raises ConfigError if that cannot be.
    """
    for unit in (*units(network), network):
        for part in (unit,) if is_uniform(unit, in_half) else (*leaves(unit), unit):
            has_none = next(part.parameters(), None) is None
            if has_none or isinstance(part, FSDPModule | nn.ModuleDict | nn.ModuleList):
                continue
            if not is_uniform(part, in_half):
                raise ConfigError(
                    f"parallel.strategy: fsdp: a {type(part).__name__} has weights of its own in several dtypes, which "
                    "cannot be gathered together. Use ddp, or another precision mode"
                )
            yield part


def make_policy(
    part: nn.Module, settings: Parallel, in_half: Collection[Tensor], half: torch.dtype
) -> MixedPrecisionPolicy:
    """Return in which dtypes a part's weights are gathered and their gradients summed."""
    is_half = any(weight in in_half for weight in own_weights(part))
    reduced = torch.float32 if is_half else None
    return MixedPrecisionPolicy(
        param_dtype=half if is_half else None,
        reduce_dtype=reduced
        if settings.reduce_dtype == "auto"
        else getattr(torch, settings.reduce_dtype),
        cast_forward_inputs=False,
    )


def settle(units: Iterable[FSDPModule]) -> None:
    """Bring units to the same state between updates, whatever was frozen or evaluated before; call when all are thawed.

    Gradients that came to weights after their unit's backward was over, as those of a penalty's may, are summed now.
    Weights that a forward without a backward has left gathered are released, since they grow stale. A unit that was
    frozen at its first forward has learned no dtype for its gradients (torch 2.13, `FSDPParamGroup._init_mp_dtypes`),
    and would give those of half weights in half, and ignore `reduce_dtype`.
    """
    for unit in units:
        groups = groups_of(unit)
        for group in groups:
            if any(has_gradient(weight) for weight in group.fsdp_params):
                group.post_backward()
                group.finalize_backward()
        unit.reshard()
        for group in groups:
            if vars(group).get("_orig_dtype", group) is None:
                group._init_mp_dtypes()


def groups_of(unit: FSDPModule) -> list[Any]:
    """Return the parameter group of a unit that FSDP2 gathers and reduces together; torch before 2.13 has one, or
    None."""
    state: Any = unit._get_fsdp_state()
    groups = vars(state).get("_fsdp_param_groups")
    return [
        group
        for group in ([state._fsdp_param_group] if groups is None else groups)
        if group is not None
    ]


def has_gradient(weight: Any) -> bool:
    """Return whether a gathered weight has a gradient that the ranks have not summed."""
    gathered = vars(weight).get("_unsharded_param")
    return weight.unsharded_accumulated_grad is not None or (
        gathered is not None and gathered.grad is not None
    )


def make_mesh(device_type: str, world: World, settings: Parallel) -> DeviceMesh:
    """Return the ranks in one row, or for hybrid one row for each group that has all weights."""
    if settings.shard != "hybrid":
        return init_device_mesh(device_type, (world.size,))
    together = settings.shard_ranks or world.on_machine
    return init_device_mesh(
        device_type, (world.size // together, together), mesh_dim_names=("replica", "shard")
    )


def own_weights(module: nn.Module) -> list[nn.Parameter]:
    """Return a module's parameters that no unit inside of it has."""
    return [parameter for parameter in module.parameters() if not isinstance(parameter, DTensor)]


def is_uniform(module: nn.Module, in_half: Collection[Tensor]) -> bool:
    """Return whether a module would gather a single dtype."""
    return len({(weight.dtype, weight in in_half) for weight in own_weights(module)}) <= 1


def leaves(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules inside of one that have parameters of their own."""
    for child in module.modules():
        if child is not module and any(weight is not None for weight in child._parameters.values()):
            yield child


def own_results(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Copy a tensor that is a view: changed in place, it would lose the hook that gathers the weights again."""
    return tree_map(
        lambda one: one.clone() if isinstance(one, Tensor) and one._is_view() else one, output
    )


def units(network: nn.Module) -> Iterator[nn.Module]:
    """Yield a network's children that are called as a whole, through containers."""
    for child in network.children():
        if isinstance(child, CONTAINERS):
            yield from units(child)
        else:
            yield child


def like(value: Tensor, sharded: DTensor) -> DTensor:
    """Return this rank's shard of a whole tensor that every rank has, on the device of `sharded`."""
    placed = value.detach().to(device=sharded.device_mesh.device_type, dtype=value.dtype)
    shard = distribute_tensor(placed, sharded.device_mesh, sharded.placements, src_data_rank=None)
    return shard if shard.device == sharded.device else cast(DTensor, shard.to(sharded.device))


def shards_of(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a module's saved state as it is to be loaded: sharded if the module is."""
    own = module.state_dict()
    return {
        name: like(value, place) if isinstance(place := own.get(name), DTensor) else value
        for name, value in state.items()
    }


def shard_state(optimizer: Optimizer) -> None:
    """Shard an optimizer's loaded state, as its parameters are."""
    for parameter, entries in optimizer.state.items():
        if isinstance(parameter, DTensor):
            for name, value in entries.items():
                if isinstance(value, Tensor) and not value.dim() and name != "step":
                    value = value.reshape(1)  # of a single number, see `give_rows`
                if (
                    isinstance(value, Tensor)
                    and not isinstance(value, DTensor)
                    and value.shape == parameter.shape
                ):
                    entries[name] = like(value, parameter)
