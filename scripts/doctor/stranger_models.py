"""Classifiers as found in repositories, each with one place that half precision breaks, for `doctor_table.py`.

Written from the methods that they implement, without a look at what the doctor recognises. The line of the fault is
marked, and the table says whether the doctor named that line. Each is a callable for
`model.name: scripts.doctor.stranger_models:NAME`; pictures come in as (b, 1, side, side), from -1 to 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIDES = {
    "GramStyle": 32,
    "LinearAttention": 64,
    "RotaryPositions": 48,
    "IntegralImage": 64,
    "FourierOperator": 28,
}
"""The picture's side where it is not 16."""
MARK = "# <- fault"


def stem(channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)
    )


class BilinearCnn(nn.Module):
    """Second-order pooling with a signed root, for fine-grained classes."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(stem(16), nn.ReLU())
        self.fc = nn.Linear(16 * 16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x).flatten(2)
        x = torch.bmm(x, x.transpose(1, 2)) / x.shape[2]
        x = x.flatten(1)
        x = torch.sqrt(x + 1e-10)  # <- fault
        return self.fc(F.normalize(x))


class GramStyle(nn.Module):
    """Classifies by style: the Gram matrix of features of Caffe's pixels, 0 to 255."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(stem(16), nn.ReLU())
        self.head = nn.Sequential(nn.LayerNorm(16 * 16), nn.Linear(16 * 16, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        x = (x * 0.5 + 0.5) * 255 - 117
        b, c, h, w = (x := self.features(x)).shape
        f = x.view(b, c, h * w)
        gram = torch.bmm(f, f.transpose(1, 2))  # <- fault
        return self.head((gram / (c * h * w)).flatten(1))


class Capsules(nn.Module):
    """Capsules with one round of routing; a class's score is its capsule's length."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.primary = nn.Conv2d(1, 32, 5, stride=4)
        self.W = nn.Parameter(0.01 * torch.randn(num_classes, 9 * 4, 8, 8))

    def squash(self, s: Tensor) -> Tensor:
        squared = (s * s).sum(-1, keepdim=True)  # <- fault
        return squared / (1 + squared) * s / torch.sqrt(squared + 1e-12)

    def forward(self, x: Tensor) -> Tensor:
        u = self.primary(x).flatten(2).transpose(1, 2).reshape(len(x), -1, 8)
        votes = torch.einsum("bni,cnij->bcnj", u, self.W)
        v = self.squash(votes.mean(2) * 0.02)
        return 1e4 * v.norm(dim=-1)


class SumPoolEmbedding(nn.Module):
    """Features are summed over the picture and put onto the unit sphere by hand."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(stem(32), nn.ReLU(), stem_block(32))
        self.embed = nn.Linear(32, 64)
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(8 * x).sum((2, 3))
        e = self.embed(x * 4)
        length = torch.sqrt((e * e).sum(1, keepdim=True) + 1e-6)  # <- fault
        return self.fc(16 * e / length)


def stem_block(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())


class PlainResNet(nn.Module):
    """Sixty-four residual blocks without a norm: every one doubles the variance."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, stride=4)
        self.blocks = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(64))
        for block in self.blocks:
            nn.init.kaiming_normal_(block.weight, nonlinearity="relu")
        self.norm = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(F.relu(x))  # <- fault
        return self.fc(self.norm(x).mean((2, 3)))


class RotaryPositions(nn.Module):
    """Rotary positions of a long sequence, whose angles come from a product of matrices."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 16)
        self.qkv = nn.Linear(16, 48)
        self.fc = nn.Linear(16, num_classes)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 16, 2).float() / 16))

    def rotate(self, x: Tensor) -> Tensor:
        t = torch.arange(x.shape[1], device=x.device, dtype=self.inv_freq.dtype)
        angles = t[:, None] @ self.inv_freq[None]  # <- fault
        angles = torch.cat((angles, angles), -1)
        turned = torch.cat((-x[..., 8:], x[..., :8]), -1)
        return x * angles.cos() + turned * angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x[:2].flatten(1)[..., None])
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = self.rotate(q * 8) @ self.rotate(k * 8).transpose(1, 2)
        out = self.fc((scores.softmax(-1) @ v).mean(1))
        return out.repeat(16, 1)[:32]


