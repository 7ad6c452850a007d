"""The whole state of a training run as nested containers of tensors and numbers, and back.

Resuming is exact because nothing else exists: the sample order and the learning rate are pure functions of the step,
and random numbers come from generators that are saved here.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

from mpt import accelerator
from mpt.engine.state.averages import modules_to_save
from mpt.engine.state.moving_averages import SUFFIX
from mpt.errors import CheckpointError
from mpt.optim.shared.carry_over import Carried, carry_over, given_up, lineage
from mpt.optim.shared.groups import fit_saved_groups
from mpt.parallel.local import full, is_sharded
from mpt.precision.shared.module_state import load_module_state, module_state
from mpt.precision.shared.saved_dtypes import keep_saved_dtypes, weights_of_other_dtypes
from mpt.precision.shared.weight_pieces import COMPENSATION
from mpt.run.checkpoints.state_checks import compare_keys, refuse_split
from mpt.seams import Run

NumpyState = tuple[str, numpy.ndarray[Any, Any], int, int, float]


def capture(run: Run) -> dict[str, Any]:
    """Return the state of modules, task, optimizers, scalers and random generators. Tensors are not copied.

    Modules have the weights to evaluate. If an optimizer trains others, those are alongside, in `training_weights`.
    """
    modules, training = modules_to_save(run)
    for number in run.world.numbers:
        name, _, key = number.partition(".")
        modules[name][key] = as_number(modules[name][key])
    return {
        "modules": modules,
        **({"training_weights": training} if training else {}),
        **({"given_averages": list(run.given_averages)} if run.given_averages else {}),
        "task": run.task.state_dict(),
        "optimizers": {
            name: optimizer_state(run, optimizer) for name, optimizer in run.optimizers.items()
        },
        "precision": run.precision.state_dict(),
        "random": capture_random(run.device),
    }


def optimizer_state(run: Run, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state; its entries for single numbers are single numbers."""
    saved = {**optimizer.state_dict(), "kind": lineage(optimizer)}
    if weights := weights_of_other_dtypes(optimizer):
        saved["weights"] = weights
    if not run.world.numbers:
        return saved
    named = (
        (f"{name}.{key}", p)
        for name, m in run.task.modules.items()
        for key, p in m.named_parameters()
    )
    own = {id(parameter) for name, parameter in named if name in run.world.numbers}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        if id(parameter) in own and index in saved["state"]:
            entries = saved["state"][index]
            saved["state"][index] = {
                key: as_number(value) if is_sharded(value) else value
                for key, value in entries.items()
            }
    return saved


def as_number(value: Tensor) -> Tensor:
    """Return a sharded weight of one row as every rank's single number; call on all ranks."""
    return full(value.detach()).reshape(()).clone()


def restore(run: Run, state: Mapping[str, Any]) -> dict[str, Carried]:
    """Put a captured state into a built run; return a report on the state of optimizers that have changed.

    Raises CheckpointError that lists the parts that are missing, unexpected or of another shape.
    """
    changed = restore_tensors(run, state)
    restore_random(state["random"], run.device)
    return changed


def restore_tensors(run: Run, state: Mapping[str, Any]) -> dict[str, Carried]:
    """Restore everything but random numbers, which a plan on fake tensors does not have."""
    training = state.get("training_weights", {})
    modules: dict[str, Mapping[str, Tensor]] = {
        name: {**own, **training.get(name, {})} for name, own in state["modules"].items()
    }
    changed = begin_anew(run, modules, state["optimizers"])
    changed |= {
        name: given_up(saved)
        for name, saved in state["optimizers"].items()
        if name not in run.optimizers
    }
    restore_modules(run, {"modules": modules})
    run.given_averages[:] = state.get("given_averages", ())
    run.task.load_state_dict(state["task"])
    for name, optimizer in run.optimizers.items():
        if name in changed:
            continue
        try:
            carried = restore_optimizer(run, name, optimizer, state["optimizers"][name])
            if not carried.is_as_before:
                changed[name] = carried
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint: the optimizer state of {name!r} does not fit: {error}"
            ) from error
    run.precision.load_state_dict(state["precision"])
    return changed


