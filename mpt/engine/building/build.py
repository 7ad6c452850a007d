"""Config -> Run: the only place where parts meet.

Data spec -> networks (on the CPU, so that every device starts from the same weights) -> half, if a mode stores its
weights so -> device -> task -> memory tricks -> precision -> optimizers -> phases. Optimizers come after module
surgery, or their parameters would go stale. Under fake tensors networks are built on `meta` and given storage-less
tensors of the device, since `Module.to` refuses fakes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import Optimizer

from mpt.config.options import setting_of
from mpt.config.schema import Config
from mpt.engine.building.freezing import freeze
from mpt.engine.building.initial_weights import Start, load_initial_weights
from mpt.engine.building.optimizers import build_optimizers, clip_norm, optimizer_settings
from mpt.engine.building.start_notes import lost_decay, start_notes
from mpt.engine.state.averages import describe as describe_averages
from mpt.engine.state.early_stopping import Rule
from mpt.engine.state.moving_averages import add_averages, fill_averages
from mpt.engine.step.built_parts import (
    Networks,
    check_forward,
    check_networks,
    check_phases,
    require,
)
from mpt.errors import ConfigError, DataError
from mpt.metrics.shared.choice import metrics_of, refuse_taken
from mpt.nn.shared.devices import any_waits, place
from mpt.nn.shared.no_values import WithoutValues
from mpt.nn.shared.synchronised_norm import synchronise
from mpt.parallel.world import ALONE, World
from mpt.precision.stable.stable_forms import make_stable_forms
from mpt.seams import (
    Adaptation,
    Dataset,
    DataSpec,
    Game,
    HoldsWeights,
    MemoryTrick,
    Phase,
    Precision,
    Run,
    Task,
)
from mpt.seams.samples import adopt
from mpt.seams.task_kinds import differentiates_twice
from mpt.seams.task_members import check_task
from mpt.seams.undo import BufferCopies


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), numpy and Python's random."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def build_datasets(config: Config) -> tuple[Dataset, Dataset]:
    """Build the training and the test set; image size and channels follow the model if the data set leaves them
    open.

    Raises DataError for a test set that the task cannot evaluate on, which a run would else meet at its end.
    """
    settings = config.sized_dataset.native_settings()
    build = config.dataset.member("build")
    built = [build(settings, split, config.seed) for split in ("train", "test")]
    train, test = map(adopt, built)
    needed = config.task.plugin.optional("TEST_SAMPLES", 1)
    if len(test) < needed:
        raise DataError(
            f"the test set has {len(test)} sample(s), and {config.task.name} needs {needed} at least to evaluate "
            "(hundreds to mean anything): use more data, or a larger dataset.test_fraction where there is one"
        )
    return train, test


def build_run(
    config: Config,
    device: torch.device,
    data: DataSpec,
    fake: bool = False,
    trains: bool = True,
    restores: bool = False,
    world: World = ALONE,
) -> Run:
    """Build everything between the data and the loop.

    `fake=True` is for a surrounding FakeTensorMode: weights get no values, and optimizers the foreach path that a
    real GPU would choose. `trains=False` leaves out everything that inference does not use: optimizers and phases, and
    with them the packages and seconds that they need. `restores=True` is for a run whose weights a checkpoint will
    give: the file that `model.weights` names is not read, which may be gone by now.
    """
    seed_everything(config.seed)
    networks = build_networks(config, data, fake)
    begins = trains and not fake and not restores
    tricks = build_tricks(config)
    start = load_start(config, networks, tricks) if begins else None
    precision = build_precision(config, device)
    with unset_fake_temporarily():
        precision.convert(networks)
    task = build_task(config, place_networks(networks, tricks, device, fake), data, precision)
    in_training = begin_training_mode(task) if trains else []
    averages = add_averages(task, config.train.ema)
    given_averages = fill_averages(averages, start.averages if start else {})
    frozen = freeze(task, config.train.freeze, config.train.frozen_norm) if trains else None
    if world.size > 1:
        prepare_ranks(config, task, world)
    for trick in tricks:
        trick.apply(task, precision)
    begun = (
        [trick.begin(task) for trick in tricks if isinstance(trick, HoldsWeights)] if begins else []
    )
    prepare_precision(config, task, precision, device, world)
    settings = {name: optimizer_settings(config, name) for name in task.trainable}
    made: dict[str, Optimizer] = {}
    if trains:
        asks = says_foreach(config, task, device, fake, world)
        made = build_optimizers(config, settings, task, precision, asks)
    phases = check_phases(config.task.name, task.phases(made)) if trains else []
    precision.bind(phases)
    optimizers, phases = replace_optimizers(tricks, made, phases, precision)
    run = Run(
        config=config,
        device=device,
        data=data,
        task=task,
        precision=precision,
        tricks=tricks,
        optimizers=optimizers,
        optimizer_settings=settings,
        phases=phases,
        frozen=other_weights(phases, task),
        weights=trained_weights(phases),
        clip_norms={phase.name: clip_norm(phase, optimizers, settings) for phase in phases},
        buffers=BufferCopies(trained_buffers(task)),
        adaptation=Adaptation(is_allowed=config.memory.on_oom == "adapt"),
        messages=[line for line in (start.message if start else None, frozen, *begun) if line],
        notes=[*precision.numerics.notes, *in_training],
        stable_forms=make_stable_forms(config.precision.settings.stable_forms),
        averages=averages,
        given_averages=given_averages,
        world=world,
        keeps_gradients=any(trick.gradients == "zeroed" for trick in tricks),
    )
    run.notes.extend(further_notes(run, start, trains and not fake))
    for trick in tricks if trains else ():
        trick.attach(run)
    return run


def begin_training_mode(task: Task) -> list[str]:
    """Put trained networks that were built in evaluation mode in training mode, and return a note on each.

    Other libraries' loaders leave networks so: without dropout, and with BatchNorm's stored statistics. A network in
    training mode may have parts in evaluation mode, which stay so.
    """
    found = [name for name, network in task.trainable.items() if not network.training]
    for name in found:
        task.trainable[name].train()
    return [
        f"{name} was built in evaluation mode, without dropout and with stored statistics of BatchNorm; it is trained "
        "in training mode. Only parts of a network may be built in evaluation mode, and stay so"
        for name in found
    ]


def says_foreach(
    config: Config, task: Task, device: torch.device, fake: bool, world: World
) -> bool:
    """Whether optimizers must be given a GPU's foreach path: if they cannot see that weights lie on one."""
    # then the CPU steps, and chooses alone
    is_offloaded = world.is_sharded and config.parallel.offload
    return (
        device.type != "cpu" and (fake or any_waits(task.trainable.values())) and not is_offloaded
    )


