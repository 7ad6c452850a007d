"""Segmentation networks and their training step as mmsegmentation's published runs of 2020 had them.

Only for `scripts/plans/segmentation_memory.py`. Shapes follow the papers and the published settings: FCN (Long et al.,
2015), PSPNet (Zhao et al., 2017), DeepLabV3 (Chen et al., 2017) on dilated ResNets of output stride 8, an auxiliary
head on the third stage, all logits resized to the label's size. Weights are never loaded.

Four things of that time decide memory and are as they were then (torch 1.5): DistributedDataParallel keeps flat buckets
of all gradients and the gradients themselves; `zero_grad` fills them with zeros, so that they live through the forward;
softmax keeps its input too (https://github.com/pytorch/pytorch/pull/65242); the loss is computed for each pixel and
averaged after. SyncBatchNorm keeps the tensors of BatchNorm, which takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BOTTLENECKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
BASICS = {18: (2, 2, 2, 2)}


class SoftmaxOf2020(torch.autograd.Function):
    """Softmax of torch 1.10 and earlier, or its logarithm, whose gradient keeps the input beside the result."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, dim: int, is_log: bool) -> Tensor:
        operator = torch._log_softmax if is_log else torch._softmax
        result = operator(scores, dim, False)
        ctx.save_for_backward(scores, result)
        ctx.dim, ctx.is_log = dim, is_log
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        scores, result = ctx.saved_tensors
        operator = torch._log_softmax_backward_data if ctx.is_log else torch._softmax_backward_data
        return operator(gradient, result, ctx.dim, scores.dtype), None, None


