"""Small classifiers, each with one place that half precision breaks, for `scripts/doctor/doctor_table.py`.

Every network is a trunk, a block called `planted`, and a head. The block is right in float32 and right again when it
alone is kept in float32; everything around it is harmless in half. Each is a callable for `model.name:
scripts.doctor.planted_faults:NAME`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 32


class Planted(nn.Module):
    """A linear layer and a function of what it makes, (b, 32) to (b, 32)."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, value_bf: Tensor) -> Tensor:
        """Apply the layer and the function."""
        return self.function(self.linear(value_bf))


class Network(nn.Module):
    """Trunk, planted block, head, on images of 1x16x16."""

    def __init__(self, planted: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(256, WIDTH), nn.Tanh())
        self.planted = planted
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, image_bchw: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.planted(self.trunk(image_bchw)))
        return logits


def attention_scores(h: Tensor) -> Tensor:
    """Scores of queries and keys that were not divided by the square root of their size."""
    query = (1200 * h)[:, None, :]
    scores = (query.transpose(1, 2) @ query) / 1440000
    return (scores.float().softmax(-1).to(h.dtype) @ h[..., None])[..., 0]


def softmax_of_large_logits(h: Tensor) -> Tensor:
    """Logits beyond float16's range go into a softmax."""
    return 32 * torch.softmax(3e5 * h - (3e5 * h).amax(1, keepdim=True), 1)


def log_of_tiny(h: Tensor) -> Tensor:
    """1e-8 is zero in float16."""
    return torch.log(torch.sigmoid(4 * h - 18) + 1e-8) / 10


def log_of_complement(h: Tensor) -> Tensor:
    """1 - p of a p that rounds to one."""
    return torch.log(1 - torch.sigmoid(h + 9)) / 10


def variance_by_difference(h: Tensor) -> Tensor:
    """E[x^2] - E[x]^2 of numbers that are nearly equal."""
    x = h + 60
    variance = (x * x).mean(1, keepdim=True) - x.mean(1, keepdim=True) ** 2
    return h / (variance.abs() + 1e-3).sqrt()


def norm_of_large(h: Tensor) -> Tensor:
    """The squares of a long vector."""
    v = 900 * h
    return 5 * v / ((v * v).sum(1, keepdim=True) + 1).sqrt()


def mean_square(h: Tensor) -> Tensor:
    """A hand-made RMSNorm of large activations."""
    v = 1000 * h
    return v * torch.rsqrt((v * v).mean(1, keepdim=True) + 1e-6)


def vanishing_activations(h: Tensor) -> Tensor:
    """Activations that float16 flushes to zero, made large again afterwards."""
    return (1e-5 * (1e-4 * h)).float().mul(1e9).to(h.dtype)


def exponential(h: Tensor) -> Tensor:
    """exp of a little more than 11."""
    e = torch.exp(h + 12)
    return 5 * e / (1 + e.float().sum(1, keepdim=True)).to(e.dtype)


def log_sum_exp(h: Tensor) -> Tensor:
    """log of a sum of exponentials, without the largest taken out."""
    x = 2 * h + 11
    return x - torch.exp(x).sum(1, keepdim=True).log()


def long_sum(h: Tensor) -> Tensor:
    """A sum over many activations, then divided."""
    total = (3000 * (h.abs() + 1)).sum(1, keepdim=True)
    return h * (total / 96000)


def squared_distance(h: Tensor) -> Tensor:
    """|a|^2 + |b|^2 - 2ab of near points."""
    a, b = h + 30, h.roll(1, 0) + 30
    distance = (
        (a * a).sum(1, keepdim=True)
        + (b * b).sum(1, keepdim=True)
        - 2 * (a * b).sum(1, keepdim=True)
    )
    return h * (distance.abs() + 0.1).sqrt()


def coordinates(h: Tensor) -> Tensor:
    """The fraction of a pixel at position 2000, where float16 knows steps of one."""
    position = 2000 + 4 * h
    return position - position.detach().floor()


def product_of_many(h: Tensor) -> Tensor:
    """A product of eight factors of about five."""
    product = torch.ones_like(h)
    for shift in range(8):
        product = product * (h.roll(shift, 1) + 5)
    return h * (product / 390625)


