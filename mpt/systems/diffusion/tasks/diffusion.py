"""Train a denoising network: DDPM, EDM or rectified flow, on pixels or cached latents, with or without conditions.

One phase, the mean squared error at random levels of noise. Conditions are left out for a share of the samples, so that
sampling may move away from the unconditional answer (classifier-free guidance). Samples come from the moving average
(`train.ema`), by samplers of this package or diffusers' schedulers, always in float32 between the network's calls.

On pixels the figure is the Frechet distance of samples; on latents, and with text, it is the test loss over all levels:
latents are shown only if `decoder` names the autoencoder that made them, and text comes from the test set.

Sources: see `mpt.systems.diffusion.losses.shared.objectives`; Ho & Salimans 2021 (guidance).
"""

from __future__ import annotations

import math
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
from mpt.seams import (
    Batch,
    DataSpec,
    Evidence,
    Inference,
    Legend,
    Loss,
    Phase,
    Precision,
    gather,
)
from mpt.systems.diffusion.losses.shared.objectives import Ddpm, Edm, Flow, Objective
from mpt.systems.diffusion.losses.shared.picture_errors import masked_errors, squared_errors
from mpt.systems.diffusion.nn.shared.denoiser import Denoiser
from mpt.systems.diffusion.nn.shared.embedding import to_ticks
from mpt.systems.diffusion.tasks.shared import levels, sampling
from mpt.systems.diffusion.tasks.shared.decoding import Decoder
from mpt.tasks.shared.samples import FromLatents, Quality, Sampler

TEST_SAMPLES = 2
EMA = {"decay": 0.9999}
SHOWN_STEPS = 8
Conditions = tuple[Tensor, ...]


class Settings(Options):
    """The network's target, the levels of training, and the sampler."""

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
    unmasked_weight: float = Field(0.0, ge=0, le=1)
    """Weight of the loss at black pixels of a sample's mask, of data that have masks; at white ones it is 1."""
    sigma_data: float = Field(0.5, gt=0)
    """Of edm: the data's standard deviation."""
    sigma_log_mean: float = -1.2
    """Of edm: mean of the level's logarithm."""
    sigma_log_std: float = Field(1.2, gt=0)
    """Of edm: standard deviation of the level's logarithm."""
    decoder: str | None = None
    """Local folder of diffusers' AutoencoderKL, by which samples of cached latents are shown."""
    preview_count: int = Field(64, ge=1)
    """Samples in each preview."""
    truncation: float = Field(0.8, ge=0, le=1)
    """Scale of the noise from which the further samples of `mpt infer` are made."""
    metric_samples: int = Field(2000, ge=2)
    """Samples that are judged in addition to the test images."""
    inception_weights: str | None = None
    """Local file of Inception weights; with it the published FID is measured too."""