def begin_anew(
    run: Run, modules: dict[str, Mapping[str, Tensor]], optimizers: Mapping[str, Any]
) -> dict[str, Carried]:
    """Add to a checkpoint's modules those that a setting has added to the run since; return their optimizers.

    An average begins with the weights that it averages. A network that only new optimizers train, or none yet (a
    discriminator, once it has power), stays as it was built; a frozen one must be in the checkpoint. Nothing is added
    to a checkpoint without any of the run's optimizers.
    """
    task = run.task
    added = {name: network for name, network in task.trainable.items() if name not in optimizers}
    if len(added) == len(task.trainable):
        return {}
    trained = {
        weight
        for name in task.trainable.keys() - added
        for weight in task.trainable[name].parameters()
    }
    for name, module in task.modules.items():  # averages are behind the networks
        averaged, weights = name.removesuffix(SUFFIX), set(module.parameters())
        if name in modules:
            continue
        if averaged in modules:
            modules[name] = modules[averaged]
        elif weights and all(weight.requires_grad for weight in weights) and not weights & trained:
            modules[name] = module_state(run.precision, module)
    return {name: Carried("", lineage(run.optimizers[name])[0]) for name in added}


def restore_optimizer(
    run: Run, name: str, optimizer: Optimizer, saved: Mapping[str, Any]
) -> Carried:
    """Load the usable part of an optimizer's state; its settings stay those of this run, which a resume may have
    changed.

    Raises KeyError or ValueError for a state of other parameters.
    """
    every = {
        f"{name}.{key}": p.requires_grad for key, p in run.task.trainable[name].named_parameters()
    }
    trained = [key for key, is_trained in every.items() if is_trained]
    kept = {"lr_scale", *type(run.optimizer_settings[name]).model_fields} - {"lr"}
    built = [
        {key: value for key, value in group.items() if key in kept}
        for group in optimizer.param_groups
    ]
    foreign = () if run.precision.numerics.lifts_state else (COMPENSATION,)
    fitting = fit_saved_groups(dict(saved), optimizer, trained, list(every))
    loaded, carried = carry_over(fitting, optimizer, foreign)
    optimizer.load_state_dict(loaded)
    if saved.get("weights"):
        keep_saved_dtypes(optimizer, loaded, saved["weights"])
    if run.world.is_sharded:
        from mpt.parallel.shard import shard_state

        shard_state(optimizer)
    for group, settings in zip(optimizer.param_groups, built, strict=True):
        group.update(settings)
    return carried


def restore_modules(run: Run, state: Mapping[str, Any]) -> None:
    """Put a captured state's weights into a built run, after checking every name and shape."""
    missing = set(run.task.modules) - set(state["modules"])
    if missing:
        raise CheckpointError(
            f"checkpoint: it has no module {', '.join(sorted(missing))}; it is of another task or model"
        )
    for name, module in run.task.modules.items():
        own = {f"{name}.{key}": value for key, value in module_state(run.precision, module).items()}
        compare_keys(
            own,
            {
                f"{name}.{key}": value
                for key, value in rows_of(run, name, state["modules"][name]).items()
            },
        )
    for name, module in run.task.modules.items():
        saved = rows_of(run, name, state["modules"][name])
        refuse_split(name, module, saved)
        if run.world.is_sharded:
            from mpt.parallel.shard import shards_of

            saved = shards_of(module, saved)
        load_module_state(run.precision, module, saved)


def restore_trained(run: Run, state: Mapping[str, Any]) -> None:
    """Put the weights and the task's own state into a run that is to infer or to be measured.

    The state of an exported file is of its networks alone.
    """
    restore_modules(run, state)
    if "task" in state:
        run.task.load_state_dict(state["task"])


def rows_of(run: Run, name: str, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a module's saved state with one row for the single numbers that are sharded here."""
    numbers = run.world.numbers
    return {
        key: value.reshape(1) if f"{name}.{key}" in numbers else value
        for key, value in saved.items()
    }


def capture_random(device: torch.device) -> dict[str, Any]:
    """Return the state of torch's, numpy's and Python's global generators."""
    name, keys, position, has_gauss, gauss = cast(NumpyState, numpy.random.get_state(legacy=True))
    version, internal, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [name, torch.from_numpy(keys.astype("int64")), position, has_gauss, gauss],
        "python": [version, torch.tensor(internal), gauss_next],
    }
    own = accelerator.random_state(device)
    if own is not None:
        state[device.type] = own
    return state


def restore_random(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the result of `capture_random`; a state from another kind of device is restored as far as it goes."""
    torch.set_rng_state(_bytes(state["torch"]))
    name, keys, position, has_gauss, gauss = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss_next))
    if device.type != "cpu" and device.type in state:
        accelerator.set_random_state(device, _bytes(state[device.type]))


def _bytes(state: Tensor) -> Tensor:
    return state.cpu().to(torch.uint8)