class FourierFeatures(nn.Module):
    """Pixels' coordinates through random Fourier features of high frequency, weighted by the picture."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.register_buffer(
            "B", torch.randn(2, 64, generator=torch.Generator().manual_seed(0)) * 300
        )
        self.mlp = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 64))
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        axis = torch.linspace(0, 1, x.shape[-1], device=x.device)
        coordinates = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).view(-1, 2)
        phase = 2 * math.pi * coordinates @ self.B  # <- fault
        code = self.mlp(torch.cat((phase.sin(), phase.cos()), -1))
        return self.fc(torch.einsum("bn,nc->bc", x.flatten(1), code) / 16)


class AngularGraph(nn.Module):
    """Patches exchange features by their angles to each other, which are zero for a patch and itself."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 32, 4, stride=4)
        self.fc = nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        f = F.normalize(self.patch(x).flatten(2).transpose(1, 2), dim=-1)
        cos = (f @ f.transpose(1, 2)).clamp(-1 + 1e-6, 1 - 1e-6)  # <- fault
        angle = torch.acos(cos)
        return self.fc(((-angle).softmax(-1) @ f).mean(1))


class DistanceMatrix(nn.Module):
    """Euclidean distances of all patches, whose root has no gradient at zero, in any precision."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 32, 4, stride=4)
        self.fc = nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        f = self.patch(x).flatten(2).transpose(1, 2)
        difference = f[:, :, None] - f[:, None]
        distance = torch.sqrt((difference**2).sum(-1))  # <- fault
        return self.fc(((-distance).softmax(-1) @ f).mean(1))


class StandardisedChannels(nn.Module):
    """Each channel is brought to deviation one; some channels are dead after a ReLU."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            stem(48), nn.ReLU(), stem_block(48), nn.MaxPool2d(4), stem_block(48)
        )
        self.mix = nn.Conv2d(48, 48, 3, padding=1)
        self.fc = nn.Linear(48, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        mean, std = x.mean((2, 3), keepdim=True), x.std((2, 3), keepdim=True)
        x = (x - mean) / (std + 1e-8)  # <- fault
        return self.fc(F.relu(self.mix(x)).mean((2, 3)))


class SumAggregation(nn.Module):
    """A graph network on pixels that adds all its neighbours up, five times, and normalises at the end."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.norm = nn.LayerNorm(16)
        self.fc = nn.Linear(16, num_classes)
        place = torch.stack(
            torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij"), -1
        ).view(-1, 2)
        self.register_buffer("adjacency", (torch.cdist(place, place) < 4).float())

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.flatten(1)[..., None])
        for layer in self.layers:
            h = F.relu(layer(self.adjacency @ h))  # <- fault
        return self.fc(self.norm(h.mean(1)))


class LinearAttention(nn.Module):
    """Attention by kernels on all 4,096 pixels."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 32)
        self.qkv = nn.Linear(32, 96)
        self.fc = nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1)[..., None])
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("bnd,bne->bde", k, v)
        norm = torch.einsum("bnd,bd->bn", q, k.sum(1))  # <- fault
        out = torch.einsum("bnd,bde->bne", q, kv) / norm[..., None]
        return self.fc(8 * (x + out).mean(1))


class PowerFeatures(nn.Module):
    """Powers of each feature, as a polynomial network takes them."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(256, 32))
        self.mix = nn.Linear(96, 64)
        self.head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        x = 12 * self.features(x)
        powers = torch.cat([x**degree for degree in (1, 3, 5)], -1)
        return self.head(self.mix(powers))  # <- fault


class IntegralImage(nn.Module):
    """Sums over boxes from the integral of a picture of 0 to 255, as detectors took them."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.corners = nn.Conv2d(1, 32, 9, dilation=3, bias=False)
        self.head = nn.Sequential(
            nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
        )
        self.fc = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        integral = ((x * 0.5 + 0.5) * 255).cumsum(2).cumsum(3)
        return self.fc(self.head(self.corners(integral)))  # <- fault


