"""Objectives of denoising networks behind one interface: DDPM (noise or velocity), EDM, and rectified flow.

All mix data x with normal noise n at a level: alpha x + sigma n. They differ in which levels are drawn, how the network
sees input and level, its target, and in the weight of the squared error. `advance` moves a sample from one level
to the next along a constant direction, which is DDIM for DDPM and Euler's method for the others.

Levels are whole steps (0 is the least noise) for DDPM and sigma otherwise. Nothing here looks at a tensor's values.

Sources: Ho et al. 2020 (DDPM); Salimans & Ho 2022, appendix D (velocity); Hang et al. 2023, section 3.4 (min-SNR);
Karras et al. 2022, table 1 (EDM); Liu et al. 2022 (rectified flow); Esser et al. 2024, sections 3.1 and 5.3.2
(logit-normal times, shift); Song et al. 2020 (DDIM), equation 12.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

BetaSchedule = Literal["linear", "scaled_linear", "squaredcos_cap_v2"]
Parameterization = Literal["epsilon", "v"]
TIME_SCALE = 1000.0
"""Rectified flow's sigma from 0 to 1 as networks see it, like the steps of DDPM."""


class Objective:
    """How pictures are noised and a network's target. Levels are (b,); pictures (b, ...) in about [-1, 1]."""

    def draw(self, count: int, device: torch.device) -> Tensor:
        """Return random levels (count,) to train at."""
        raise NotImplementedError

    def noisy(self, clean: Tensor, noise: Tensor, level_b: Tensor) -> Tensor:
        """Return pictures with noise of the level added."""
        raise NotImplementedError

    def network_input(self, noisy: Tensor, level_b: Tensor) -> Tensor:
        """Return noisy pictures as the network sees them."""
        return noisy

    def network_time(self, level_b: Tensor) -> Tensor:
        """Return levels as the network sees them."""
        return level_b

    def target(self, clean: Tensor, noise: Tensor, level_b: Tensor) -> Tensor:
        """Return the answer that the network should give."""
        raise NotImplementedError

    def weight(self, level_b: Tensor) -> Tensor | None:
        """Return the weights (b,) of the squared errors; None for equal ones."""
        return None

    def direction(self, noisy: Tensor, answer: Tensor, level_b: Tensor) -> Tensor:
        """Return the direction in which `advance` moves, from the network's answer."""
        return answer

    def denoised(self, noisy: Tensor, answer: Tensor, level_b: Tensor) -> Tensor:
        """Return the clean pictures that the network's answer implies."""
        raise NotImplementedError

    def advance(
        self, noisy: Tensor, direction: Tensor, level_b: Tensor, next_b: Tensor | None
    ) -> Tensor:
        """Return pictures of the next level, or with None those without noise: Euler's step, if levels are sigmas."""
        change = -level_b if next_b is None else next_b - level_b
        return noisy + beside(change, noisy) * direction

    def sampling_levels(self, steps: int, device: torch.device) -> Tensor:
        """Return the levels (steps,) of a sampler, the noisiest first; the data follow the last one."""
        raise NotImplementedError

    def start(self, noise: Tensor) -> Tensor:
        """Return pictures of the first sampling level from normal noise."""
        return noise

    def evaluation_levels(self, count: int, device: torch.device) -> Tensor:
        """Return levels (count,) at evenly spaced quantiles of those that are trained at, the least noise first."""
        raise NotImplementedError


def beside(value_b: Tensor, picture: Tensor) -> Tensor:
    """Return values (b,) in a shape that multiplies pictures (b, ...)."""
    return value_b.view(-1, *(1,) * (picture.dim() - 1))


def quantiles(count: int, device: torch.device) -> Tensor:
    """Return the midpoints (count,) of `count` equal parts of [0, 1]."""
    return (torch.arange(count, device=device, dtype=torch.float32) + 0.5) / count


