"""Adversarial training of a generator and a discriminator: phases `disc` (real, then fake) and `gen`.

All losses are on logits. Each loss of the discriminator is back-propagated before the next is computed, so that the
activations of one pass are held at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from mpt.config.options import Options
from mpt.metrics.feature_space import choose_feature_space
from mpt.metrics.frechet import frechet_distance
from mpt.seams import Batch, DataSpec, Inference, Loss, Phase, Precision
from mpt.tasks.common import follow, make_twin, to_signed, to_unit


class Settings(Options):
    """How the game is played."""

    ema: float | None = Field(None, gt=0, lt=1)
    """Decay of a moving average of the generator, which is then what is sampled."""
    preview_count: int = Field(64, ge=1)
    metric_samples: int = Field(2000, ge=2)


class Gan:
    """Train `gen` and `disc` against each other with the non-saturating loss on logits (Goodfellow et al. 2014)."""

    metric, higher_is_better = "frechet_distance", False

    def __init__(
        self, settings: Settings, modules: Mapping[str, nn.Module], data: DataSpec, precision: Precision
    ) -> None:
        self.settings, self.precision, self.data = settings, precision, data
        self.gen, self.disc = modules["gen"], modules["disc"]
        self.modules: dict[str, nn.Module] = dict(modules)
        self.trainable = {"disc": self.disc, "gen": self.gen}
        if settings.ema:
            self.modules["gen_ema"] = make_twin(self.gen)
        self.latent_size: int = self.gen.latent_size  # type: ignore[assignment]
        self.bce = precision.loss(functional.binary_cross_entropy_with_logits)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Both networks; memory tricks find the blocks inside."""
        return [self.gen, self.disc]

    def phases(self, optimizers: Mapping[str, Optimizer]) -> Sequence[Phase]:
        """Return the discriminator's phase, then the generator's."""
        return [
            Phase("disc", self.disc, optimizers["disc"], self.disc_losses),
            Phase("gen", self.gen, optimizers["gen"], self.gen_losses),
        ]

    def draw(self, batch: Batch, phase: Phase) -> Batch:
        """Add fresh latents (b, z)."""
        image = batch["image"]
        return {**batch, "latent": torch.randn(len(image), self.latent_size, device=image.device)}

    def disc_losses(self, batch: Batch) -> Iterator[Loss]:
        """Yield the discriminator's loss on real images, then on generated ones."""
        real = self.disc(to_signed(batch["image"]))
        yield Loss("real", self.bce(real, torch.ones_like(real, dtype=torch.float32)))
        with torch.no_grad():
            image = self.gen(batch["latent"])
        fake = self.disc(image)
        yield Loss("fake", self.bce(fake, torch.zeros_like(fake, dtype=torch.float32)))

    def gen_losses(self, batch: Batch) -> Iterator[Loss]:
        """Yield the generator's loss: its images should pass for real."""
        fake = self.disc(self.gen(batch["latent"]))
        yield Loss("loss", self.bce(fake, torch.ones_like(fake, dtype=torch.float32)))

    def after_step(self, step: int, samples_seen: int) -> None:
        """Let the EMA twin follow; its decay grows from 1/11 as (1 + step) / (10 + step)."""
        if self.settings.ema:
            follow(self.modules["gen_ema"], self.gen, min(self.settings.ema, (1 + step) / (10 + step)))

    @torch.no_grad()
    def generate(self, latent_bz: Tensor) -> Tensor:
        """Return images in [0, 1] from the generator that is evaluated, in evaluation mode."""
        gen = self.modules.get("gen_ema", self.gen)
        was_training = gen.training
        gen.eval()
        with self.precision.forward():
            image = gen(latent_bz)
        gen.train(was_training)
        return to_unit(image)

    def latents(self, count: int, seed: int, device: torch.device) -> Tensor:
        """Return latents that depend on the seed alone, the same on every device."""
        return torch.randn(count, self.latent_size, generator=torch.Generator().manual_seed(seed)).to(device)

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the Frechet distance between generated and real images in a small fixed feature space."""
        real_images = [batch["image"] for batch in batches]
        device, batch_size = real_images[0].device, len(real_images[0])
        space = choose_feature_space(self.data)
        latents = self.latents(self.settings.metric_samples, 1234, device)
        fake = torch.cat([space.features(self.generate(chunk)) for chunk in latents.split(batch_size)])
        real = torch.cat([space.features(image) for image in real_images])
        return {"frechet_distance": frechet_distance(real, fake)}

    def preview(self, batch: Batch) -> Tensor | None:
        """Return samples from fixed latents."""
        return self.generate(self.latents(self.settings.preview_count, 0, batch["image"].device))

    def infer(self, batch: Batch | None, count: int, seed: int) -> Inference:
        """Return `count` samples from latents that depend on the seed alone. A GAN has no use for inputs."""
        device = next(self.gen.parameters()).device
        tiles = self.generate(self.latents(count, seed, device))
        return Inference(tiles=tiles, outputs=tiles)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing beyond the modules."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore nothing beyond the modules."""


def build(
    settings: Settings, model_settings: Options, modules: Mapping[str, nn.Module], data: DataSpec, precision: Precision
) -> Gan:
    """Build the task around `gen` and `disc`."""
    return Gan(settings, modules, data, precision)