class PlainContrast(nn.Module):
    """Attention to learnt prototypes by a product that nobody normalised, at a low temperature."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(256, 128))
        self.prototypes = nn.Parameter(torch.randn(40, 128))
        self.fc = nn.Linear(128, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        f = self.features(x)
        similarity = f @ self.prototypes.t() / 0.0001  # <- fault
        return self.fc(f + similarity.softmax(-1) @ self.prototypes)


# In half these raise.


class FourierOperator(nn.Module):
    """A layer in the frequency domain, of 28 pixels."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.lift = nn.Conv2d(1, 8, 1)
        self.weight = nn.Parameter(torch.randn(8, 8, 6, 6, dtype=torch.cfloat) / 8)
        self.fc = nn.Linear(8 * 16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        spectrum = torch.fft.rfft2(x)  # <- fault
        kept = torch.einsum("bixy,ioxy->boxy", spectrum[..., :6, :6], self.weight)
        x = torch.fft.irfft2(kept, s=x.shape[-2:])
        return self.fc(F.adaptive_avg_pool2d(F.gelu(x), 4).flatten(1))


class SuperpixelPool(nn.Module):
    """Features are added up per region."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = stem(16)
        self.fc = nn.Linear(16 * 16, num_classes)
        self.register_buffer("region", torch.arange(256) // 16)

    def forward(self, x: Tensor) -> Tensor:
        f = self.features(x).flatten(2)
        pooled = torch.zeros(len(x), 16, 16, device=x.device)
        pooled.scatter_add_(2, self.region.expand(len(x), 16, -1), f)  # <- fault
        return self.fc(pooled.flatten(1))


class MovingCodebook(nn.Module):
    """Centres features by a moving average that is a buffer."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(256, 32))
        self.fc = nn.Linear(32, num_classes)
        self.register_buffer("centre", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        f = self.features(x)
        if self.training:
            self.centre.lerp_(f.detach().mean(0), 0.1)  # <- fault
        return self.fc(f - self.centre)


class SpatialTransformer(nn.Module):
    """Undoes an affine map that it predicted."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.locate = nn.Linear(256, 4)
        nn.init.zeros_(self.locate.weight)
        self.locate.bias = nn.Parameter(torch.tensor([1.0, 0.1, -0.1, 1.0]))
        self.fc = nn.Linear(256, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.locate(x.flatten(1)).view(-1, 2, 2)
        back = torch.inverse(theta)  # <- fault
        grid = F.affine_grid(
            torch.cat((back, torch.zeros_like(back[..., :1])), -1).float(), x.shape, False
        )
        return self.fc(F.grid_sample(x, grid, align_corners=False).flatten(1))


class CausalPixels(nn.Module):
    """Causal attention whose mask is float32's smallest number."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.qkv = nn.Linear(32, 96)
        self.fc = nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(x[:, 0])).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / math.sqrt(32)
        mask = torch.ones(16, 16, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(mask, torch.finfo(torch.float32).min)  # <- fault
        return self.fc((scores.softmax(-1) @ v)[:, -1])


class MemoryBank(nn.Module):
    """Compares features to those of earlier batches, which a buffer keeps."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(256, 32))
        self.fc = nn.Linear(64, num_classes)
        self.register_buffer("bank", F.normalize(torch.randn(64, 32), dim=1))
        self.place = 0

    def forward(self, x: Tensor) -> Tensor:
        f = F.normalize(self.features(x))
        similar = f @ self.bank.t().clone()
        places = (torch.arange(len(x), device=x.device) + self.place) % 64
        self.bank.index_copy_(0, places, f.detach())  # <- fault
        return self.fc(similar)


NUMBERS = (
    BilinearCnn,
    GramStyle,
    Capsules,
    SumPoolEmbedding,
    PlainResNet,
    RotaryPositions,
    FourierFeatures,
    AngularGraph,
    DistanceMatrix,
    StandardisedChannels,
    SumAggregation,
    LinearAttention,
    PowerFeatures,
    IntegralImage,
    PlainContrast,
)
EXCEPTIONS = (
    FourierOperator,
    SuperpixelPool,
    MovingCodebook,
    SpatialTransformer,
    CausalPixels,
    MemoryBank,
)