class Ddpm(Objective):
    """A chain of noising steps; the network answers the noise or the velocity alpha n - sigma x."""

    def __init__(
        self,
        answers: Parameterization,
        steps: int,
        schedule: BetaSchedule,
        beta_start: float,
        beta_end: float,
        min_snr: float | None,
        device: torch.device,
    ) -> None:
        self.answers, self.steps, self.min_snr = answers, steps, min_snr
        product = torch.cumprod(1.0 - betas(schedule, steps, beta_start, beta_end, device), dim=0)
        self.alpha, self.sigma = product.sqrt(), (1.0 - product).sqrt()

    def at(self, level_b: Tensor, picture: Tensor) -> tuple[Tensor, Tensor]:
        """Return alpha and sigma of steps, to multiply pictures with."""
        return beside(self.alpha[level_b], picture), beside(self.sigma[level_b], picture)

    def draw(self, count: int, device: torch.device) -> Tensor:
        """Return uniform steps."""
        return torch.randint(self.steps, (count,), device=device)

    def noisy(self, clean: Tensor, noise: Tensor, level_b: Tensor) -> Tensor:
        """Return alpha x + sigma n."""
        alpha, sigma = self.at(level_b, clean)
        return alpha * clean + sigma * noise

    def target(self, clean: Tensor, noise: Tensor, level_b: Tensor) -> Tensor:
        """Return the noise or the velocity."""
        if self.answers == "epsilon":
            return noise
        alpha, sigma = self.at(level_b, clean)
        return alpha * noise - sigma * clean

    def weight(self, level_b: Tensor) -> Tensor | None:
        """Return min(SNR, gamma) in units of the clean picture's error, if `min_snr` is given."""
        if self.min_snr is None:
            return None
        ratio = (self.alpha[level_b] / self.sigma[level_b]) ** 2
        clipped = ratio.clamp_max(self.min_snr)
        return clipped / ratio if self.answers == "epsilon" else clipped / (ratio + 1)

    def direction(self, noisy: Tensor, answer: Tensor, level_b: Tensor) -> Tensor:
        """Return the noise that the answer implies."""
        if self.answers == "epsilon":
            return answer
        alpha, sigma = self.at(level_b, noisy)
        return alpha * answer + sigma * noisy

    def denoised(self, noisy: Tensor, answer: Tensor, level_b: Tensor) -> Tensor:
        """Return (x - sigma n) / alpha."""
        alpha, sigma = self.at(level_b, noisy)
        if self.answers == "v":
            return alpha * noisy - sigma * answer
        return (noisy - sigma * answer) / alpha

    def advance(
        self, noisy: Tensor, direction: Tensor, level_b: Tensor, next_b: Tensor | None
    ) -> Tensor:
        """Return DDIM's deterministic step."""
        alpha, sigma = self.at(level_b, noisy)
        clean = (noisy - sigma * direction) / alpha
        if next_b is None:
            return clean
        alpha, sigma = self.at(next_b, noisy)
        return alpha * clean + sigma * direction

    def sampling_levels(self, steps: int, device: torch.device) -> Tensor:
        """Return whole steps at even distances that end with the last one ("trailing" in diffusers)."""
        spaced = torch.arange(steps, device=device, dtype=torch.float64) * (self.steps / steps)
        return (self.steps - spaced).round().long() - 1

    def evaluation_levels(self, count: int, device: torch.device) -> Tensor:
        """Return evenly spaced steps."""
        return (quantiles(count, device) * self.steps).long()


class Edm(Objective):
    """Noise of a log-normal sigma added to unscaled data, with preconditioned inputs and answers.

    The network answers (x - c_skip y) / c_out for noisy y: its target has unit variance and its weight is 1.
    """

    def __init__(
        self,
        sigma_data: float = 0.5,
        log_mean: float = -1.2,
        log_std: float = 1.2,
        sigma_min: float = 0.002,
        sigma_max: float = 80.0,
        rho: float = 7.0,
    ) -> None:
        self.sigma_data, self.log_mean, self.log_std = sigma_data, log_mean, log_std
        self.sigma_min, self.sigma_max, self.rho = sigma_min, sigma_max, rho

    def draw(self, count: int, device: torch.device) -> Tensor:
        """Return log-normal sigmas."""
        return (self.log_mean + self.log_std * torch.randn(count, device=device)).exp()

    def noisy(self, clean: Tensor, noise: Tensor, level_b: Tensor) -> Tensor:
        """Return x + sigma n."""
        return clean + beside(level_b, clean) * noise

    def network_input(self, noisy: Tensor, level_b: Tensor) -> Tensor:
        """Return noisy pictures of unit variance."""
        return noisy / beside((level_b**2 + self.sigma_data**2).sqrt(), noisy)

    def network_time(self, level_b: Tensor) -> Tensor:
        """Return ln(sigma) / 4."""
        return level_b.log() / 4

    def scales(self, level_b: Tensor, picture: Tensor) -> tuple[Tensor, Tensor]:
        """Return c_skip and c_out, to multiply pictures with."""
        level = beside(level_b, picture)
        total = level**2 + self.sigma_data**2
        return self.sigma_data**2 / total, level * self.sigma_data / total.sqrt()

    def target(self, clean: Tensor, noise: Tensor, level_b: Tensor) -> Tensor:
        """Return (x - c_skip y) / c_out."""
        skip, out = self.scales(level_b, clean)
        return (clean - skip * self.noisy(clean, noise, level_b)) / out

    def denoised(self, noisy: Tensor, answer: Tensor, level_b: Tensor) -> Tensor:
        """Return c_skip y + c_out F."""
        skip, out = self.scales(level_b, noisy)
        return skip * noisy + out * answer

    def direction(self, noisy: Tensor, answer: Tensor, level_b: Tensor) -> Tensor:
        """Return the noise that the answer implies."""
        return (noisy - self.denoised(noisy, answer, level_b)) / beside(level_b, noisy)

    def start(self, noise: Tensor) -> Tensor:
        """Return noise of the largest sigma."""
        return noise * self.sigma_max

    def sampling_levels(self, steps: int, device: torch.device) -> Tensor:
        """Return sigmas from the largest to the smallest, even in the power 1 / rho."""
        share = torch.linspace(0, 1, steps, device=device)
        ends = self.sigma_max ** (1 / self.rho), self.sigma_min ** (1 / self.rho)
        levels: Tensor = (ends[0] + share * (ends[1] - ends[0])) ** self.rho
        return levels

    def evaluation_levels(self, count: int, device: torch.device) -> Tensor:
        """Return quantiles of the log-normal distribution."""
        normal = math.sqrt(2) * torch.erfinv(2 * quantiles(count, device) - 1)
        return (self.log_mean + self.log_std * normal).exp()


