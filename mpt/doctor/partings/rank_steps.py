"""Steps of a training as one process takes them and as several do: outputs of modules, losses, gradients, weights.

Every step sets out from a state that one process has reached, so that each is compared for itself. A process of a
group is started as `python -m mpt.doctor.partings.rank_steps FOLDER` with the variables that torchrun sets.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from mpt.config.finding.part_packages import use_parts
from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.doctor.measuring.instrument import evenly_spaced
from mpt.doctor.measuring.measured_step import moved_weights, named_parameters
from mpt.engine.building.build import build_datasets, build_run, seed_everything
from mpt.engine.building.devices import choose_device
from mpt.engine.building.torch_settings import prepare_torch
from mpt.engine.loop.assembly import count_steps, supply_batches
from mpt.engine.state.moving_averages import follow_step
from mpt.engine.state.state import restore
from mpt.engine.step.rank_inputs import inputs_of
from mpt.engine.step.step import back_propagate, drop_gradients, update
from mpt.errors import MptError
from mpt.nn.shared.named_modules import named_modules
from mpt.optim.shared.schedules import set_learning_rates
from mpt.parallel.local import full
from mpt.parallel.start import joined
from mpt.parallel.world import World
from mpt.seams import Batch, Phase, Run
from mpt.seams.phase_losses import draw_batch
from mpt.seams.task_kinds import rate_factor

SAMPLE = 256
"""Values that are kept of each sample's output, evenly chosen."""
CONFIG, TOLD, STATE = "config.json", "rank-{}.pt", "state-{}.pt"


@dataclass
class Looked:
    """Results of one phase of a step on one process; the tensors are on the CPU."""

    phase: str
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Module and number of the call -> values of this process's samples (samples, values)."""
    losses: dict[str, float] = field(default_factory=dict)
    """The share of this process."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """As the optimizer is given them."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers after the update."""


class Stepper:
    """A training whose steps are looked at. Layers that depend on the rank by design are in evaluation mode."""

    def __init__(self, config: Config, world: World) -> None:
        prepare_torch(config)
        self.config = config
        data, _ = build_datasets(config)
        self.loader = supply_batches(config, data)
        self.total_steps = count_steps(config, self.loader)
        device = choose_device(world.choose_device(config.train.device))
        self.run: Run = build_run(config, device, data.spec, world=world)
        self.still = still_layers(self.run, has_all_samples=config.parallel.sync_batchnorm)
        for layer in self.still.values():
            layer.eval()

    def batch(self, step: int) -> Batch:
        """Return this process's part of a step's batch."""
        whole = next(iter(self.loader.batches(step)))
        count = self.config.train.batch_size
        start, stop = self.run.world.place(count)
        part = {name: value[start:stop].to(self.run.device) for name, value in whole.items()}
        return inputs_of(self.run, part, count)

    def take(self, step: int, state: dict[str, Any]) -> list[Looked]:
        """Take a step from a state and return the results of its phases."""
        run = self.run
        restore(run, state)
        set_learning_rates(
            run.optimizers, run.optimizer_settings, step, self.total_steps, rate_factor(run.task)
        )
        found = []
        batch = self.batch(step)
        for phase in (one for one in run.phases if one.is_due(step)):
            seed_everything(self.config.seed + step)
            looked = Looked(phase.name)
            with watched(run, phase, looked):
                done = update(run, phase, batch)
            looked.losses = {name: float(value) for name, value in done.losses.items()}
            found.append(looked)
        follow_step(run, step)
        weights = all_weights(run)
        for looked in found:
            looked.weights = weights
        return found

    def take_moved(self, step: int, state: dict[str, Any], amount: float) -> list[Looked]:
        """Return outputs, losses and gradients of weights and inputs that are moved by up to a share of them."""
        run = self.run
        restore(run, state)
        found = []
        batch = self.batch(step)
        for phase in (one for one in run.phases if one.is_due(step)):
            seed_everything(self.config.seed + step)
            looked = Looked(phase.name)
            drop_gradients(run, phase)
            run.buffers.remember()
            drawn = draw_batch(run, phase, batch)
            with moved_weights(run, amount) as move, watched(run, phase, looked):
                losses = back_propagate(
                    run, phase, {name: move(value) for name, value in drawn.items()}
                )
            looked.losses = {name: float(value) for name, value in losses.items()}
            scaler = run.precision.scalers.get(phase.name)
            scale = scaler.scale if scaler is not None else 1.0
            looked.gradients = {
                name: value / scale for name, value in gradients_of(run, phase).items()
            }
            drop_gradients(run, phase)
            run.buffers.restore()
            found.append(looked)
        return found


