"""Noising, targets and weights equal diffusers' schedulers, and a step written with them has the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mpt.systems.diffusion.losses.shared.objectives import Ddpm, Edm, Flow, Objective, betas
from tests.systems.diffusion.library import diffusers

CPU = torch.device("cpu")
SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2")
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def pictures(seed: int = 0) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return torch.rand(6, 2, 4, 4, generator=numbers) * 2 - 1, torch.randn(
        6, 2, 4, 4, generator=numbers
    )


def chain(answers: Any = "epsilon", schedule: Any = "linear", min_snr: float | None = None) -> Ddpm:
    return Ddpm(answers, 1000, schedule, 1e-4, 0.02, min_snr, CPU)


OBJECTIVES: dict[str, Objective] = {
    "epsilon": chain(),
    "v": chain("v", "squaredcos_cap_v2"),
    "edm": Edm(),
    "flow": Flow("logit_normal", 0.0, 1.0, 1.0),
    "shifted flow": Flow("uniform", 0.0, 1.0, 3.0),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_chain_is_that_of_diffusers(schedule: Any) -> None:
    theirs = diffusers().DDPMScheduler(beta_schedule=schedule)
    assert torch.equal(betas(schedule, 1000, 1e-4, 0.02, CPU), theirs.betas)
    clean, noise = pictures()
    steps = torch.tensor([0, 1, 10, 500, 998, 999])
    ours = chain("v", schedule)
    assert torch.equal(ours.noisy(clean, noise, steps), theirs.add_noise(clean, noise, steps))
    assert torch.equal(ours.target(clean, noise, steps), theirs.get_velocity(clean, noise, steps))


@pytest.mark.parametrize("answers", ["epsilon", "v"])
def test_min_snr_weights_are_those_of_diffusers_examples(answers: Any) -> None:
    theirs = diffusers().DDPMScheduler()
    from diffusers.training_utils import compute_snr

    steps = torch.tensor([0, 10, 300, 999])
    ratio = compute_snr(theirs, steps)
    wanted = ratio.clamp(max=5.0) / (ratio if answers == "epsilon" else ratio + 1)
    found = chain(answers, min_snr=5.0).weight(steps)
    assert found is not None
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_flow_is_that_of_diffusers() -> None:
    theirs = diffusers().FlowMatchEulerDiscreteScheduler(shift=3.0)
    clean, noise = pictures()
    times = theirs.timesteps[[0, 3, 200, 500, 900, 999]]
    sigmas = theirs.sigmas[[0, 3, 200, 500, 900, 999]]
    ours = OBJECTIVES["shifted flow"]
    torch.testing.assert_close(
        ours.noisy(clean, noise, sigmas), theirs.scale_noise(clean, times, noise), **CLOSE
    )
    torch.testing.assert_close(ours.network_time(sigmas), times, **CLOSE)


def test_logit_normal_levels_are_those_of_diffusers() -> None:
    diffusers()
    from diffusers.training_utils import compute_density_for_timestep_sampling

    torch.manual_seed(3)
    ours = Flow("logit_normal", 0.3, 0.8, 1.0).draw(4000, CPU)
    theirs = compute_density_for_timestep_sampling(
        "logit_normal", 4000, logit_mean=0.3, logit_std=0.8
    )
    for share in (0.1, 0.5, 0.9):
        assert ours.quantile(share) == pytest.approx(float(theirs.quantile(share)), abs=0.03)


def test_edm_s_preconditioning_is_that_of_diffusers() -> None:
    theirs = diffusers().EDMEulerScheduler()
    ours = OBJECTIVES["edm"]
    noisy, answer = pictures()
    for sigma in (0.002, 0.3, 1.0, 80.0):
        level = torch.full((6,), sigma)
        one = torch.tensor(sigma)
        inputs, time = theirs.precondition_inputs(noisy, one), theirs.precondition_noise(one)
        outputs = theirs.precondition_outputs(noisy, answer, one)
        torch.testing.assert_close(ours.network_input(noisy, level), inputs, **CLOSE)
        torch.testing.assert_close(ours.network_time(level)[0], time, **CLOSE)
        torch.testing.assert_close(ours.denoised(noisy, answer, level), outputs, **CLOSE)


def step_of_diffusers(
    name: str, weight: Tensor, clean: Tensor, noise: Tensor, level: Tensor
) -> Tensor:
    """Return the loss of a training step as diffusers' examples write it, for a network that multiplies by a weight."""
    library = diffusers()
    if name == "flow":
        scheduler = library.FlowMatchEulerDiscreteScheduler()
        places = [int((scheduler.sigmas == sigma).nonzero()[0]) for sigma in level]
        noisy = scheduler.scale_noise(clean, scheduler.timesteps[places], noise)
        return functional.mse_loss(weight * noisy, noise - clean)
    if name == "edm":
        scheduler = library.EDMEulerScheduler()
        noisy = clean + level.view(-1, 1, 1, 1) * noise
        errors = []
        for one, picture, wanted in zip(level, noisy, clean):
            made = scheduler.precondition_outputs(
                picture, weight * scheduler.precondition_inputs(picture, one), one
            )
            errors.append((one**2 + 0.25) / (0.5 * one) ** 2 * functional.mse_loss(made, wanted))
        return torch.stack(errors).mean()
    kinds = {"epsilon": ("epsilon", "linear"), "v": ("v_prediction", "squaredcos_cap_v2")}
    scheduler = library.DDPMScheduler(prediction_type=kinds[name][0], beta_schedule=kinds[name][1])
    noisy = scheduler.add_noise(clean, noise, level)
    wanted = noise if name == "epsilon" else scheduler.get_velocity(clean, noise, level)
    return functional.mse_loss(weight * noisy, wanted)


