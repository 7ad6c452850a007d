"""From noise to pictures: Euler's and Heun's methods of our own, and the schedulers of diffusers.

`answer(noisy, level)` is the network's output in float32 for pictures (b, c, h, w) at one level; everything here is
float32. Euler's method along an objective's directions is DDIM for DDPM. Heun's averages the directions at both ends of
a step and asks the network twice for each step but the last (Karras et al. 2022, algorithm 1 without churn).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mpt.errors import ConfigError
from mpt.systems.diffusion.losses.shared.objectives import Ddpm, Edm, Flow, Objective
from mpt.systems.diffusion.nn.shared.library import import_package

Answer = Callable[[Tensor, Tensor], Tensor]
"""Noisy pictures as the network sees them (b, c, h, w) and levels as it sees them (b,) -> its answer."""
FOR_OBJECTIVE = {
    Flow: ("FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler"),
    Edm: ("EDMEulerScheduler", "EDMDPMSolverMultistepScheduler"),
    Ddpm: (
        *("DDIMScheduler", "DDPMScheduler", "EulerDiscreteScheduler", "HeunDiscreteScheduler"),
        "DPMSolverMultistepScheduler",
    ),
}
"""Which of diffusers' schedulers fit an objective."""


def integrate(
    answer: Answer, objective: Objective, noise: Tensor, steps: int, is_heun: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield after each step the pictures, and the clean ones that the network saw in them at the step's start."""
    levels = objective.sampling_levels(steps, noise.device)
    noisy = objective.start(noise)
    for place in range(steps):
        level = levels[place].expand(len(noise))
        following = None if place + 1 == steps else levels[place + 1].expand(len(noise))
        said = ask(answer, objective, noisy, level)
        direction = objective.direction(noisy, said, level)
        clean = objective.denoised(noisy, said, level)
        moved = objective.advance(noisy, direction, level, following)
        if is_heun and following is not None:
            said = ask(answer, objective, moved, following)
            second = objective.direction(moved, said, following)
            moved = objective.advance(noisy, (direction + second) / 2, level, following)
        noisy = moved
        yield noisy, clean


def ask(answer: Answer, objective: Objective, noisy: Tensor, level_b: Tensor) -> Tensor:
    """Return the network's answer to noisy pictures of the objective's levels."""
    return answer(objective.network_input(noisy, level_b), objective.network_time(level_b))


def integrate_by_library(
    answer: Answer, scheduler: Any, noise: Tensor, steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield after each step of diffusers' scheduler the pictures, and the clean ones if it names them.

    A scheduler's random numbers come from a generator of its own with a fixed seed.
    """
    scheduler.set_timesteps(steps, device=noise.device)
    drawn = torch.Generator(noise.device).manual_seed(0)
    noisy = noise * scheduler.init_noise_sigma if hasattr(scheduler, "init_noise_sigma") else noise
    for time in scheduler.timesteps:
        seen = (
            scheduler.scale_model_input(noisy, time)
            if hasattr(scheduler, "scale_model_input")
            else noisy
        )
        said = answer(seen, time.to(noise.device).expand(len(noise)))
        random = {"generator": drawn} if type(scheduler).__name__ != "HeunDiscreteScheduler" else {}
        made = scheduler.step(said, time, noisy, **random)
        noisy = made.prev_sample
        clean = getattr(made, "pred_original_sample", None)
        yield noisy, noisy if clean is None else clean


def make_scheduler(name: str, objective: Objective, betas: dict[str, Any]) -> Any:
    """Return diffusers' scheduler with an objective's settings. `betas` are those of DDPM's chain.

    Raises ConfigError for one that does not fit the objective, and if diffusers is not installed.
    """
    fitting = FOR_OBJECTIVE[type(objective)]
    if name not in fitting:
        raise ConfigError(
            f"task.sampler: {name} does not fit this objective; fitting are euler, heun and, of diffusers, "
            f"{', '.join(fitting)}"
        )
    diffusers = import_package("diffusers", "task.sampler")
    return getattr(diffusers, name)(**scheduler_settings(name, objective, betas))


def scheduler_settings(name: str, objective: Objective, betas: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of one of diffusers' schedulers for an objective."""
    if isinstance(objective, Flow):
        if name == "FlowMatchEulerDiscreteScheduler":
            return {"shift": objective.shift}
        return {
            "prediction_type": "flow_prediction",
            "use_flow_sigmas": True,
            "flow_shift": objective.shift,
        }
    if isinstance(objective, Edm):
        return {
            "sigma_min": objective.sigma_min,
            "sigma_max": objective.sigma_max,
            "sigma_data": objective.sigma_data,
            "rho": objective.rho,
        }
    assert isinstance(objective, Ddpm)
    answers = "epsilon" if objective.answers == "epsilon" else "v_prediction"
    unclipped = {"clip_sample": False} if name in ("DDIMScheduler", "DDPMScheduler") else {}
    return {**betas, "prediction_type": answers, "timestep_spacing": "trailing", **unclipped}
