"""What the tasks that make images share: samples from a seed alone, paths between them, figures of quality."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mpt.data.seeds import mix
from mpt.metrics.diversity import diversity_ratio
from mpt.metrics.feature_space import choose_feature_space
from mpt.metrics.frechet import frechet_distance
from mpt.metrics.inception_distance import InceptionDistance
from mpt.seams import Batch, DataSpec, Inference

Prior = Literal["normal", "uniform"]
PATH_STEPS, PATHS, METRIC_SEED = 8, 8, 1234
MOST_COLUMNS = 16
LATENTS = 1
"""Told apart from the seeds of runs: a network's first weights are the first numbers of its run's generator, and
latents that equal them have styles that no other latents have."""


@dataclass(frozen=True)
class Sampler:
    """Turns seeds into images. `make(latents, first, truncation)` returns images in [0, 1].

    `first` is the number of the first sample, by which class-conditional models go through their classes.
    """

    make: Callable[[Tensor, int, float], Tensor]
    latent_size: int
    prior: Prior
    device: torch.device
    classes: int = 0
    """Of a class-conditional model; 0 where samples have none."""

    @property
    def columns(self) -> int | None:
        """Return the columns of a grid in which each column is a class; None where that cannot be."""
        return self.classes if 0 < self.classes <= MOST_COLUMNS else None

    def latents(self, count: int, seed: int) -> Tensor:
        """Return latents that depend on the seed alone, the same on every device."""
        numbers = torch.Generator().manual_seed(mix(LATENTS, seed))
        return draw_latents(count, self.latent_size, self.prior, torch.device("cpu"), numbers).to(self.device)

    def sample(self, count: int, seed: int, truncation: float = 1.0) -> Tensor:
        """Return `count` images."""
        return self.make(self.latents(count, seed), 0, truncation)

    def paths(self, seed: int) -> Tensor:
        """Return rows of `PATH_STEPS` images, each row a way from one latent to another of the same class.

        There is a row per class, where `columns` has room for them, else `PATHS` rows.
        """
        ends = torch.split(self.latents(2 * (self.columns or PATHS), seed), 2)
        ways = [interpolate(first, last, PATH_STEPS, self.prior) for first, last in ends]
        frames = torch.stack(ways, dim=1)  # (steps, paths, d): row i of the result keeps class i
        images = torch.stack([self.make(frame, 0, 1.0) for frame in frames], dim=1)
        return images.flatten(0, 1)

    def infer(self, count: int, seed: int, truncation: float) -> Inference:
        """Return samples, and as further pictures truncated samples and paths between latents."""
        tiles = self.sample(count, seed)
        figures = {"truncated": self.sample(count, seed, truncation), "interpolation": self.paths(seed)}
        columns = {"interpolation": PATH_STEPS} | ({"truncated": self.columns} if self.columns else {})
        return Inference(tiles=tiles, columns=self.columns, outputs=tiles, figures=figures, figure_columns=columns)

    def quality(
        self, data: DataSpec, real: Iterable[Batch], count: int, inception_weights: str | None = None
    ) -> dict[str, float]:
        """Return the Frechet distance and the diversity of `count` samples beside the real images, two at least.

        With a weights file the published FID is given as well.
        """
        space = choose_feature_space(data)
        inception = InceptionDistance(inception_weights, self.device) if inception_weights else None
        real_features: list[Tensor] = []
        batch_size = 1
        for batch in real:
            image = batch["image"]
            batch_size = max(batch_size, len(image))
            real_features.append(space.features(image))
            if inception is not None:
                inception.update(image, real=True)
        fake_features: list[Tensor] = []
        first = 0
        for latent in torch.split(self.latents(count, METRIC_SEED), batch_size):
            image = self.make(latent, first, 1.0)
            first += len(latent)
            fake_features.append(space.features(image))
            if inception is not None:
                inception.update(image, real=False)
        real_nd, fake_nd = torch.cat(real_features), torch.cat(fake_features)
        figures = {
            "frechet_distance": frechet_distance(real_nd, fake_nd),
            "diversity": diversity_ratio(real_nd, fake_nd),
        }
        if inception is not None:
            figures["inception_distance"] = inception.compute()
        return figures


def draw_latents(
    count: int, size: int, prior: Prior, device: torch.device, numbers: torch.Generator | None = None
) -> Tensor:
    """Return latents (count, size), normal or uniform in [-1, 1)."""
    if prior == "uniform":
        return torch.rand(count, size, generator=numbers, device=device) * 2 - 1
    return torch.randn(count, size, generator=numbers, device=device)


def interpolate(first_d: Tensor, last_d: Tensor, steps: int, prior: Prior) -> Tensor:
    """Return (steps, d) from the first latent to the last: along the great circle for a normal prior, else straight.

    Normal latents of many dimensions have nearly one length; a straight line would leave that shell.
    """
    share = torch.linspace(0, 1, steps, device=first_d.device).unsqueeze(1)
    if prior == "uniform":
        return first_d + share * (last_d - first_d)
    cosine = torch.dot(first_d, last_d) / (first_d.norm() * last_d.norm()).clamp_min(1e-12)
    angle = cosine.clamp(-1 + 1e-6, 1 - 1e-6).acos()
    way: Tensor = (torch.sin((1 - share) * angle) * first_d + torch.sin(share * angle) * last_d) / torch.sin(angle)
    return way


def show_reconstructions(image_bchw: Tensor, rebuilt_bchw: Tensor, code_bz: Tensor) -> Inference:
    """Return each image beside its reconstruction, and a table of errors and codes."""
    pairs = torch.stack([image_bchw.float(), rebuilt_bchw], dim=1).flatten(0, 1)
    errors = (rebuilt_bchw - image_bchw).square().mean(dim=(1, 2, 3)).tolist()
    rows = [
        {"squared_error": round(error, 6), "code": " ".join(f"{value:.4g}" for value in code)}
        for error, code in zip(errors, code_bz.tolist(), strict=True)
    ]
    return Inference(tiles=pairs, columns=2 * min(4, len(image_bchw)), rows=rows, outputs=rebuilt_bchw)
