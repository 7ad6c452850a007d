"""Train a denoising network: DDPM, EDM or rectified flow, on pixels, with or without classes.

One phase, the mean squared error at random levels of noise. Conditions are left out for a share of the samples, so that
sampling may move away from the unconditional answer (classifier-free guidance). Samples come from the moving average
(`train.ema`), by samplers of this package or diffusers' schedulers, always in float32 between the network's calls.

Sources: see `mpt.systems.diffusion.losses.shared.objectives`; Ho & Salimans 2021 (guidance).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from mpt.config.options import Options
from mpt.errors import ConfigError
from mpt.metrics.distances.feature_space import explain_distance
from mpt.metrics.distances.inception_distance import require_inception
from mpt.metrics.shared.float64 import in_float64
from mpt.nn.shared.devices import compute_device
from mpt.seams import Batch, DataSpec, Evidence, Inference, Legend, Loss, Phase, Precision, Samples, gather
from mpt.systems.diffusion.losses.shared.objectives import Ddpm, Edm, Flow, Objective
from mpt.systems.diffusion.nn.shared.embedding import to_ticks
from mpt.systems.diffusion.tasks.shared import levels, sampling
from mpt.tasks.shared.samples import Quality, Sampler

TEST_SAMPLES = 2
EMA = {"decay": 0.9999}
NOISE_SEED, SHOWN_STEPS = 4321, 8


class Settings(Options):
    """What the network answers, at which levels it is trained, and how it is sampled."""

    objective: Literal["flow", "epsilon", "v", "edm"] = "flow"
    """Rectified flow; DDPM with the noise or the velocity as the answer; EDM."""
    condition_dropout: float = Field(0.1, ge=0, lt=1)
    """Share of the samples that are trained without their conditions."""
    guidance: float = Field(1.0, ge=0)
    """How far samples move from the unconditional answer through the conditional one; 1 is the conditional answer."""
    sampler: Literal[
        "euler",
        "heun",
        "DDIMScheduler",
        "DDPMScheduler",
        "EulerDiscreteScheduler",
        "HeunDiscreteScheduler",
        "DPMSolverMultistepScheduler",
        "FlowMatchEulerDiscreteScheduler",
        "EDMEulerScheduler",
        "EDMDPMSolverMultistepScheduler",
    ] = "heun"
    """euler (for epsilon and v: DDIM), heun, or the name of one of diffusers' schedulers."""
    sampling_steps: int = Field(20, ge=1, le=1000)
    """Steps of the sampler; heun asks the network twice for each but the last."""
    times: Literal["logit_normal", "uniform"] = "logit_normal"
    """Of flow: how the noise level (0 to 1) is drawn."""
    logit_mean: float = 0.0
    """Of logit_normal: mean of the level's logit."""
    logit_std: float = Field(1.0, gt=0)
    """Of logit_normal: standard deviation of the level's logit."""
    shift: float = Field(1.0, gt=0)
    """Of flow: moves levels towards noise, in training and sampling; 3 is usual for large pictures."""
    noise_steps: int = Field(1000, ge=1)
    """Of epsilon and v: the length of the chain."""
    beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2"] = "squaredcos_cap_v2"
    """Of epsilon and v: how the variance of the chain's steps grows, by diffusers' names."""
    beta_start: float = Field(1e-4, gt=0, lt=1)
    """Of linear and scaled_linear: the first step's variance."""
    beta_end: float = Field(0.02, gt=0, lt=1)
    """Of linear and scaled_linear: the last step's variance."""
    min_snr: float | None = Field(None, gt=0)
    """Of epsilon and v: limit of the signal-to-noise ratio by which steps are weighted; 5 is usual, null is none."""
    sigma_data: float = Field(0.5, gt=0)
    """Of edm: the data's standard deviation."""
    sigma_log_mean: float = -1.2
    """Of edm: mean of the level's logarithm."""
    sigma_log_std: float = Field(1.2, gt=0)
    """Of edm: standard deviation of the level's logarithm."""
    preview_count: int = Field(64, ge=1)
    """Samples in each preview."""
    truncation: float = Field(1.0, ge=0, le=1)
    """Scale of the noise from which the further samples of `mpt infer` are made."""
    metric_samples: int = Field(2000, ge=2)
    """Samples that are judged beside the test images."""
    inception_weights: str | None = None
    """Local file of Inception weights; with it the published FID is measured too."""