def convolved(
    inputs: int, outputs: int, kernel: int = 1, stride: int = 1, dilation: int = 1
) -> nn.Sequential:
    """Return convolution, norm and ReLU in place, of the same size unless strided."""
    padding = dilation * (kernel // 2)
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def without_relu(*arguments: int) -> nn.Sequential:
    """Return convolution and norm."""
    return convolved(*arguments)[:2]


class Block(nn.Module):
    """A residual block: three convolutions with a bottleneck, or two."""

    def __init__(
        self, inputs: int, width: int, stride: int, dilation: int, is_bottleneck: bool
    ) -> None:
        super().__init__()
        outputs = 4 * width if is_bottleneck else width
        spatial = convolved(inputs if not is_bottleneck else width, width, 3, stride, dilation)
        if is_bottleneck:
            self.path = nn.Sequential(
                convolved(inputs, width), spatial, without_relu(width, outputs)
            )
        else:
            self.path = nn.Sequential(spatial, without_relu(width, width, 3, 1, dilation))
        is_same = stride == 1 and inputs == outputs
        self.shortcut = None if is_same else without_relu(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum, rectified in place."""
        result = self.path(x)
        result += x if self.shortcut is None else self.shortcut(x)
        return functional.relu(result, inplace=True)


class ResNet(nn.Module):
    """Stages of a ResNet; the last two are dilated instead of strided."""

    def __init__(self, depth: int, is_deep_stem: bool) -> None:
        super().__init__()
        is_bottleneck = depth in BOTTLENECKS
        counts = (BOTTLENECKS if is_bottleneck else BASICS)[depth]
        stem = [convolved(3, 32, 3, 2), convolved(32, 32, 3), convolved(32, 64, 3)]
        if not is_deep_stem:
            stem = [
                nn.Sequential(
                    nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)
                )
            ]
        self.stem = nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1))
        inputs, stages = 64, []
        for width, count, stride, dilation in zip(
            (64, 128, 256, 512), counts, (1, 2, 1, 1), (1, 1, 2, 4), strict=True
        ):
            blocks = []
            for number in range(count):
                first = number == 0
                # The first block of a dilated stage has half the dilation.
                spread = max(1, dilation // 2) if first else dilation
                blocks.append(Block(inputs, width, stride if first else 1, spread, is_bottleneck))
                inputs = 4 * width if is_bottleneck else width
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the result of each stage."""
        x, results = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            results.append(x)
        return results


def resized(x: Tensor, like: Tensor | Sequence[int]) -> Tensor:
    """Return features of another size."""
    size = like.shape[2:] if isinstance(like, Tensor) else like
    return functional.interpolate(x, tuple(size), mode="bilinear", align_corners=False)


class Classifier(nn.Module):
    """Dropout of whole channels and scores for each place."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.drop, self.scores = nn.Dropout2d(0.1), nn.Conv2d(channels, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.scores(self.drop(x))


class FcnHead(nn.Module):
    """Convolutions of 3 x 3, after which the input is seen again if there are two."""

    def __init__(self, inputs: int, channels: int, classes: int, count: int = 2) -> None:
        super().__init__()
        layers = [
            convolved(inputs if number == 0 else channels, channels, 3) for number in range(count)
        ]
        self.layers = nn.Sequential(*layers)
        self.again = convolved(inputs + channels, channels, 3) if count > 1 else None
        self.classifier = Classifier(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        result = self.layers(x)
        if self.again is not None:
            result = self.again(torch.cat([x, result], 1))
        return self.classifier(result)


class PspHead(nn.Module):
    """Features averaged over four grids, in addition to the features themselves."""

    def __init__(self, inputs: int, channels: int, classes: int) -> None:
        super().__init__()
        pools = [
            nn.Sequential(nn.AdaptiveAvgPool2d(side), convolved(inputs, channels))
            for side in (1, 2, 3, 6)
        ]
        self.pools = nn.ModuleList(pools)
        self.joined = convolved(inputs + 4 * channels, channels, 3)
        self.classifier = Classifier(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        parts = [x, *(resized(pool(x), x) for pool in self.pools)]
        return self.classifier(self.joined(torch.cat(parts, 1)))


class AsppHead(nn.Module):
    """Convolutions of four dilations, and the average."""

    def __init__(self, inputs: int, channels: int, classes: int) -> None:
        super().__init__()
        self.average = nn.Sequential(nn.AdaptiveAvgPool2d(1), convolved(inputs, channels))
        spread = [convolved(inputs, channels, 3, 1, dilation) for dilation in (12, 24, 36)]
        self.parts = nn.ModuleList([convolved(inputs, channels), *spread])
        self.joined = convolved(5 * channels, channels, 3)
        self.classifier = Classifier(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        parts = [resized(self.average(x), x), *(part(x) for part in self.parts)]
        return self.classifier(self.joined(torch.cat(parts, 1)))


HEADS: dict[str, Callable[..., nn.Module]] = {
    "fcn": FcnHead,
    "pspnet": PspHead,
    "deeplabv3": AsppHead,
}


class Segmenter(nn.Module):
    """A backbone, its head, and one on the third stage."""

    def __init__(self, head: str, depth: int, is_deep_stem: bool, classes: int) -> None:
        super().__init__()
        self.backbone = ResNet(depth, is_deep_stem)
        wide = 4 if depth in BOTTLENECKS else 1
        self.head = HEADS[head](512 * wide, 128 * wide, classes)
        self.second = FcnHead(256 * wide, 64 * wide, classes, count=1)

    def forward(self, image: Tensor, label: Tensor, of_2020: bool = True) -> Tensor:
        """Return the loss of both heads."""
        features = self.backbone(image)
        loss = pixel_loss(self.head(features[-1]), label, of_2020)
        return loss + 0.4 * pixel_loss(self.second(features[-2]), label, of_2020)


def pixel_loss(logits: Tensor, label: Tensor, of_2020: bool) -> Tensor:
    """Return the mean loss of logits (b, classes, h, w) and a label (b, H, W); the accuracy is computed as well."""
    logits = resized(logits, label.shape[1:])
    chances = SoftmaxOf2020.apply(logits, 1, True) if of_2020 else functional.log_softmax(logits, 1)
    loss = functional.nll_loss(chances, label, reduction="none", ignore_index=255).mean()
    logits.topk(1, dim=1)[1].transpose(0, 1).eq(label[None]).float().mean()
    return loss


def training(
    head: str = "fcn",
    depth: int = 50,
    is_deep_stem: bool = True,
    classes: int = 19,
    batch_size: int = 2,
    height: int = 512,
    width: int = 1024,
    of_2020: bool = True,
    has_buckets: bool = True,
    keeps_gradients: bool = True,
) -> Callable[[], None]:
    """Return the training step of one card among several: `batch_size` is that card's."""
    model = Segmenter(head, depth, is_deep_stem, classes).cuda()
    optimizer = torch.optim.SGD(
        model.parameters(), 0.01, momentum=0.9, weight_decay=5e-4, foreach=False
    )
    count = sum(weight.numel() for weight in model.parameters())
    buckets = torch.empty(count if has_buckets else 0, device="cuda")

    def step() -> None:
        image = torch.randn(batch_size, 3, height, width).cuda()
        label = torch.zeros(batch_size, height, width, dtype=torch.int64).cuda()
        optimizer.zero_grad(set_to_none=not keeps_gradients)
        model(image, label, of_2020).backward()
        assert buckets.numel() in (0, count)
        optimizer.step()

    return step
