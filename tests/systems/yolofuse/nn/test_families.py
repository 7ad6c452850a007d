"""YOLO11 and YOLO26 on one picture, and on two stacked as channels, against Ultralytics 8.4.190.

`originals/families.npz` holds what that program computed in float64 on weights that follow from each tensor's name.
BatchNorm's statistics are those of one forward in training mode, so that it is compared too. Counts and checksums of
names and shapes are of its own networks.
"""

import zlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mpt.systems.yolofuse.losses.shared.detection import (
    ONE_TO_MANY,
    ONE_TO_ONE,
    DetectionSums,
    detection_sums,
)
from mpt.systems.yolofuse.metrics.shared.suppression import Suppression, best_batch
from mpt.systems.yolofuse.nn.layers.yolo_head import decode, flatten
from mpt.systems.yolofuse.nn.yolofuse import Settings, YoloFuse
from tests.systems.yolofuse.published import KEPT, fill, read_arrays

PUBLISHED = {
    "yolov8": ((3157200, 355, 24596834), (11166560, 355, 29925737), (25902640, 475, 243673651)),
    "yolo11": ((2624080, 499, 2520894120), (9458752, 499, 1093408671), (20114688, 649, 3569254743)),
    "yolo26": ((2572280, 708, 162797633), (10009784, 708, 3182541022), (21896248, 768, 910147387)),
}
LARGE = {
    "yolov8": ((43691520, 595, 4222861655), (68229648, 595, 3880729096)),
    "yolo11": ((25372160, 1015, 2089314854), (56966176, 1015, 3790623559)),
    "yolo26": ((26299704, 1092, 2004531532), (58993368, 1092, 2172821272)),
}
"""Per size: parameters, tensors, checksum of `name shape` lines."""
GAINS = (7.5, 0.5, 1.5)
TRUTH = (
    *((0, 0, 0.3, 0.4, 0.2, 0.3), (0, 2, 0.7, 0.5, 0.4, 0.6), (0, 1, 0.72, 0.52, 0.35, 0.5)),
    *((1, 1, 0.5, 0.5, 0.04, 0.05), (1, 0, 0.2, 0.8, 0.3, 0.25), (1, 2, 0.21, 0.8, 0.3, 0.2)),
    (1, 2, 0.6, 0.3, 0.05, 0.04),
)
"""Picture, class, centre and size, relative."""
HEIGHT, WIDTH = 96, 128


@pytest.fixture(scope="module")
def arrays() -> dict[str, Any]:
    return read_arrays("families.npz")


def pictures() -> Tensor:
    return torch.from_numpy(np.random.Generator(np.random.PCG64(7)).random((2, 4, HEIGHT, WIDTH)))