def trained_buffers(task: Task) -> list[Tensor]:
    return [buffer.detach() for module in task.trainable.values() for buffer in module.buffers()]


def further_notes(run: Run, start: Start | None, trains: bool) -> list[str]:
    """Return the notes beyond the precision's own: of the start, of weight decay that is lost, of averages."""
    notes = [] if start is None else list(start_notes(run.config, run.task, start))
    if trains:
        notes.extend(lost_decay(run.config, run.optimizer_settings, run.precision.numerics))
    return [*notes, *describe_averages(run)]


def place_networks(
    networks: dict[str, nn.Module], tricks: Sequence[MemoryTrick], device: torch.device, fake: bool
) -> dict[str, nn.Module]:
    """Return the networks on the device, one after the other; weights that tricks pack or keep on the host are so."""
    holders = [trick for trick in tricks if isinstance(trick, HoldsWeights)]
    for trick in holders:
        trick.pack_weights(networks)
    for trick in holders:
        trick.host(networks, device)
    return {name: place(networks.pop(name), device, fake) for name in list(networks)}


def load_start(
    config: Config, networks: dict[str, nn.Module], tricks: Sequence[MemoryTrick]
) -> Start | None:
    """Load the weights that `model.weights` names, if any, and return a report."""
    weights = setting_of(config.model.settings, "weights")
    if not weights:
        return None
    plugin = config.model.plugin
    translate, read = plugin.optional("translate_weights"), plugin.optional("read_weights")
    # an average fits the network that was averaged, not one that a trick prunes, packs or gives adapters
    changed = any(isinstance(trick, HoldsWeights) and not trick.exact for trick in tricks)
    keeps_averages = config.train.ema is not None and not changed
    return load_initial_weights(networks, Path(weights), translate, read, keeps_averages)


def build_precision(config: Config, device: torch.device) -> Precision:
    mode = config.precision.mode
    made = config.precision.member("build")(mode, config.precision.native_settings(), device)
    precision = require(f"precision {mode}: its build", made, Precision)
    if config.precision.plugin.package.outside:
        check_forward(precision)
    return precision


def build_tricks(config: Config) -> list[MemoryTrick]:
    tricks = []
    for name, settings in config.memory.tricks.items():
        plugin = config.memory.plugins[name]
        made = plugin.member("build")(plugin.native_settings(settings))
        tricks.append(require(f"memory.{name}: its build", made, MemoryTrick))
    return tricks