@pytest.mark.parametrize("name", ["epsilon", "v", "edm", "flow"])
def test_loss_and_gradient_are_those_of_a_step_written_with_diffusers(name: str) -> None:
    objective = OBJECTIVES[name]
    clean, noise = pictures()
    levels = {
        "edm": torch.tensor([0.01, 0.1, 0.5, 1.0, 5.0, 40.0]),
        "flow": torch.arange(1, 7) * 125 / 1000,
    }
    level = levels.get(name, torch.tensor([0, 5, 100, 400, 900, 999]))
    found, wanted = torch.tensor(0.3, requires_grad=True), torch.tensor(0.3, requires_grad=True)
    answer = found * objective.network_input(objective.noisy(clean, noise, level), level)
    loss = (answer - objective.target(clean, noise, level)).square().mean()
    other = step_of_diffusers(name, wanted, clean, noise, level)
    torch.testing.assert_close(loss, other, **CLOSE)
    loss.backward()
    other.backward()
    torch.testing.assert_close(
        found.grad, wanted.grad, rtol=1e-5 if name == "edm" else 1e-6, atol=1e-6
    )  # EDM: 1 / c_out


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_target_leads_back_to_the_data_from_every_level(name: str) -> None:
    objective = OBJECTIVES[name]
    clean, noise = pictures()
    for level in objective.sampling_levels(7, CPU):
        level_b = level.expand(len(clean))
        noisy, answer = (
            objective.noisy(clean, noise, level_b),
            objective.target(clean, noise, level_b),
        )
        if isinstance(objective, Ddpm) and float(objective.alpha[level]) < 0.02:
            continue  # nearly nothing of the data is in there
        torch.testing.assert_close(
            objective.denoised(noisy, answer, level_b), clean, rtol=1e-3, atol=1e-3
        )
        direction = objective.direction(noisy, answer, level_b)
        torch.testing.assert_close(
            objective.advance(noisy, direction, level_b, None), clean, rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_evaluation_levels_are_quantiles_of_what_is_drawn(name: str) -> None:
    torch.manual_seed(0)
    drawn = OBJECTIVES[name].draw(20_000, CPU).double()
    shares = (torch.arange(10, dtype=torch.float64) + 0.5) / 10
    levels = OBJECTIVES[name].evaluation_levels(10, CPU).double()
    below = torch.stack([(drawn <= level).double().mean() for level in levels])
    torch.testing.assert_close(below, shares, rtol=0, atol=0.02)