class Flow(Objective):
    """Straight lines from data to noise: (1 - sigma) x + sigma n; the network answers n - x."""

    def __init__(
        self,
        times: Literal["uniform", "logit_normal"],
        logit_mean: float,
        logit_std: float,
        shift: float,
    ) -> None:
        self.times, self.logit_mean, self.logit_std, self.shift = (
            times,
            logit_mean,
            logit_std,
            shift,
        )

    def shifted(self, sigma_b: Tensor) -> Tensor:
        """Return sigmas moved towards noise, as larger pictures need it."""
        if self.shift == 1.0:
            return sigma_b
        return self.shift * sigma_b / (1 + (self.shift - 1) * sigma_b)

    def draw(self, count: int, device: torch.device) -> Tensor:
        """Return sigmas: uniform ones, or the logistic function of normal numbers."""
        if self.times == "uniform":
            return self.shifted(torch.rand(count, device=device))
        return self.shifted(
            (self.logit_mean + self.logit_std * torch.randn(count, device=device)).sigmoid()
        )

    def noisy(self, clean: Tensor, noise: Tensor, level_b: Tensor) -> Tensor:
        """Return (1 - sigma) x + sigma n."""
        level = beside(level_b, clean)
        return (1 - level) * clean + level * noise

    def network_time(self, level_b: Tensor) -> Tensor:
        """Return 1000 sigma."""
        return level_b * TIME_SCALE

    def target(self, clean: Tensor, noise: Tensor, level_b: Tensor) -> Tensor:
        """Return n - x."""
        return noise - clean

    def denoised(self, noisy: Tensor, answer: Tensor, level_b: Tensor) -> Tensor:
        """Return the end of the line at the data."""
        return noisy - beside(level_b, noisy) * answer

    def sampling_levels(self, steps: int, device: torch.device) -> Tensor:
        """Return sigmas from 1 at even distances, shifted."""
        return self.shifted(1 - torch.arange(steps, device=device, dtype=torch.float32) / steps)

    def evaluation_levels(self, count: int, device: torch.device) -> Tensor:
        """Return quantiles of the distribution that is drawn from."""
        share = quantiles(count, device)
        if self.times == "uniform":
            return self.shifted(share)
        normal = math.sqrt(2) * torch.erfinv(2 * share - 1)
        return self.shifted((self.logit_mean + self.logit_std * normal).sigmoid())


def betas(
    schedule: BetaSchedule, steps: int, start: float, end: float, device: torch.device
) -> Tensor:
    """Return the variances (steps,) that the steps of DDPM add, in float32."""
    if schedule == "linear":
        return torch.linspace(start, end, steps, device=device)
    if schedule == "scaled_linear":
        return torch.linspace(start**0.5, end**0.5, steps, device=device) ** 2

    def kept(share: float) -> float:
        return math.cos((share + 0.008) / 1.008 * math.pi / 2) ** 2

    values = [
        min(1 - kept((step + 1) / steps) / kept(step / steps), 0.999) for step in range(steps)
    ]
    return torch.tensor(values, dtype=torch.float32, device=device)