def build_task(
    config: Config, networks: dict[str, nn.Module], data: DataSpec, precision: Precision
) -> Task:
    """Build the configured task around networks that are on their device."""
    modules = Networks(config.model.name, config.task.name, networks)
    made = config.task.member("build")(
        config.task.native_settings(), config.model.native_settings(), modules, data, precision
    )
    task = check_task(require(f"task {config.task.name}: its build", made, Task))
    # imported before the first step, not at the first evaluation
    refuse_taken(metrics_of(config.task.settings), (task.metric,))
    if isinstance(task, Game):
        task.limits = config.train.collapse
    if config.train.early_stopping is not None:
        Rule(config.train.early_stopping, task)  # refuses a metric that the task does not have
    return task


def prepare_precision(
    config: Config, task: Task, precision: Precision, device: torch.device, world: World
) -> None:
    """Give the weights the mode's dtypes and casts, and share them out over the processes if they are sharded."""
    if not world.is_sharded:
        precision.prepare(task)
        return
    from mpt.parallel.shard import numbers, shard

    precision.prepare(task, is_sharded=True)
    world.numbers = numbers(task.modules)
    world.units = shard(
        task.modules.values(),
        device.type,
        world,
        config.parallel,
        [weight for weight, master in precision.masters.items() if weight is master],
        precision.numerics.dtype,
        stays_gathered=differentiates_twice(task),
    )


def replace_optimizers(
    tricks: Sequence[MemoryTrick],
    optimizers: dict[str, Optimizer],
    phases: list[Phase],
    precision: Precision,
) -> tuple[dict[str, Optimizer], list[Phase]]:
    """Return the optimizers, and the phases with them, after tricks have put others in their places."""
    for trick in tricks:
        new = {old: trick.replace_optimizer(old, precision) for old in optimizers.values()}
        optimizers = {name: new[old] for name, old in optimizers.items()}
        phases = [replace(phase, optimizer=new[phase.optimizer]) for phase in phases]
    return optimizers, phases


def prepare_ranks(config: Config, task: Task, world: World) -> None:
    """Change settings for several processes. Raises ConfigError for those that they cannot use together."""
    if world.is_sharded:
        from mpt.parallel.shard import refuse

        refuse(config, world)
    if not config.parallel.sync_batchnorm:
        return
    if config.train.batch_size % world.size:
        raise ConfigError(
            f"parallel.sync_batchnorm: {config.train.batch_size} samples cannot be shared out evenly over {world.size} "
            "processes, which BatchNorm over all of them needs; change train.batch_size"
        )
    if config.memory.on_oom == "adapt":
        raise ConfigError(
            "parallel.sync_batchnorm: a process that runs out of memory leaves the others waiting inside a layer; set "
            "memory.on_oom=stop, or leave one of the two out"
        )
    synchronise(task.trainable.values())


def build_networks(config: Config, data: DataSpec, fake: bool) -> dict[str, nn.Module]:
    """Build the model's networks on the CPU, or on `meta` when fake."""
    build, settings = config.model.member("build"), config.model.native_settings()

    def on(device: str) -> dict[str, nn.Module]:
        with torch.device(device), WithoutValues():
            built = (
                build(settings, data, config.model.name)
                if ":" in config.model.name
                else build(settings, data)
            )
        return check_networks(config.model.name, built)

    if not fake:
        return on("cpu")
    with unset_fake_temporarily():  # a fake mode would mistake meta tensors for its own
        try:
            return on("meta")
        except (RuntimeError, NotImplementedError):
            # a builder that needs values, such as `torch.linspace(...).tolist()` for its rates
            return on("cpu")


def other_weights(phases: Sequence[Phase], task: Task) -> dict[str, list[nn.Parameter]]:
    """Return phase name -> the parameters of the other trained modules that would get a gradient."""
    found: dict[str, list[nn.Parameter]] = {}
    for phase in phases:
        own = {id(parameter) for parameter in phase.module.parameters()}
        others = [module for module in task.trainable.values() if module is not phase.module]
        weights = [parameter for module in others for parameter in module.parameters()]
        found[phase.name] = [
            weight for weight in weights if weight.requires_grad and id(weight) not in own
        ]
    return found


def trained_weights(phases: Sequence[Phase]) -> dict[str, list[nn.Parameter]]:
    """Return phase name -> its module's parameters and their masters, each once."""
    found: dict[str, list[nn.Parameter]] = {}
    for phase in phases:
        masters = [weight for group in phase.optimizer.param_groups for weight in group["params"]]
        found[phase.name] = list(
            {id(one): one for one in (*phase.module.parameters(), *masters)}.values()
        )
    return found


def parameter_count(modules: Sequence[nn.Module]) -> int:
    """Return the number of parameters of several modules, shared ones once."""
    return sum(p.numel() for p in {p for module in modules for p in module.parameters()})
