"""Models that only these tests plan: a U-Net, a vision transformer, a recurrent one, and some that refuse."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """Two levels with skips; the map is averaged into logits so that a classifier's loss fits."""

    def __init__(self, num_classes: int = 10, width: int = 8, channels: int = 1) -> None:
        super().__init__()
        self.first, self.second, self.bottom = (
            DoubleConv(channels, width),
            DoubleConv(width, 2 * width),
            DoubleConv(2 * width, 4 * width),
        )
        self.up_second = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up_first = nn.Conv2d(2 * width, width, 1)
        self.merge_second, self.merge_first = (
            DoubleConv(4 * width, 2 * width),
            DoubleConv(2 * width, width),
        )
        self.out = nn.Conv2d(width, num_classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        first = self.first(image)
        second = self.second(functional.max_pool2d(first, 2))
        x = self.bottom(functional.max_pool2d(second, 2))
        x = self.merge_second(torch.cat([self.up_second(x), second], 1))
        x = self.up_first(functional.interpolate(x, scale_factor=2, mode="bilinear"))
        return self.out(self.merge_first(torch.cat([x, first], 1))).mean((2, 3))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        )
        scores = (q @ k.transpose(-2, -1)) * (d // self.heads) ** -0.5
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class TinyViT(nn.Module):
    def __init__(
        self, num_classes: int = 10, width: int = 32, depth: int = 3, channels: int = 1
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, 4, 4)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.head = nn.Linear(width, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Recurrent(nn.Module):
    def __init__(self, num_classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.lstm, self.head = (
            nn.LSTM(16, width, 2, batch_first=True),
            nn.Linear(width, num_classes),
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.lstm(image.flatten(0, 1).flatten(0, 0))[0][:, -1])


class Headed(nn.Module):
    """Has one layer, from 16 x 16 pixels to classes."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.head = nn.Linear(256, num_classes)


class Compares(Headed):
    """Each sample with each other one, as contrastive losses do: bytes grow with the square of the batch."""

    def forward(self, image: Tensor) -> Tensor:
        x = image.flatten(1)
        return self.head(x) + (x[:, None] - x[None]).square().mean()


class Normed(nn.Module):
    """Every norm whose statistics a half input and float32 weights leave to the kernel."""

    def __init__(self, num_classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, width, 3), nn.Linear(width, num_classes)
        self.group, self.instance = nn.GroupNorm(4, width), nn.InstanceNorm2d(width, affine=True)
        self.layer = nn.LayerNorm(width)

    def forward(self, image: Tensor) -> Tensor:
        x = self.instance(self.group(self.conv(image)))
        return self.head(self.layer(x.permute(0, 2, 3, 1)).mean((1, 2)))


class LooksAtValues(Headed):
    def forward(self, image: Tensor) -> Tensor:
        scale = image.abs().max().item()
        return self.head(image.flatten(1) / (scale + 1))


class Branches(Headed):
    def forward(self, image: Tensor) -> Tensor:
        x = self.head(image.flatten(1))
        return x * 2 if x.sum() > 0 else x


class Selects(Headed):
    def forward(self, image: Tensor) -> Tensor:
        x = self.head(image.flatten(1))
        return x[x[:, 0] > 0]


class MovesItself(Headed):
    def forward(self, image: Tensor) -> Tensor:
        return self.head(image.cuda().flatten(1))


class LooksInHook(Headed):
    def forward(self, image: Tensor) -> Tensor:
        x = self.head(image.flatten(1))
        x.register_hook(lambda gradient: gradient / gradient.norm().item())
        return x


class StaysOnCpu(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(256, num_classes), torch.ones(256)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(image.flatten(1) * self.scale)


class Prints(Headed):
    def forward(self, image: Tensor) -> Tensor:
        x = self.head(image.flatten(1))
        print(f"{x.mean():.3f}", x.detach().cpu().numpy().shape)
        return x


class SparseEmbedding(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.table = nn.Embedding(256, num_classes, sparse=True)

    def forward(self, image: Tensor) -> Tensor:
        return self.table((image.flatten(1).abs() * 255).long()).mean(1)


MEAN = torch.full((256,), 0.5)


class Constants(nn.Module):
    """Constants of every kind that a GPU's user would move in the forward, and a builder that needs values."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.head, self.scale, self.more = (
            nn.Linear(256, num_classes),
            torch.ones(256),
            [torch.ones(256)],
        )
        self.rates = torch.linspace(0, 1, 3).tolist()

    def forward(self, image: Tensor) -> Tensor:
        x = (
            (image.flatten(1) - MEAN.to(image))
            * self.scale.to(image.device)
            * self.more[0].to(image.device)
        )
        return self.head(x) * self.rates[1]
