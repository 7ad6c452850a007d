"""Shared by the tasks that make images: samples from a seed alone, paths between them, figures of quality."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mpt.data.pictures.seeds import mix
from mpt.errors import ConfigError
from mpt.metrics.distances.diversity import diversity_ratio
from mpt.metrics.distances.feature_space import FeatureSpace, choose_feature_space
from mpt.metrics.distances.frechet import frechet_distance, too_few
from mpt.metrics.distances.inception_distance import InceptionDistance
from mpt.seams import DataSpec, Evidence, Inference, Precision, Samples, gather

Prior = Literal["normal", "uniform"]
PATH_STEPS, PATHS, METRIC_SEED = 8, 8, 1234
MOST_COLUMNS = 16
LATENTS = 1
"""Told apart from the seeds of runs: a network's first weights are the first numbers of its run's generator, and
latents that equal them have styles that no other latents have."""


def latent_size_of(name: str, network: nn.Module) -> int:
    """Return the length of the latents that a network makes images of, which it says itself.

    Raises ConfigError if it does not: networks come from outside too.
    """
    size = getattr(network, "latent_size", None)
    if not isinstance(size, int):
        raise ConfigError(
            f"model: its network {name!r} does not say how long its latents are; give it `self.latent_size = ...` "
            "(docs/how-to/generative.md, A generator of your own)"
        )
    return size


@dataclass(frozen=True)
class Sampler:
    """Turns seeds into images. `make(latents, first, truncation)` returns images in [0, 1].

    `first` is the number of the first sample, by which class-conditional models go through their classes.
    """

    make: Callable[[Tensor, int, float], Tensor]
    latent_size: int
    prior: Prior
    device: torch.device
    precision: Precision
    classes: int = 0
    """Of a class-conditional model; 0 if samples have none."""

    @property
    def columns(self) -> int | None:
        """Return the columns of a grid in which each column is a class; None if that cannot be."""
        return self.classes if 0 < self.classes <= MOST_COLUMNS else None

    def latents(self, count: int, seed: int) -> Tensor:
        """Return latents that depend on the seed alone, the same on every device."""
        numbers = torch.Generator().manual_seed(mix(LATENTS, seed))
        return draw_latents(count, self.latent_size, self.prior, torch.device("cpu"), numbers).to(
            self.device
        )

    def part(self, total: int, first: int, count: int) -> Tensor:
        """Return samples `first` to `first + count` of the `total` by which an evaluation judges."""
        return self.make(self.latents(total, METRIC_SEED)[first : first + count], first, 1.0)

    def sample(self, count: int, seed: int, truncation: float = 1.0) -> Tensor:
        """Return `count` images."""
        return self.make(self.latents(count, seed), 0, truncation)

    def paths(self, seed: int) -> Tensor:
        """Return rows of `PATH_STEPS` images, each row a way from one latent to another of the same class.

        There is a row per class, if `columns` has room for them, else `PATHS` rows.
        """
        ends = torch.split(self.latents(2 * (self.columns or PATHS), seed), 2)
        with self.precision.float32():
            ways = [interpolate(first, last, PATH_STEPS, self.prior) for first, last in ends]
        frames = torch.stack(ways, dim=1)  # (steps, paths, d): row i of the result keeps class i
        images = torch.stack([self.make(frame, 0, 1.0) for frame in frames], dim=1)
        return images.flatten(0, 1)

    def numbered(self, total: int, first: int, count: int, seed: int, truncation: float) -> Tensor:
        """Return samples `first` to `first + count` of the `total` that a seed gives."""
        return self.make(self.latents(total, seed)[first : first + count], first, truncation)

    def walk(self, seeds: Sequence[int], frames: int) -> Tensor:
        """Return images on a way from the sample of one seed to that of the next, `frames` for each two, ends included.

        The sample of a seed is the first that `sample` makes of it.
        """
        ends = [self.latents(1, seed)[0] for seed in seeds]
        with self.precision.float32():
            ways = [
                interpolate(one, other, frames, self.prior)
                for one, other in itertools.pairwise(ends)
            ]
        return torch.cat([self.make(way, 0, 1.0) for way in ways])

    def infer(self, count: int, seed: int, truncation: float) -> Inference:
        """Return samples, and as further pictures truncated samples and paths between latents."""
        tiles = self.sample(count, seed)
        figures = {
            "truncated": self.sample(count, seed, truncation),
            "interpolation": self.paths(seed),
        }
        columns = {"interpolation": PATH_STEPS} | (
            {"truncated": self.columns} if self.columns else {}
        )
        return Inference(
            tiles=tiles,
            columns=self.columns,
            outputs=tiles,
            figures=figures,
            figure_columns=columns,
        )


class Quality:
    """How near samples are to real images: the Frechet distance, the diversity, and with weights the published FID.

    Networks that compute features are made at the first image of an evaluation and released at its end.
    """

    def __init__(
        self, data: DataSpec, device: torch.device, inception_weights: str | None = None
    ) -> None:
        self.data, self.device, self.inception_weights = data, device, inception_weights
        self.space: FeatureSpace | None = None
        self.inception: InceptionDistance | None = None
        self.doubt: str | None = None
        """Why the last figures mean little."""

    def features(self, image_bchw: Tensor, kind: Literal["real", "fake"]) -> Evidence:
        """Return the features of images in [0, 1]; call in float32, see `Precision.float32`."""
        if self.space is None:
            self.space = choose_feature_space(self.data)
            if self.inception_weights:
                self.inception = InceptionDistance(self.inception_weights, self.device)
        found: Evidence = {kind: self.space.features(image_bchw)}
        if self.inception is not None:
            found[f"{kind}_inception"] = self.inception.features(image_bchw)
        return found

    def figures(self, evidence: Sequence[Evidence]) -> dict[str, float]:
        """Return the figures of an evaluation with at least two images of either kind."""
        self.space = self.inception = None
        real_nd, fake_nd = gather(evidence, "real"), gather(evidence, "fake")
        self.doubt = too_few(real_nd, fake_nd)
        figures = {
            "frechet_distance": frechet_distance(real_nd, fake_nd),
            "diversity": diversity_ratio(real_nd, fake_nd),
        }
        if self.inception_weights:
            real_nd, fake_nd = (
                gather(evidence, "real_inception"),
                gather(evidence, "fake_inception"),
            )
            figures["inception_distance"] = frechet_distance(real_nd, fake_nd)
            self.doubt = self.doubt or too_few(real_nd, fake_nd)
        return figures


class FromLatents(Samples):
    """A task whose samples, and the figures of their quality, are those of its sampler."""

    precision: Precision
    sampler: Sampler
    quality: Quality | None

    def evaluate_samples(self, first: int, count: int) -> Evidence:
        """Return the features of samples."""
        assert self.quality is not None
        image = self.sampler.part(self.evaluation_samples, first, count)
        with self.precision.float32():
            return self.quality.features(image, "fake")

    def samples(
        self, total: int, first: int, count: int, seed: int, truncation: float = 1.0
    ) -> Tensor:
        """Return samples by their numbers."""
        return self.sampler.numbered(total, first, count, seed, truncation)

    def walk(self, seeds: Sequence[int], frames: int) -> Tensor:
        """Return images on the way from each seed's sample to the next's."""
        return self.sampler.walk(seeds, frames)


def draw_latents(
    count: int,
    size: int,
    prior: Prior,
    device: torch.device,
    numbers: torch.Generator | None = None,
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
    way: Tensor = (
        torch.sin((1 - share) * angle) * first_d + torch.sin(share * angle) * last_d
    ) / torch.sin(angle)
    return way


def show_reconstructions(image_bchw: Tensor, rebuilt_bchw: Tensor, code_bz: Tensor) -> Inference:
    """Return each image alongside its reconstruction, and a table of errors and codes."""
    pairs = torch.stack([image_bchw.float(), rebuilt_bchw], dim=1).flatten(0, 1)
    errors = (rebuilt_bchw - image_bchw).square().mean(dim=(1, 2, 3)).tolist()
    rows = [
        {"squared_error": round(error, 6), "code": " ".join(f"{value:.4g}" for value in code)}
        for error, code in zip(errors, code_bz.tolist(), strict=True)
    ]
    return Inference(
        tiles=pairs, columns=2 * min(4, len(image_bchw)), rows=rows, outputs=rebuilt_bchw
    )