class Diffusion(FromLatents, Legend):
    """Train `net` to answer noisy pictures, and sample from it."""

    metric, higher_is_better = "frechet_distance", False

    def __init__(
        self, settings: Settings, net: Denoiser, data: DataSpec, precision: Precision
    ) -> None:
        if settings.inception_weights:
            require_inception(settings.inception_weights)
        self.settings, self.precision, self.data, self.net = settings, precision, data, net
        self.modules = self.trainable = {"net": net}
        self.names, self.classes = net.conditions, net.classes
        self.device = compute_device(net)
        self.objective = make_objective(settings, self.device)
        self.field = "latent" if "latent" in data.fields else "image"
        self.shape = tuple(data.fields[self.field].shape)
        self.sampler = Sampler(
            self.generate, math.prod(self.shape), "normal", self.device, precision, self.classes
        )
        self.preview_columns = self.sampler.columns
        self.decoder: Decoder | None = None
        if settings.decoder is not None:
            self.decoder = Decoder(settings.decoder, self.field, self.device)
        self.quality = None
        if self.field == "image" and not self.needs_batch:
            self.metric_note = explain_distance(data)
            self.quality = Quality(data, self.device, settings.inception_weights)
            self.evaluation_samples = settings.metric_samples
        else:
            self.metric = "test_loss"
        if self.needs_batch:
            self.inputs, self.optional_inputs = (self.field, *self.names), False
        self.squared_error, self.masked_error = (
            precision.loss(squared_errors),
            precision.loss(masked_errors),
        )
        if settings.sampler not in ("euler", "heun"):
            self.scheduler()  # refuses one that does not fit, before the first step

    @property
    def needs_batch(self) -> bool:
        """Whether samples need conditions that only data have: text, not classes."""
        return bool(set(self.names) - {"label"})

    def phases(self, optimizers: Mapping[str, Optimizer]) -> Sequence[Phase]:
        """Return the one phase."""
        return [Phase("net", self.net, optimizers["net"], self.losses)]

    def draw(self, batch: Batch, phase: Phase) -> Batch:
        """Add noise, levels, and the share by which conditions are left out."""
        image = batch[self.field]
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
        clean, level = self.to_network(batch[self.field]), batch["level"]
        answer = self.answer_to(clean, batch["noise"], level, self.conditions(batch))
        target = self.objective.target(clean, batch["noise"], level)
        if "mask" in batch:
            error = self.masked_error(
                answer, target, batch["mask"].clamp(min=self.settings.unmasked_weight)
            )
        else:
            error = self.squared_error(answer, target)
        for weight in (self.objective.weight(level), batch.get("weight")):
            error = error if weight is None else weight * error
        return (Loss("loss", error.mean()),)

    def conditions(self, batch: Batch) -> Conditions:
        """Return the network's conditions; those are left out that the draw says."""
        given = tuple(batch[name] for name in self.names)
        if "left_out" not in batch or not self.settings.condition_dropout:
            return given
        is_left_out = batch["left_out"] < self.settings.condition_dropout
        return tuple(
            torch.where(is_left_out.view(-1, *(1,) * (value.dim() - 1)), none, value)
            for value, none in zip(given, self.without(given), strict=True)
        )

    def without(self, conditions: Conditions) -> Conditions:
        """Return the input for no condition: the class after the last one, zeros for text, -1 for tokens; not sizes."""
        none = {"label": self.classes, "text": 0, "pooled": 0, "tokens": -1, "tokens_2": -1}
        return tuple(
            torch.full_like(value, none[name]) if name in none else value
            for name, value in zip(self.names, conditions, strict=True)
        )

    def answer_to(
        self, clean: Tensor, noise: Tensor, level_b: Tensor, conditions: Conditions
    ) -> Tensor:
        """Return the network's answer to clean pictures with noise of a level added."""
        with self.precision.float32():
            noisy = self.objective.noisy(clean, noise, level_b)
            seen, ticks = (
                self.objective.network_input(noisy, level_b),
                to_ticks(self.objective.network_time(level_b)),
            )
        answer: Tensor = self.net(seen, ticks, *conditions)
        return answer

    def to_network(self, image_bchw: Tensor) -> Tensor:
        """Map images from [0, 1] to [-1, 1]; latents are as the network sees them."""
        return image_bchw * 2 - 1 if self.field == "image" else image_bchw

    def to_image(self, made_bchw: Tensor) -> Tensor:
        """Map samples to images in [0, 1], float32. Raises ConfigError for latents without a decoder."""
        if self.decoder is not None:
            return self.decoder.images(made_bchw)
        if self.field == "latent":
            raise ConfigError(
                "task.decoder: name the autoencoder's folder to see samples of latents"
            )
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

    def trajectory(self, noise: Tensor, conditions: Conditions) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pictures and clean pictures, as the network sees them, after each of the sampler's steps."""

        def answer(seen: Tensor, time_b: Tensor) -> Tensor:
            return self.guided(seen, to_ticks(time_b), conditions)

        steps = self.settings.sampling_steps
        with self.precision.float32():
            if self.settings.sampler in ("euler", "heun"):
                is_heun = self.settings.sampler == "heun"
                yield from sampling.integrate(answer, self.objective, noise, steps, is_heun)
            else:
                yield from sampling.integrate_by_library(answer, self.scheduler(), noise, steps)

    def guided(self, seen: Tensor, ticks_b: Tensor, conditions: Conditions) -> Tensor:
        """Return the network's answer in float32, moved away from the unconditional one."""
        scale = self.settings.guidance
        with self.precision.forward():
            if not conditions or scale == 1.0:
                return self.net(seen, ticks_b, *conditions).float()  # type: ignore[no-any-return]
            pairs = zip(self.without(conditions), conditions, strict=True)
            both: Tensor = self.net(
                torch.cat([seen, seen]),
                torch.cat([ticks_b, ticks_b]),
                *(torch.cat(pair) for pair in pairs),
            )
        without, conditional = both.float().chunk(2)
        return without + scale * (conditional - without)

    def generate(self, latent_bz: Tensor, first: int = 0, truncation: float = 1.0) -> Tensor:
        """Return images in [0, 1]; sample i has class (first + i) mod classes. Truncation scales the noise."""
        return self.sample_with(
            self.noise(latent_bz) * truncation, self.labels(len(latent_bz), first)
        )

    def sample_with(self, noise: Tensor, conditions: Conditions) -> Tensor:
        """Return images in [0, 1] from noise (b, c, h, w) under conditions."""
        for made, _ in self.trajectory(noise, conditions):
            last = made
        return self.to_image(last)

    def noise(self, latent_bz: Tensor) -> Tensor:
        """Return vectors of noise in the pictures' shape."""
        return latent_bz.view(-1, *self.shape)

    def labels(self, count: int, first: int = 0) -> Conditions:
        """Return the classes of samples by their numbers as conditions. Raises ConfigError if text is needed."""
        if self.needs_batch:
            raise ConfigError(
                "this network samples from text embeddings, which a run does not hold; its previews show those of the "
                "test set. Export it, and sample with diffusers' pipeline"
            )
        numbers = torch.arange(first, first + count, device=self.device)
        return (numbers % self.classes,) if self.classes else ()

    def evaluate_batch(self, batch: Batch) -> Evidence:
        """Return squared errors and mean squared targets (b, levels), and the features of images."""
        clean = self.to_network(batch[self.field])
        found: dict[str, list[Tensor]] = {"errors": [], "targets": []}
        for level in self.objective.evaluation_levels(levels.LEVELS, clean.device):
            noise, level_b = torch.randn_like(clean), level.expand(len(clean))
            target = self.objective.target(clean, noise, level_b)
            answer = self.answer_to(clean, noise, level_b, self.conditions(batch))
            found["errors"].append(self.squared_error(answer, target))
            found["targets"].append(target.float().square().flatten(1).mean(1))
        stacked = {name: torch.stack(values, dim=1) for name, values in found.items()}
        if self.quality is None:
            return stacked
        with self.precision.float32():
            return {**stacked, **self.quality.features(batch["image"], "real")}

    def conclude(self, evidence: Sequence[Evidence]) -> dict[str, float]:
        """Return the test loss over all levels, unweighted, and the quality of samples."""
        errors, targets = gather(evidence, "errors"), gather(evidence, "targets")
        at = self.objective.evaluation_levels(levels.LEVELS, torch.device("cpu")).tolist()
        self.details = {"section": levels.section(at, errors, targets)}
        quality = {} if self.quality is None else self.quality.figures(evidence)
        return {"test_loss": float(in_float64(errors).mean()), **quality}

    def preview(self, batch: Batch) -> Tensor | None:
        """Return samples from fixed noise, under the batch's text if the network needs it; None without a decoder."""
        if self.field == "latent" and self.decoder is None:
            return None
        if not self.needs_batch:
            return self.sampler.sample(self.settings.preview_count, seed=0)
        count = min(self.settings.preview_count, len(batch[self.field]))
        given = tuple(batch[name][:count] for name in self.names)
        shape = batch[self.field].shape[1:]  # of several sizes, the batch's
        noise = self.sampler.latents(count, 0)[:, : math.prod(shape)].reshape(count, *shape)
        return self.sample_with(noise, given)

    def infer(self, batch: Batch | None, count: int, seed: int) -> Inference:
        """Return samples, samples from scaled noise, ways between samples, and the network's inputs over time.

        Of a batch: the network's estimate of the clean pictures, and samples under its text if a decoder shows them.
        """
        if batch is not None:
            return self.infer_batch(batch)
        made = self.sampler.infer(count, seed, self.settings.truncation)
        rows = min(count, self.sampler.columns or SHOWN_STEPS)
        noise = self.noise(self.sampler.latents(rows, seed))
        seen = [self.to_image(clean) for _, clean in self.trajectory(noise, self.labels(rows))]
        chosen = [seen[round(n * (len(seen) - 1) / (SHOWN_STEPS - 1))] for n in range(SHOWN_STEPS)]
        made.figures["over_time"] = torch.stack(chosen, dim=1).flatten(0, 1)
        made.figure_columns["over_time"] = SHOWN_STEPS
        return made

    def infer_batch(self, batch: Batch) -> Inference:
        """Return clean latents as the network sees them in the batch with noise of a medium level, and how far off."""
        clean = self.to_network(batch[self.field])
        noise, level = (
            torch.randn_like(clean),
            self.objective.evaluation_levels(levels.LEVELS, clean.device),
        )
        level_b = level[len(level) // 2].expand(len(clean))
        answer = self.answer_to(clean, noise, level_b, self.conditions(batch)).float()
        with self.precision.float32():
            seen = self.objective.denoised(
                self.objective.noisy(clean, noise, level_b), answer, level_b
            )
            errors = squared_errors(seen, clean.float()).tolist()
        rows = [{"level": f"{float(level_b[0]):.4g}", "squared_error": error} for error in errors]
        return Inference(tiles=self.preview(batch), rows=rows, outputs=seen)


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
    settings: Settings,
    model_settings: Options,
    modules: Mapping[str, nn.Module],
    data: DataSpec,
    precision: Precision,
) -> Diffusion:
    """Build the task around `net`. Raises ConfigError for another kind of network, DataError for missing conditions."""
    net = modules["net"]
    if not isinstance(net, Denoiser):
        raise ConfigError(
            f"model: task diffusion trains networks of mpt.systems.diffusion.nn.shared.denoiser.Denoiser, not "
            f"a {type(net).__name__}"
        )
    for name in net.conditions:
        data.require(name, "task diffusion")
    if (
        net.classes
        and not net.has_none
        and (settings.condition_dropout or settings.guidance != 1.0)
    ):
        raise ConfigError(
            f"task.condition_dropout: the network has vectors for {net.classes} classes and none for pictures without "
            "a class; set condition_dropout=0 and guidance=1, or give it one more"
        )
    if "latent" not in data.fields:
        data.require("image", "task diffusion")
    return Diffusion(settings, net, data, precision)
