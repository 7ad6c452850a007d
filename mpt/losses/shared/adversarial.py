"""Losses of a generator and a discriminator: functions of the discriminator's scores alone.

Every loss takes logits (or, for the autoencoder critics, energies) of shape (n,) and returns a scalar. Nothing here
applies a sigmoid and then a logarithm: `log(x + 1e-8)` means nothing in float16, in which 1e-8 is zero; `softplus` of
the logit is the same quantity and is finite for every finite logit. The penalties that differentiate twice take the
critic as a function and compute in float32, because the square of a small float16 gradient underflows.

Not here: who is trained when, and which of these a model is defined by (`mpt.tasks.gan`).

Sources: Goodfellow et al. 2014 (non-saturating); Mao et al. 2017 with a = 0, b = c = 1 (least squares); Arjovsky et
al. 2017; Gulrajani et al. 2017 (gradient penalty); Miyato et al. 2018 (hinge); Zhao et al. 2017 (energies, pull-
away); Berthelot et al. 2017 (BEGAN); Mescheder et al. 2018 (R1); Karras et al. 2020 (path length).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Critic = Callable[..., Tensor]
"""Samples, or samples and their codes, to scores (n,)."""

ScoreLoss = Callable[[Tensor], Tensor]


class Objective(NamedTuple):
    """The three parts of a game: the discriminator's loss on real scores and on fake ones, the generator's on fakes.

    They are separate so that one pass's activations are held at a time.
    """

    real: ScoreLoss
    fake: ScoreLoss
    generator: ScoreLoss


def be_high(score: Tensor) -> Tensor:
    """Return the cross-entropy of calling these scores real."""
    return F.softplus(-score).mean()


def be_low(score: Tensor) -> Tensor:
    """Return the cross-entropy of calling these scores fake."""
    return F.softplus(score).mean()


def be_near(target: float) -> ScoreLoss:
    """Return the function that gives half the mean squared distance of scores from the target."""
    return lambda score: 0.5 * (score - target).square().mean()


def be_large(score: Tensor) -> Tensor:
    """Return the negated mean: the real side of a Wasserstein critic, and its generator's loss."""
    return -score.mean()


def be_small(score: Tensor) -> Tensor:
    """Return the mean, of scores or of energies."""
    return score.mean()


def be_beyond(side: float, margin: float = 1.0) -> ScoreLoss:
    """Return the hinge: the distance of scores times `side` to the margin; beyond it there is no gradient."""
    return lambda score: F.relu(margin - side * score).mean()


def make_objective(name: str, margin: float = 5.0) -> Objective:
    """Return the objective of that name. `margin` is the energy beyond which fakes are left alone ("energy").

    "balanced" is BEGAN's, whose fake part its caller weights by k (`next_balance`) and subtracts.
    """
    objectives = {
        "nonsaturating": Objective(be_high, be_low, be_high),
        "least_squares": Objective(be_near(1.0), be_near(0.0), be_near(1.0)),
        "wasserstein": Objective(be_large, be_small, be_large),
        "hinge": Objective(be_beyond(1.0), be_beyond(-1.0), be_large),
        "energy": Objective(be_small, be_beyond(1.0, margin), be_small),
        "balanced": Objective(be_small, be_small, be_small),
    }
    return objectives[name]


def next_balance(
    balance: Tensor, real: Tensor, fake: Tensor, diversity: float, rate: float
) -> Tensor:
    """Return BEGAN's k_{t+1}: raised while the fakes' energy is below `diversity` times the reals'."""
    return keep_finite(balance + rate * (diversity * real.mean() - fake.mean()), balance).clamp(
        0, 1
    )


def keep_finite(value: Tensor, otherwise: Tensor) -> Tensor:
    """Return the value if it is finite, else the other.

    A controller's update by a forward that overflowed would stay after that step was skipped.
    """
    return torch.where(value.isfinite(), value, otherwise)


def pull_away(codes: Tensor) -> Tensor:
    """Return the mean squared cosine between different samples' codes (n, d); 0 for a single sample.

    It is a property of the batch: split into micro-batches it compares fewer pairs.
    """
    count = codes.shape[0]
    if count < 2:
        return codes.float().sum() * 0.0
    unit = F.normalize(codes.float().flatten(1), dim=1)
    cosines = (unit @ unit.T).square()
    return (cosines.sum() - cosines.diagonal().sum()) / (count * (count - 1))


def gradient_penalty(
    critic: Critic, real: tuple[Tensor, ...], fake: tuple[Tensor, ...], mix: Tensor
) -> Tensor:
    """Return the mean squared departure from 1 of the critic's gradient norm between real and fake samples.

    A sample is the critic's input: an image, a code, or both. `mix` is (n,) in [0, 1]. Call it if nothing
    casts to half: the result is differentiated again.
    """
    mixed = []
    for first, last in zip(real, fake, strict=True):
        weight = mix.float().reshape(-1, *[1] * (first.dim() - 1))
        mixed.append(
            torch.lerp(first.detach().float(), last.detach().float(), weight).requires_grad_()
        )
    # The small constant keeps the root's derivative finite if a dead critic has no gradient; float32 can hold it.
    norm = (_squared_gradient(critic, *mixed) + 1e-12).sqrt()
    return (norm - 1).square().mean()


def real_gradient_penalty(critic: Critic, real: Tensor) -> Tensor:
    """Return R1 without its factor gamma / 2: the mean squared gradient norm of the critic at real samples."""
    return _squared_gradient(critic, real.detach().float().requires_grad_()).mean()


def path_lengths(image: Tensor, styles: Tensor, noise: Tensor) -> Tensor:
    """Return the length (n,) of each sample's gradient of a random image projection with respect to its styles.

    `styles` is (n, layers, d) and part of the graph of `image` (n, c, h, w); `noise` is normal, shaped like the image.
    """
    projection = (image.float() * noise).sum() / (image.shape[2] * image.shape[3]) ** 0.5
    (slope,) = torch.autograd.grad(projection, styles, create_graph=True)
    return slope.float().square().sum(dim=2).mean(dim=1).add(1e-12).sqrt()


def path_length_penalty(lengths: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared departure of the path lengths from their running mean."""
    return (lengths - target).square().mean()


def _squared_gradient(critic: Critic, *samples: Tensor) -> Tensor:
    """Return (n,): the squared norm of each score's gradient with respect to its sample, itself differentiable."""
    with torch.enable_grad():
        slopes = torch.autograd.grad(critic(*samples).float().sum(), samples, create_graph=True)
    return torch.stack([slope.float().square().flatten(1).sum(dim=1) for slope in slopes]).sum(
        dim=0
    )