def fourth_power(h: Tensor) -> Tensor:
    """A polynomial feature."""
    x = 20 * (h + 1)
    return (x * x * x * x) / 160000


def reciprocal(h: Tensor) -> Tensor:
    """1 / (x + 1e-6) near zero."""
    x = (h.abs() * 1e-6) + 1e-6
    return (1 / x) * 1e-6


def normalised_zero(h: Tensor) -> Tensor:
    """x / (|x| + 1e-8) of a vector that is zero."""
    x = h * (h.sum(1, keepdim=True) > 0)
    return x / (x.abs().amax(1, keepdim=True) + 1e-8)


def cubic_gelu(h: Tensor) -> Tensor:
    """The tanh form of GELU: right forward, infinity times zero backward."""
    x = 400 * h
    return 0.5 * x * (1 + torch.tanh(1e-5 * (0.0447 * x * x * x + 0.8 * x))) / 400


def root_near_zero(h: Tensor) -> Tensor:
    """sqrt(x + 1e-10), whose gradient is infinite once both are zero."""
    return 1e4 * torch.sqrt((1e-4 * h) * (1e-4 * h) + 1e-10)


def structural_similarity(h: Tensor) -> Tensor:
    """Local variance as DSSIM computes it, on a bright picture."""
    image = functional.pad((h * 0.003 + 0.85)[:, None, :], (4, 4), mode="circular")
    window = torch.full((1, 1, 9), 1 / 9, dtype=image.dtype, device=image.device)
    mean = functional.conv1d(image, window)
    square = functional.conv1d(image * image, window)
    variance = square - mean * mean
    return h * (variance[:, 0].abs() * 1e5 + 0.01).sqrt()


def softplus_by_hand(h: Tensor) -> Tensor:
    """log(1 + exp(x)) for large x."""
    return torch.log(1 + torch.exp(3 * h + 12)) / 12


def log_of_probabilities(h: Tensor) -> Tensor:
    """The logarithm of a softmax whose smallest probabilities are zero in float16."""
    return torch.log(torch.softmax(30 * h, 1).to(h.dtype)) / 30


def cross_entropy_by_hand(h: Tensor) -> Tensor:
    """Binary cross-entropy of probabilities, with an epsilon that is zero in float16."""
    p, target = torch.sigmoid(12 * h + 6), 0.25
    return -(target * torch.log(p + 1e-8) + (1 - target) * torch.log(1 - p + 1e-8)) / 6


def softmax_by_hand(h: Tensor) -> Tensor:
    """exp over its sum, without the largest taken out."""
    e = torch.exp(2 * h + 11)
    return 8 * e / e.sum(1, keepdim=True)


def mean_of_squares(h: Tensor) -> Tensor:
    """A mean of squares of which some are beyond the range, over the whole batch."""
    v = 450 * h
    return h * (v * v).mean() / 20000


def covariance(h: Tensor) -> Tensor:
    """E[xy] - E[x]E[y] of numbers that are nearly equal."""
    x, y = h + 50, h.flip(0) + 40
    shared = (x * y).mean(1, keepdim=True) - x.mean(1, keepdim=True) * y.mean(1, keepdim=True)
    return h / (shared.abs() + 1e-2).sqrt()


def variance_by_pools(h: Tensor) -> Tensor:
    """Local variance by average pools."""
    image = (h + 25)[:, None, :]
    variance = functional.avg_pool1d(image**2, 4) - functional.avg_pool1d(image, 4) ** 2
    return h / (variance[:, 0].abs() + 1e-2).sqrt().repeat_interleave(4, 1)


def masked_beyond_half(h: Tensor) -> Tensor:
    """A mask value that float16 does not hold, which torch refuses."""
    return torch.softmax(h.masked_fill(h < 0, -1e9), 1)


def scattered_into_float32(h: Tensor) -> Tensor:
    """Half is put into a buffer that is float32: two dtypes in one operator."""
    made = torch.zeros(h.shape)
    made[torch.arange(len(h))] = h
    return made


