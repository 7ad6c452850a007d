"""The step of the article that put SAEHD at 512 pixels on a 6 GB card, as it describes it, to be planned.

DF-UD, ae 320, e 64, d 72, mask 22, batch 8; autocast to float16 with losses in float32, stages recomputed, both people
in one backward, structural dissimilarity by DeepFaceLab's formula: two whole windows of 44 and 22 pixels. The article
does not say how its windows were computed; `windows="separable"` cuts them into rows and columns.

    mpt plan scripts/plans/saehd_article_step.py:article --gpu rtx2060
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mpt.systems.deepfacelab.nn.saehd import DFAutoencoder, Settings, units
from mpt.systems.deepfacelab.optim.adabelief import AdaBelief

SIZES = (44, 22)
SIGMA, C1, C2 = 1.5, 0.01**2, 0.03**2
DEVICE = "cuda"


def article(
    windows: str = "whole", batch_size: int = 8, recomputes: bool = True, half: bool = True
) -> Callable[[], None]:
    """Return the step. Each stage keeps its input alone and is computed again in the backward pass."""
    settings = Settings(
        archi="df-ud", image_size=512, ae_dims=320, e_dims=64, d_dims=72, d_mask_dims=22
    )
    model = DFAutoencoder(settings).to(DEVICE)
    if recomputes:
        for stage in units(model):
            stage.forward = again(stage.forward)  # type: ignore[method-assign]
    optimizer = AdaBelief(
        model.parameters(), lr=5e-5, lr_dropout=1.0, lr_cos=0, beta1=0.9, beta2=0.999
    )
    scaler = torch.amp.GradScaler(DEVICE)
    faces = torch.rand(4, batch_size, 3, 512, 512, device=DEVICE)
    masks = torch.rand(2, batch_size, 1, 512, 512, device=DEVICE)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, torch.float16, enabled=half):
            drawn = [
                model.draw_src(model.encode_src(faces[0])),
                model.draw_dst(model.encode_dst(faces[1])),
            ]
        total = torch.zeros((), device=DEVICE)
        for (image, mask), target, wanted in zip(drawn, faces[2:], masks):
            softened = F.avg_pool2d(wanted, 17, 1, 8).clamp(0, 0.5) * 2
            total = total + error(image.float() * softened, target * softened, windows)
            total = total + 10 * (mask.float() - wanted).square().mean()
        scaler.scale(total).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def again(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a stage's forward that is computed again in the backward pass."""
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def error(image: Tensor, target: Tensor, windows: str) -> Tensor:
    """Return dissimilarity at both windows and the squared error."""
    structure = sum(dissimilarity(image, target, size, windows) for size in SIZES)
    return 5 * structure + 10 * (image - target).square().mean()


def dissimilarity(first: Tensor, second: Tensor, size: int, windows: str) -> Tensor:
    """Return (1 - SSIM) / 2, with the window's maps one after the other."""
    distance = torch.arange(size, device=first.device, dtype=torch.float32) - (size - 1) / 2
    line = torch.softmax(-0.5 * distance.square() / SIGMA**2, dim=0)

    def mean(x: Tensor) -> Tensor:
        if windows == "separable":
            x = F.conv2d(x, line.view(1, 1, size, 1).expand(3, 1, size, 1), groups=3)
            return F.conv2d(x, line.view(1, 1, 1, size).expand(3, 1, 1, size), groups=3)
        return F.conv2d(x, (line[:, None] * line).expand(3, 1, size, size), groups=3)

    one, other = mean(first), mean(second)
    product, squares = one * other * 2, one.square() + other.square()
    structure = (mean(first * second) * 2 - product + C2) / (
        mean(first.square() + second.square()) - squares + C2
    )
    return (1 - ((product + C1) / (squares + C1) * structure).mean()) / 2
