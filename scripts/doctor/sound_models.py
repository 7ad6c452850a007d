"""Classifiers in which nothing is wrong in half precision, for the false alarms of `scripts/doctor/doctor_table.py`.

Each has something that looks like a fault or lies near one: large ranges that are safe, epsilons in float32, masks,
sums, logarithms, no norm at all. Pictures come in as (b, 1, 16, 16), from -1 to 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Pixels(nn.Module):
    """Rows of the picture as a sequence of 16 tokens, and a head on the mean of what a body makes of them."""

    width = 32

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(16, self.width)
        self.place = nn.Parameter(0.02 * torch.randn(16, self.width))
        self.head = nn.Linear(self.width, num_classes)

    def body(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x[:, 0]) + self.place).mean(1))


class PreNormTransformer(Pixels):
    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(
            [layer, nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)]
        )

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class CausalAttention(Pixels):
    """Scores are divided, and the mask is minus infinity."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.qkv = nn.Linear(32, 96)

    def body(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / math.sqrt(32)
        mask = torch.ones(16, 16, dtype=torch.bool, device=x.device).triu(1)
        return x + scores.masked_fill(mask, float("-inf")).softmax(-1) @ v


class AdditiveMask(CausalAttention):
    """The mask is added, in float32, as old BERTs do."""

    def body(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = torch.ones(16, 16, device=x.device).triu(1) * -1e9
        return x + ((q @ k.transpose(1, 2) / math.sqrt(32) + mask).softmax(-1) @ v)


class TwoLstms(Pixels):
    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.lstm = nn.LSTM(32, 32, 2, batch_first=True)

    def body(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class GruOfCells(Pixels):
    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.cell = nn.GRUCell(32, 32)

    def body(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 32, device=x.device)
        for token in x.unbind(1):
            state = self.cell(token, state)
        return state[:, None]


class Mixer(Pixels):
    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.tokens = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.norm = nn.LayerNorm(32)

    def body(self, x: Tensor) -> Tensor:
        return x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)


class RootMeanSquareNorm(Pixels):
    """By powers, which CUDA's autocast computes in float32, of numbers whose squares float16 does not hold."""

    def body(self, x: Tensor) -> Tensor:
        x = 3000 * x
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-8)


class SwitchOfExperts(Pixels):
    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.gate = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).topk(2, -1)
        made = torch.stack([expert(x) for expert in self.experts], -2)
        picked = made.gather(-2, chosen[..., None].expand(*chosen.shape, 32))
        return x + (picked * weight[..., None]).sum(-2)


