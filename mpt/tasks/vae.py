"""Variational autoencoders: one phase, the negative evidence lower bound, reconstruction from logits in float32.

The figure is the bound on the test set, in nats per image, with one draw of the posterior per image from fixed noise.
The Frechet distance of samples from the prior is given alongside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from mpt.config.options import GenerativeOptions, Options, setting_of
from mpt.losses.shared import variational
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
from mpt.tasks.shared.advice import Advice
from mpt.tasks.shared.samples import (
    FromLatents,
    Quality,
    Sampler,
    latent_size_of,
    show_reconstructions,
)

COLUMNS = 8
"""Of the preview, unless classes decide."""
TERMS = ("reconstruction", "divergence")
TEST_SAMPLES = 2
"""How small the test set may be: the distance between distributions needs a covariance."""


class Settings(GenerativeOptions):
    """Weights of the loss, and the preview."""

    divergence_weight: float = Field(1.0, ge=0)
    """Weight of the divergence in training (beta); the figure always counts it once."""


class Vae(FromLatents, Legend):
    """Train `encoder` and `decoder` together."""

    metric, higher_is_better = "negative_elbo", False
    inputs = ("image",)
    quality: Quality

    def __init__(
        self,
        settings: Settings,
        model_settings: Options,
        modules: Mapping[str, nn.Module],
        data: DataSpec,
        precision: Precision,
    ) -> None:
        if settings.inception_weights:
            require_inception(settings.inception_weights)
        self.settings, self.precision, self.data = settings, precision, data
        self.metric_note = explain_distance(data)
        self.encoder, self.decoder = modules["encoder"], modules["decoder"]
        self.modules: dict[str, nn.Module] = dict(modules)
        self.trainable: dict[str, nn.Module] = {"vae": nn.ModuleDict(dict(modules))}
        self.noise: float = setting_of(model_settings, "noise", 0.0)
        self.classes: int = self.decoder.classes  # type: ignore[assignment]
        self.latent_size = latent_size_of("decoder", self.decoder)
        self.reconstruction = precision.loss(variational.bernoulli_reconstruction)
        self.divergence = precision.loss(variational.gaussian_divergence)
        self.sample_posterior = precision.loss(variational.sample_gaussian)
        device = compute_device(self.decoder)
        self.sampler = Sampler(
            self.generate, self.latent_size, "normal", device, precision, self.classes
        )
        self.quality = Quality(data, device, settings.inception_weights)
        self.evaluation_samples = settings.metric_samples
        self.preview_columns = self.sampler.columns or COLUMNS
        self.advice = Advice()

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Both networks; memory tricks find the blocks inside."""
        return [self.encoder, self.decoder]

    def phases(self, optimizers: Mapping[str, Optimizer]) -> Sequence[Phase]:
        """Return the one phase."""
        return [Phase("vae", self.trainable["vae"], optimizers["vae"], self.losses)]

    def draw(self, batch: Batch, phase: Phase) -> Batch:
        """Add the posterior's noise (b, z), and for a denoising model the image's."""
        return {**batch, **self._noise(batch["image"])}

    @property
    def draws_by_shape(self) -> bool:
        """Every update's random inputs depend on the number and the size of the images alone."""
        return True

    def _noise(self, image: Tensor) -> Batch:
        drawn = {"posterior": torch.randn(len(image), self.latent_size, device=image.device)}
        if self.noise:
            drawn["corruption"] = torch.randn_like(image)
        return drawn

    def losses(self, batch: Batch) -> tuple[Loss, Loss]:
        """Return the bound's two terms."""
        reconstruction, divergence = self.bound(batch)
        return Loss("reconstruction", reconstruction), Loss(
            "kl", self.settings.divergence_weight * divergence
        )

    def bound(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the reconstruction and the divergence, in nats per image."""
        image, label = batch["image"], batch.get("label") if self.classes else None
        seen = image + self.noise * batch["corruption"] if self.noise else image
        mean, log_variance = self.encoder(seen, label)
        latent = self.sample_posterior(mean, log_variance, batch["posterior"])
        logits = self.decoder(latent, label)
        return self.reconstruction(logits, image), self.divergence(mean, log_variance)

    def after_step(self, step: int, samples_seen: int) -> None:
        """Count the steps; there is no average to move."""
        self.advice.steps_done = step

    def generate(self, latent_bz: Tensor, first: int = 0, truncation: float = 1.0) -> Tensor:
        """Return the decoder's pixel means for latents of the prior; sample i has class (first + i) mod classes."""
        numbers = torch.arange(first, first + len(latent_bz), device=latent_bz.device)
        return self._decode(
            latent_bz * truncation, numbers % self.classes if self.classes else None
        )

    def encode(self, image_bchw: Tensor, label_b: Tensor | None = None) -> Tensor:
        """Return the posterior means (b, z) in float32."""
        mean: Tensor = self.encoder(image_bchw, label_b if self.classes else None)[0]
        return mean.float()

    def reconstruct(self, image_bchw: Tensor, label_b: Tensor | None = None) -> Tensor:
        """Return images decoded from the posterior means."""
        return self._decode(self.encode(image_bchw, label_b), label_b if self.classes else None)

    def likeliest_label(self, image_bchw: Tensor) -> Tensor:
        """Return the labels (b,) under which images are reconstructed with the least squared error."""
        errors = []
        for number in range(self.classes):
            label = torch.full((len(image_bchw),), number, device=image_bchw.device)
            errors.append(
                (self.reconstruct(image_bchw, label) - image_bchw).square().mean((1, 2, 3))
            )
        return torch.stack(errors).argmin(0)

    def _decode(self, latent_bz: Tensor, label_b: Tensor | None) -> Tensor:
        logits: Tensor = self.decoder(latent_bz, label_b)
        return logits.float().sigmoid()

    def evaluate_batch(self, batch: Batch) -> Evidence:
        """Return the bound's terms, each sample with the mean of its batch, and the features of the images."""
        terms = self.bound({**batch, **self._noise(batch["image"])})
        means = {
            name: term.expand(len(batch["image"])) for name, term in zip(TERMS, terms, strict=True)
        }
        with self.precision.float32():
            return {**means, **self.quality.features(batch["image"], "real")}

    def conclude(self, evidence: Sequence[Evidence]) -> dict[str, float]:
        """Return the bound per test image and its terms, and the quality of samples from the prior."""
        means = {name: float(in_float64(gather(evidence, name)).mean()) for name in TERMS}
        return {"negative_elbo": sum(means.values()), **means, **self.quality.figures(evidence)}

    def preview(self, batch: Batch) -> Tensor | None:
        """Return two rows of test images over their reconstructions, then samples from fixed latents."""
        samples = self.sampler.sample(self.settings.preview_count, seed=0)
        columns = self.preview_columns or COLUMNS
        image, label = batch["image"][:columns], batch.get("label")
        if len(image) < columns:
            return samples
        rebuilt = self.reconstruct(image, None if label is None else label[: len(image)])
        return torch.cat([image.float(), rebuilt, samples])

    def infer(self, batch: Batch | None, count: int, seed: int) -> Inference:
        """Return reconstructions alongside the inputs and their codes, or without inputs samples and paths between
        them.

        For a class-conditional model images without labels are taken for the class that reconstructs them best, and
        the table names it.
        """
        if batch is None:
            return self.sampler.infer(count, seed, self.settings.truncation)
        image, label = batch["image"], None
        if self.classes:
            label = batch["label"] if "label" in batch else self.likeliest_label(image)
        code = self.encode(image, label)
        shown = show_reconstructions(image, self._decode(code, label), code)
        if label is None:
            return shown
        classes = [self.data.classes[number] for number in label.tolist()]
        return replace(
            shown,
            rows=[{"class": name, **row} for name, row in zip(classes, shown.rows, strict=True)],
        )

    def advise(self, figures: Mapping[str, float]) -> list[str]:
        """Return warnings, each once: the code carries nothing, the start apart; a distance rests on few images."""
        few = self.advice.say_once("few", self.quality.doubt)
        if figures.get("divergence", 1.0) >= 0.05:
            return few
        message = (
            "the divergence is nearly 0: the decoder ignores the code. Try a lower task.divergence_weight, a smaller "
            "model.latent_size or more steps"
        )
        return few + self.advice.say({"unused": message})


def build(
    settings: Settings,
    model_settings: Options,
    modules: Mapping[str, nn.Module],
    data: DataSpec,
    precision: Precision,
) -> Vae:
    """Build the task around `encoder` and `decoder`."""
    return Vae(settings, model_settings, modules, data, precision)