def calibrated(family: str, fusion: str) -> tuple[YoloFuse, list[Tensor]]:
    """Return a network whose weights follow from their names, and its input."""
    net = YoloFuse(Settings(family=family, fusion=fusion), 3)
    net.load_state_dict(
        {k: torch.from_numpy(fill(k, list(v.shape))) for k, v in net.state_dict().items()}
    )
    net.double().train()
    norms = [module for module in net.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None
        norm.reset_running_stats()
    given = [pictures()[:, :3]] if fusion == "rgb" else list(pictures().split((3, 1), 1))
    with torch.no_grad():
        net(*given)
    for norm in norms:
        norm.momentum = 0.03
    return net, given


@pytest.mark.parametrize("family", PUBLISHED)
def test_names_shapes_order_and_counts_are_the_published_ones_in_every_size(family: str) -> None:
    for scale, expected in zip("nsmlx", PUBLISHED[family] + LARGE[family], strict=True):
        with torch.device("meta"):
            net = YoloFuse(Settings(fusion="rgb", family=family, scale=scale), 80)
        listing = "\n".join(
            f"{name} {list(value.shape)}" for name, value in net.state_dict().items()
        )
        found = (
            sum(p.numel() for p in net.parameters()),
            len(net.state_dict()),
            zlib.crc32(listing.encode()),
        )
        assert found == expected, scale


@pytest.mark.parametrize("fusion", ["rgb", "data"])
@pytest.mark.parametrize("family", ["yolo11", "yolo26"])
def test_outputs_agree_with_the_published_network(
    arrays: dict[str, Any], family: str, fusion: str
) -> None:
    net, given = calibrated(family, fusion)
    expected = {k.partition("_ch")[2][2:]: torch.from_numpy(v) for k, v in arrays.items()
                if k.startswith(f"{family}n_ch{3 if fusion == 'rgb' else 4}")}  # fmt: skip
    with torch.no_grad():
        raw = net.eval()(*given)
        boxes, scores = decode(raw, net.strides, net.bins)
    logits = [one.transpose(1, 2).flatten()[::KEPT] for one in flatten(raw, net.bins)]
    torch.testing.assert_close(logits[0], expected["boxes"], rtol=0, atol=1e-9)
    torch.testing.assert_close(logits[1], expected["scores"], rtol=0, atol=1e-9)
    if family == "yolo26":
        answer = best_batch(boxes, scores, Suppression(confidence=0.0))[:, :20].flatten()
    else:
        middle, size = (boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]
        answer = torch.cat((middle, size, scores), 2).transpose(1, 2).flatten()[::KEPT]
    # best_batch: float32
    torch.testing.assert_close(answer.double(), expected["answer"], rtol=2e-6, atol=1e-4)


def truth() -> tuple[Tensor, Tensor, Tensor]:
    """Return the padded boxes in pixels, their classes and which are real."""
    boxes, kinds = torch.zeros(2, 5, 4, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.long)
    valid = torch.zeros(2, 5, dtype=torch.bool)
    for picture, kind, x, y, width, height in TRUTH:
        place = int(valid[int(picture)].sum())
        corners = (
            (x - width / 2) * WIDTH,
            (y - height / 2) * HEIGHT,
            (x + width / 2) * WIDTH,
            (y + height / 2) * HEIGHT,
        )
        boxes[int(picture), place] = torch.tensor(corners, dtype=torch.float64)
        kinds[int(picture), place], valid[int(picture), place] = int(kind), True
    return boxes, kinds, valid


def items(sums: DetectionSums) -> Tensor:
    """Return the three losses as Ultralytics reports them, times the batch."""
    return torch.stack(
        [
            gain * one / sums.normaliser.clamp(min=1) * 2
            for gain, one in zip(GAINS, sums[:3], strict=True)
        ]
    )


def test_the_loss_of_yolo11_and_its_gradients_are_the_published_ones(
    arrays: dict[str, Any],
) -> None:
    net, given = calibrated("yolo11", "rgb")
    choice = ONE_TO_MANY._replace(least_side=16.0)
    losses = items(detection_sums(net(*given), net.strides, *truth(), choice))
    losses.sum().backward()
    compare(net, losses, arrays, "yolo11n_ch3_loss0", "yolo11n_ch3_grads0")


@pytest.mark.parametrize(("epoch", "share"), [(0, 0.8), (4, 0.52)])
def test_both_heads_losses_of_yolo26_and_their_gradients_are_the_published_ones(
    arrays: dict[str, Any], epoch: int, share: float
) -> None:
    net, given = calibrated("yolo26", "rgb")
    raw = net(*given)
    many, once = (
        items(
            detection_sums(maps, net.strides, *truth(), choice._replace(least_side=16.0), net.bins)
        )
        for maps, choice in ((raw[:3], ONE_TO_MANY), (raw[3:], ONE_TO_ONE))
    )
    torch.testing.assert_close(
        many.detach(), torch.from_numpy(arrays[f"yolo26n_ch3_many{epoch}"]), rtol=1e-7, atol=0
    )
    torch.testing.assert_close(
        once.detach(), torch.from_numpy(arrays[f"yolo26n_ch3_once{epoch}"]), rtol=1e-7, atol=0
    )
    losses = share * many + (1 - share) * once
    losses.sum().backward()
    compare(net, losses, arrays, f"yolo26n_ch3_loss{epoch}", f"yolo26n_ch3_grads{epoch}")


def compare(net: YoloFuse, losses: Tensor, arrays: dict[str, Any], loss: str, grads: str) -> None:
    """Compare losses, and the norms of every fifth gradient."""
    torch.testing.assert_close(
        losses.detach(), torch.from_numpy(arrays[loss][:3]), rtol=1e-7, atol=0
    )
    norms = [parameter.grad.norm() for parameter in net.parameters() if parameter.grad is not None]
    torch.testing.assert_close(
        torch.stack(norms[::5]), torch.from_numpy(arrays[grads]), rtol=1e-6, atol=1e-9
    )