class TiedAutoencoder(Pixels):
    """Tokens of quantised pixels, whose table is the output layer too."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.table = nn.Embedding(16, 32)
        self.mix = nn.Linear(32, 32)
        self.back = nn.Linear(32, 16, bias=False)
        self.back.weight = self.table.weight
        self.last = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = ((x + 1) * 7.99).long().flatten(1)
        return self.last(self.back(F.relu(self.mix(self.table(tokens) * math.sqrt(32)))).mean(1))


def convolutions(norm: type[nn.Module] | None, **options: int) -> nn.Sequential:
    def one(before: int, after: int) -> list[nn.Module]:
        made: list[nn.Module] = [nn.Conv2d(before, after, 3, padding=1)]
        return (
            [*made, norm(**options) if options else norm(after), nn.SiLU()]
            if norm
            else [*made, nn.SiLU()]
        )

    return nn.Sequential(*one(1, 16), nn.MaxPool2d(2), *one(16, 16), nn.MaxPool2d(2), *one(16, 16))


class Convolutions(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = self.make()
        self.fc = nn.Linear(16, num_classes)

    def make(self) -> nn.Module:
        return convolutions(None)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.between(self.features(x)).mean((2, 3)))


class WithGroupNorm(Convolutions):
    def make(self) -> nn.Module:
        return convolutions(nn.GroupNorm, num_groups=4, num_channels=16)


class WithInstanceNorm(Convolutions):
    def make(self) -> nn.Module:
        return convolutions(nn.InstanceNorm2d)


class WithSpectralNorm(Convolutions):
    def make(self) -> nn.Module:
        made = convolutions(None)
        for layer in made:
            if isinstance(layer, nn.Conv2d):
                nn.utils.parametrizations.spectral_norm(layer)
        return made


class GlobalResponse(Convolutions):
    def between(self, x: Tensor) -> Tensor:
        length = torch.norm(x, p=2, dim=(2, 3), keepdim=True)
        return x + x * length / (length.mean(1, keepdim=True) + 1e-6)


class SqueezeAndExcite(Convolutions):
    def between(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(4 * x.mean((2, 3), keepdim=True))


class GaussianKernels(Convolutions):
    """Distances to centres, squared and through an exponential."""

    def between(self, x: Tensor) -> Tensor:
        centres = torch.linspace(-1, 1, 16, device=x.device)[None, :, None, None]
        return torch.exp(-4 * (x - centres) ** 2)


class SharpEntropy(Convolutions):
    """The logarithm of probabilities with an epsilon: softmax and log are float32 on CUDA."""

    def between(self, x: Tensor) -> Tensor:
        p = torch.softmax(4 * x, 1)
        return x - p * torch.log(p + 1e-9)


class SmallUnet(Convolutions):
    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.down = nn.Conv2d(16, 32, 4, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1)
        self.join = nn.Conv2d(32, 16, 1)

    def between(self, x: Tensor) -> Tensor:
        return self.join(torch.cat((x, self.up(F.relu(self.down(x)))), 1))


class Siren(nn.Module):
    """Sines of 30 times a linear function of place and brightness."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first, self.second, self.fc = (
            nn.Linear(3, 64),
            nn.Linear(64, 64),
            nn.Linear(64, num_classes),
        )
        nn.init.uniform_(self.second.weight, -math.sqrt(6 / 64) / 30, math.sqrt(6 / 64) / 30)

    def forward(self, x: Tensor) -> Tensor:
        axis = torch.linspace(-1, 1, 16, device=x.device)
        place = (
            torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1)
            .view(1, -1, 2)
            .expand(len(x), -1, -1)
        )
        x = torch.cat((place, x.flatten(1)[..., None]), -1)
        return self.fc(torch.sin(30 * self.second(torch.sin(30 * self.first(x) / 3))).mean(1))


class LargeButSafe(nn.Module):
    """Activations of up to some 20,000, which float16 holds, divided before they are used."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 64), nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x.flatten(1) * 10) * 400) / 4000)


class SmallButSafe(nn.Module):
    """Activations of some 1e-4, which float16 holds with ten bits."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 64), nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x.flatten(1))) * 2e-3 * 500)


class DeepResidual(nn.Module):
    """Forty blocks with BatchNorm whose last one begins at zero."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, stride=2)
        self.blocks = nn.ModuleList()
        for _ in range(40):
            block = nn.Sequential(
                nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
            )
            nn.init.constant_(block[3].weight, 0.1)
            self.blocks.append(block)
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.fc(F.relu(x).mean((2, 3)))


class NearestCodes(nn.Module):
    """A codebook by Euclidean distances, straight through."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.encode, self.codes = nn.Conv2d(1, 8, 4, stride=4), nn.Embedding(32, 8)
        self.fc = nn.Linear(128, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x).flatten(2).transpose(1, 2)
        code = self.codes(torch.cdist(z, self.codes.weight[None]).argmin(-1))
        return self.fc((z + (code - z).detach()).flatten(1))


class SoftDecisions(nn.Module):
    """Log-probabilities of paths, by logsigmoid and logsumexp."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.split, self.leaf = nn.Linear(256, 15), nn.Parameter(torch.randn(16, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        s = 20 * self.split(x.flatten(1))
        paths = torch.stack(
            [F.logsigmoid(s[:, n % 15]) + F.logsigmoid(-s[:, (n + 1) % 15]) for n in range(16)], 1
        )
        return torch.logsumexp(paths[..., None] + self.leaf.log_softmax(1), 1)


SOUND = tuple(
    name
    for name, one in list(globals().items())
    if isinstance(one, type)
    and issubclass(one, nn.Module)
    and one.__module__ == __name__
    and name != "Pixels"
)
"""The names of all networks here."""