class Diffusion(Samples, Legend):
    """Train `net` to answer noisy pictures, and sample from it."""

    metric, higher_is_better = "frechet_distance", False

    def __init__(self, settings: Settings, net: nn.Module, data: DataSpec, precision: Precision) -> None:
        if settings.inception_weights:
            require_inception(settings.inception_weights)
        self.settings, self.precision, self.data, self.net = settings, precision, data, net
        self.modules = self.trainable = {"net": net}
        self.classes = int(getattr(net, "classes", 0))
        self.device = compute_device(net)
        self.objective = make_objective(settings, self.device)
        self.shape = tuple(data.fields["image"].shape)
        self.metric_note = explain_distance(data)
        size = self.shape[0] * self.shape[1] * self.shape[2]
        self.sampler = Sampler(self.generate, size, "normal", self.device, precision, self.classes)
        self.quality = Quality(data, self.device, settings.inception_weights)
        self.evaluation_samples = settings.metric_samples
        self.preview_columns = self.sampler.columns
        self.squared_error = precision.loss(squared_errors)
        if settings.sampler not in ("euler", "heun"):
            self.scheduler()  # refuses one that does not fit, before the first step

    def phases(self, optimizers: Mapping[str, Optimizer]) -> Sequence[Phase]:
        """Return the one phase."""
        return [Phase("net", self.net, optimizers["net"], self.losses)]

    def draw(self, batch: Batch, phase: Phase) -> Batch:
        """Add noise, levels, and the share by which conditions are left out."""
        image = batch["image"]
        drawn = {
            "noise": torch.randn_like(image),
            "level": self.objective.draw(len(image), image.device),
            "left_out": torch.rand(len(image), device=image.device),
        }
        return {**batch, **drawn}

    @property
    def draws_by_shape(self) -> bool:
        """Every update's random inputs depend on the number and the size of the images alone."""
        return True

    def losses(self, batch: Batch) -> tuple[Loss]:
        """Return the weighted mean squared error."""
        clean, level = self.to_network(batch["image"]), batch["level"]
        answer = self.answer_to(clean, batch["noise"], level, self.conditions(batch))
        error = self.squared_error(answer, self.objective.target(clean, batch["noise"], level))
        weight = self.objective.weight(level)
        return (Loss("loss", (error if weight is None else weight * error).mean()),)

    def conditions(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the network's conditions with those left out that the draw says."""
        if not self.classes:
            return ()
        label = batch["label"]
        if "left_out" not in batch:
            return (label,)
        return (torch.where(batch["left_out"] < self.settings.condition_dropout, self.classes, label),)

    def answer_to(self, clean: Tensor, noise: Tensor, level_b: Tensor, conditions: tuple[Tensor, ...]) -> Tensor:
        """Return the network's answer to clean pictures with noise of a level added."""
        with self.precision.float32():
            noisy = self.objective.noisy(clean, noise, level_b)
            seen, ticks = self.objective.network_input(noisy, level_b), to_ticks(self.objective.network_time(level_b))
        answer: Tensor = self.net(seen, ticks, *conditions)
        return answer

    def to_network(self, image_bchw: Tensor) -> Tensor:
        """Map images from [0, 1] to [-1, 1]."""
        return image_bchw * 2 - 1

    def to_image(self, made_bchw: Tensor) -> Tensor:
        """Map samples from [-1, 1] to images in [0, 1], float32."""
        return ((made_bchw.float() + 1) / 2).clamp(0, 1)

    def scheduler(self) -> Any:
        """Return diffusers' scheduler that the settings name."""
        settings = self.settings
        betas = {
            "num_train_timesteps": settings.noise_steps,
            "beta_schedule": settings.beta_schedule,
            "beta_start": settings.beta_start,
            "beta_end": settings.beta_end,
        }
        return sampling.make_scheduler(settings.sampler, self.objective, betas)

    def trajectory(self, noise: Tensor, label_b: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pictures and clean pictures in [-1, 1] after each of the sampler's steps."""

        def answer(seen: Tensor, time_b: Tensor) -> Tensor:
            return self.guided(seen, to_ticks(time_b), label_b)

        steps = self.settings.sampling_steps
        with self.precision.float32():
            if self.settings.sampler in ("euler", "heun"):
                is_heun = self.settings.sampler == "heun"
                yield from sampling.integrate(answer, self.objective, noise, steps, is_heun)
            else:
                yield from sampling.integrate_by_library(answer, self.scheduler(), noise, steps)

    def guided(self, seen: Tensor, ticks_b: Tensor, label_b: Tensor | None) -> Tensor:
        """Return the network's answer in float32, moved away from the unconditional one."""
        scale = self.settings.guidance
        with self.precision.forward():
            if label_b is None:
                return self.net(seen, ticks_b).float()  # type: ignore[no-any-return]
            if scale == 1.0:
                return self.net(seen, ticks_b, label_b).float()  # type: ignore[no-any-return]
            none = torch.full_like(label_b, self.classes)
            both: Tensor = self.net(torch.cat([seen, seen]), torch.cat([ticks_b, ticks_b]), torch.cat([none, label_b]))
        without, conditional = both.float().chunk(2)
        return without + scale * (conditional - without)

    def generate(self, latent_bz: Tensor, first: int = 0, truncation: float = 1.0) -> Tensor:
        """Return images in [0, 1]; sample i has class (first + i) mod classes. Truncation scales the noise."""
        for made, _ in self.trajectory(self.noise(latent_bz) * truncation, self.labels(len(latent_bz), first)):
            last = made
        return self.to_image(last)

    def noise(self, latent_bz: Tensor) -> Tensor:
        """Return vectors of noise in the pictures' shape."""
        return latent_bz.view(-1, *self.shape)

    def labels(self, count: int, first: int = 0) -> Tensor | None:
        """Return the classes of samples by their numbers; None where there are none."""
        numbers = torch.arange(first, first + count, device=self.device)
        return numbers % self.classes if self.classes else None

    def evaluate_batch(self, batch: Batch) -> Evidence:
        """Return squared errors and mean squared targets (b, levels), and the features of the images."""
        clean = self.to_network(batch["image"])
        found: dict[str, list[Tensor]] = {"errors": [], "targets": []}
        for level in self.objective.evaluation_levels(levels.LEVELS, clean.device):
            noise, level_b = torch.randn_like(clean), level.expand(len(clean))
            target = self.objective.target(clean, noise, level_b)
            answer = self.answer_to(clean, noise, level_b, self.conditions(batch))
            found["errors"].append(self.squared_error(answer, target))
            found["targets"].append(target.float().square().flatten(1).mean(1))
        stacked = {name: torch.stack(values, dim=1) for name, values in found.items()}
        with self.precision.float32():
            return {**stacked, **self.quality.features(batch["image"], "real")}

    def evaluate_samples(self, first: int, count: int) -> Evidence:
        """Return the features of samples."""
        image = self.sampler.part(self.evaluation_samples, first, count)
        with self.precision.float32():
            return self.quality.features(image, "fake")

    def conclude(self, evidence: Sequence[Evidence]) -> dict[str, float]:
        """Return the test loss over all levels, unweighted, and the quality of samples."""
        errors, targets = gather(evidence, "errors"), gather(evidence, "targets")
        at = self.objective.evaluation_levels(levels.LEVELS, torch.device("cpu")).tolist()
        self.details = {"section": levels.section(at, errors, targets)}
        return {"test_loss": float(in_float64(errors).mean()), **self.quality.figures(evidence)}

    def preview(self, batch: Batch) -> Tensor | None:
        """Return samples from fixed noise."""
        return self.sampler.sample(self.settings.preview_count, seed=0)

    def samples(self, total: int, first: int, count: int, seed: int, truncation: float = 1.0) -> Tensor:
        """Return samples by their numbers."""
        return self.sampler.numbered(total, first, count, seed, truncation)

    def walk(self, seeds: Sequence[int], frames: int) -> Tensor:
        """Return images on the way from each seed's sample to the next's."""
        return self.sampler.walk(seeds, frames)

    def infer(self, batch: Batch | None, count: int, seed: int) -> Inference:
        """Return samples, samples from scaled noise, ways between samples, and what the network saw over time."""
        made = self.sampler.infer(count, seed, self.settings.truncation)
        rows = min(count, self.sampler.columns or SHOWN_STEPS)
        noise = self.noise(self.sampler.latents(rows, seed))
        seen = [self.to_image(clean) for _, clean in self.trajectory(noise, self.labels(rows))]
        chosen = [seen[round(n * (len(seen) - 1) / (SHOWN_STEPS - 1))] for n in range(SHOWN_STEPS)]
        made.figures["over_time"] = torch.stack(chosen, dim=1).flatten(0, 1)
        made.figure_columns["over_time"] = SHOWN_STEPS
        return made


def squared_errors(answer: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of each picture (b,)."""
    return (answer - target).square().flatten(1).mean(1)


def make_objective(settings: Settings, device: torch.device) -> Objective:
    """Build the objective. Raises ConfigError for a weighting that it does not have."""
    if settings.min_snr is not None and settings.objective not in ("epsilon", "v"):
        raise ConfigError(
            f"task.min_snr: {settings.objective} has no such weighting; leave it out, or use task.objective=v"
        )
    if settings.objective == "flow":
        return Flow(settings.times, settings.logit_mean, settings.logit_std, settings.shift)
    if settings.objective == "edm":
        return Edm(settings.sigma_data, settings.sigma_log_mean, settings.sigma_log_std)
    return Ddpm(
        settings.objective,
        settings.noise_steps,
        settings.beta_schedule,
        settings.beta_start,
        settings.beta_end,
        settings.min_snr,
        device,
    )


def build(
    settings: Settings, model_settings: Options, modules: Mapping[str, nn.Module], data: DataSpec, precision: Precision
) -> Diffusion:
    """Build the task around `net`."""
    data.require("image", "task diffusion")
    return Diffusion(settings, modules["net"], data, precision)
