"""One update on the card against the same update on the CPU: losses in every precision mode, gradients in float32.

Weights, batch and random numbers are the same: every draw is made on the CPU, if both take it from one generator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpt.doctor.card.subjects import MODES, first_batch, on_device, small_config
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.step.step import back_propagate, drop_gradients
from mpt.errors import MptError
from mpt.planner.device.kept_modes import KeptInBackward
from mpt.precision.shared.module_state import load_module_state, module_state
from mpt.seams import Batch, Run
from mpt.seams.phase_losses import draw_batch

DRAWS = {
    *(
        "rand",
        "randn",
        "randint",
        "randperm",
        "rand_like",
        "randn_like",
        "randint_like",
        "normal",
        "bernoulli",
    ),
    *(
        "multinomial",
        "poisson",
        "normal_",
        "uniform_",
        "bernoulli_",
        "exponential_",
        "random_",
        "log_normal_",
    ),
}
"""Functions of torch that draw random numbers."""
TOLERANCE = {"fp32": 2e-3, "tf32": 2e-2}
HALF_TOLERANCE = 0.1
"""Of losses in half precision: rounding in bfloat16 is 0.4 % in each operator."""
SMALLEST = 0.1
"""Losses below this are compared with it: differences of large numbers may be near zero."""
COMPARED_MODES = MODES[:6]


class DrawnOnHost(KeptInBackward):
    """Makes every random draw on the CPU with its default generator, whatever device it is for."""

    def handle(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Draw on the CPU, or call what does not draw."""
        name, kwargs = func.__name__, dict(kwargs)
        if name == "dropout":
            return dropped(*args, **kwargs)
        if name not in DRAWS:
            return func(*args, **kwargs)
        given = [value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        device = torch.device(kwargs.pop("device", None) or (given[0] if given else "cpu"))
        for setting in ("generator", "pin_memory"):
            kwargs.pop(setting, None)
        drawn: Tensor = func(
            *map(to_host, args), **{key: to_host(value) for key, value in kwargs.items()}
        )
        if not name.endswith("_"):
            return drawn.to(device)
        with torch.no_grad():
            return args[0].copy_(drawn)


def to_host(value: Any) -> Any:
    """Return a tensor on the CPU, anything else as it is."""
    return value.detach().cpu() if isinstance(value, Tensor) else value


def dropped(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    train: bool | None = None,
) -> Tensor:
    """Return dropout by its plain formula, with a draw on the CPU; the arguments are those of torch's two functions."""
    if not (training if train is None else train) or not p:
        return input
    kept = torch.empty(input.shape, dtype=torch.float32).bernoulli_(1 - p)
    return input * kept.to(input.device, input.dtype) / (1 - p)


def compare_losses(name: str, device: torch.device) -> dict[str, Any]:
    """Compare a shipped configuration's losses on a card with the CPU's, in each mode that the card takes."""
    config = small_config(name, "fp32")
    data, _ = build_datasets(config)
    batch = first_batch(data)
    host = build_run(config, torch.device("cpu"), data.spec)
    weights = {
        key: module_state(host.precision, module) for key, module in host.task.modules.items()
    }
    weights = {
        key: {path: value.clone() for path, value in state.items()}
        for key, state in weights.items()
    }
    expected, expected_norms = losses_of_one_update(
        host, on_device(batch, data, torch.device("cpu"))
    )
    said, wrong = [], []
    for mode in COMPARED_MODES:
        try:
            run = build_run(small_config(name, mode), device, data.spec)
        except MptError as error:
            said.append(f"{mode} refused: {str(error).splitlines()[0]}")
            continue
        for key, module in run.task.modules.items():
            load_module_state(run.precision, module, weights[key])
        found, norms = losses_of_one_update(run, on_device(batch, data, device))
        parts = {**found, **(norms if mode == "fp32" else {})}
        apart = {
            key: difference(value, {**expected, **expected_norms}[key])
            for key, value in parts.items()
        }
        worst = max(apart, key=lambda key: apart[key])
        said.append(f"{mode} {apart[worst]:.1e}")
        if not apart[worst] <= TOLERANCE.get(mode, HALF_TOLERANCE):
            wrong.append(
                f"{mode}: {worst} is {parts[worst]:.6g}, and on the CPU {({**expected, **expected_norms})[worst]:.6g}"
            )
        del run
    row = {"said": f"largest relative difference of a loss or a gradient's norm: {', '.join(said)}"}
    return {**row, **({"wrong": "; ".join(wrong)} if wrong else {})}


def difference(one: float, other: float) -> float:
    """Return how far two figures are apart, relative to the second; NaN if one of them is."""
    return abs(one - other) / max(abs(other), SMALLEST)


def losses_of_one_update(run: Run, batch: Batch) -> tuple[dict[str, float], dict[str, float]]:
    """Return every phase's losses and gradient norm of one update that no optimizer steps."""
    losses: dict[str, float] = {}
    norms: dict[str, float] = {}
    torch.manual_seed(0)
    with DrawnOnHost():  # type: ignore[no-untyped-call, unused-ignore]
        for phase in run.phases:
            found = back_propagate(run, phase, draw_batch(run, phase, batch))
            losses |= {f"{phase.name}/{key}": float(value) for key, value in found.items()}
            gradients = [
                weight.grad for weight in phase.module.parameters() if weight.grad is not None
            ]
            total = sum(float(gradient.double().square().sum()) for gradient in gradients)
            norms[f"{phase.name}'s gradient norm"] = total**0.5
            drop_gradients(run, phase)
    return losses, norms