def cholesky_of_half(h: Tensor) -> Tensor:
    """A decomposition for which there is no kernel in half."""
    covariance = h.T @ h + 10 * torch.eye(WIDTH, dtype=h.dtype)
    return h @ torch.linalg.cholesky(covariance)


def lost_before_the_head(h: Tensor) -> Tensor:
    """A fraction that float16 loses at 2000, and a quotient of it that overflows only in the next layer."""
    position = 2000.3 + 0.25 * torch.sigmoid(h)
    return 60 / (position - 2000 + 1e-3)


def large_in_float32(h: Tensor) -> Tensor:
    """Squares beyond float16's range that the code computes in float32 itself: no fault."""
    v = 900 * h.float()
    return (5 * v / ((v * v).sum(1, keepdim=True) + 1).sqrt()).to(h.dtype)


class Explosion(nn.Module):
    """Layers whose activations double until float16 ends; a norm follows them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(9))
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight, gain=5.0)  # type: ignore[arg-type]
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, value_bf: Tensor) -> Tensor:
        """Return normalised activations."""
        for layer in self.layers:
            value_bf = layer(value_bf)
        normalised: Tensor = self.norm(value_bf)
        return normalised


REFUSED = (masked_beyond_half, scattered_into_float32, cholesky_of_half)
"""In half these raise."""
FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    attention_scores,
    softmax_of_large_logits,
    log_of_tiny,
    log_of_complement,
    variance_by_difference,
    norm_of_large,
    mean_square,
    vanishing_activations,
    exponential,
    log_sum_exp,
    long_sum,
    squared_distance,
    coordinates,
    product_of_many,
    fourth_power,
    reciprocal,
    normalised_zero,
    cubic_gelu,
    root_near_zero,
    structural_similarity,
    softplus_by_hand,
    log_of_probabilities,
    cross_entropy_by_hand,
    softmax_by_hand,
    mean_of_squares,
    covariance,
    variance_by_pools,
    lost_before_the_head,
    large_in_float32,
    *REFUSED,
)
RIGHT_ON_CUDA = tuple(
    f"plant_{function.__name__}"
    for function in (exponential, log_sum_exp, long_sum, softplus_by_hand, softmax_by_hand)
)
"""Networks that only break where exp and sum are computed in half, which CUDA's autocast does not."""
_ALL = (*(f"plant_{function.__name__}" for function in FUNCTIONS), "plant_explosion", "plant_twice")
SOUND = (*RIGHT_ON_CUDA, "plant_large_in_float32")
"""Networks among these that have no fault."""
PLANTED = tuple(name for name in _ALL if name not in SOUND)
"""The names of all networks with a fault."""


def _make(function: Callable[[Tensor], Tensor]) -> Callable[..., nn.Module]:
    def build(num_classes: int) -> nn.Module:
        return Network(Planted(function), num_classes)

    return build


for _function in FUNCTIONS:
    globals()[f"plant_{_function.__name__}"] = _make(_function)


def plant_explosion(num_classes: int) -> nn.Module:
    """Build the network whose activations grow with depth."""
    return Network(Explosion(), num_classes)


class Twice(nn.Module):
    """Two planted blocks, one behind the other: the second's fault is hidden by the first's."""

    def __init__(self, *functions: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = (Planted(function) for function in functions)

    def forward(self, value_bf: Tensor) -> Tensor:
        """Apply both."""
        made: Tensor = self.second(self.first(value_bf))
        return made


def plant_twice(num_classes: int) -> nn.Module:
    """Build the network with two faults."""
    return Network(Twice(log_of_tiny, norm_of_large), num_classes)


def harmless(num_classes: int, depth: int = 1) -> nn.Module:
    """Build the same network without a fault, with some depth."""
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(depth)
    ]
    return Network(nn.Sequential(*layers), num_classes)


def root_of_zero(num_classes: int) -> nn.Module:
    """Return a network whose gradients are not finite in float32 either."""
    return Network(Planted(lambda h: torch.sqrt((h - h) * h) + h), num_classes)


def raises_always(num_classes: int) -> nn.Module:
    """Return a network that no precision helps."""
    return Network(Planted(lambda h: h[:, :5]), num_classes)