def still_layers(run: Run, *, has_all_samples: bool) -> dict[str, nn.Module]:
    """Return the layers whose results depend on the process: BatchNorm with samples of its own, and dropout."""
    kinds = (_DropoutNd,) if has_all_samples else (_DropoutNd, _BatchNorm)
    networks = run.task.modules.items()
    return {
        f"{name}.{path}": layer
        for name, net in networks
        for path, layer in net.named_modules()
        if isinstance(layer, kinds)
    }


@contextmanager
def watched(run: Run, phase: Phase, looked: Looked) -> Iterator[None]:
    """Note the outputs of modules and the gradients given to the optimizer within the block."""
    calls: defaultdict[str, int] = defaultdict(int)

    def note(path: str) -> Any:
        def hook(module: nn.Module, inputs: Any, made: Any) -> None:
            value = next(
                (one for one in tree_leaves(made) if isinstance(one, Tensor) and one.dim()), None
            )
            if value is not None and value.is_floating_point():
                looked.outputs[f"{path}, call {calls[path]}"] = sample_rows(value.detach())
                calls[path] += 1

        return hook

    def before(optimizer: Any, *_: Any) -> None:
        looked.gradients = gradients_of(run, phase)

    handles: list[Any] = [phase.optimizer.register_step_pre_hook(before)]
    if run.adaptation.micro_batch_size is None:  # else the calls of a process are others
        for name, module in named_modules(run.task.modules):
            if not any(True for _ in module.children()):
                handles.append(module.register_forward_hook(note(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def sample_rows(value: Tensor) -> Tensor:
    """Return up to `SAMPLE` values of each row, in float32 on the CPU."""
    rows = value.reshape(len(value), -1)
    if rows.shape[1] > SAMPLE:
        rows = rows[:, evenly_spaced(SAMPLE, rows.shape[1], rows.device)]
    return rows.float().cpu().clone()


def gradients_of(run: Run, phase: Phase) -> dict[str, Tensor]:
    """Return the gradients of a phase's weights, or of their masters, whole."""
    own = {id(parameter) for parameter in phase.module.parameters()}
    found = {}
    for name, parameter in named_parameters(run):
        gradient = run.precision.masters.get(parameter, parameter).grad
        if id(parameter) in own and gradient is not None:
            found[name] = full(gradient).detach().to_dense().float().cpu().clone()
    return found


def all_weights(run: Run) -> dict[str, Tensor]:
    """Return all parameters and buffers, whole."""
    networks = run.task.modules.items()
    named = [
        (f"{name}.{key}", value)
        for name, net in networks
        for key, value in net.state_dict().items()
    ]
    return {
        name: full(value).detach().cpu().clone()
        for name, value in named
        if isinstance(value, Tensor)
    }


def main(folder: Path) -> None:
    """Be one process of the group: take the steps whose states are there, and write down their results."""
    told = json.loads((folder / CONFIG).read_text())
    use_parts([])
    config = load_config(told["config"], allow=told["allow"])
    with joined(config) as world:
        stepper = Stepper(config, world)
        found = []
        for step in range(told["steps"]):
            state = torch.load(folder / STATE.format(step), weights_only=True)
            found.append([vars(one) for one in stepper.take(step, state)])
        torch.save(found, folder / TOLD.format(world.rank))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except MptError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
