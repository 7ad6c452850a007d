"""Non-maximum suppression: of boxes that overlap much, the best stays.

Greedy, as `torchvision.ops.nms`, but without its compiled operator, which a torchvision alongside another torch does
not have: boxes are taken in blocks, best first, and within a block the greedy choice is the fixed point of "kept unless
a kept, better box overlaps it", reached in a few rounds. Boxes of different classes are kept apart by moving each class
7680 pixels away, as in Ultralytics' programs, whose results on given predictions are equal (tests/systems/yolofuse).
Comparisons are strict.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

CLASS_OFFSET = 7680.0
MOST_CANDIDATES = 30000
BLOCK = 1024


@dataclass(frozen=True)
class Suppression:
    """The kept boxes: scores above `confidence`; of two boxes with IoU above `iou` the better one; the best `limit`."""

    confidence: float = 0.25
    iou: float = 0.45
    agnostic: bool = False
    """Suppress across classes."""
    several_labels: bool = False
    """May one place give a box of each class?"""
    limit: int = 300


def suppress(boxes_p4: Tensor, scores_pc: Tensor, how: Suppression) -> Tensor:
    """Return (kept, 6) of one picture: corners in pixels, score and class, best first."""
    scores_pc = scores_pc.float()
    if how.several_labels and scores_pc.shape[1] > 1:
        place, kind = (scores_pc > how.confidence).nonzero().unbind(1)
        score = scores_pc[place, kind]
    else:
        best = scores_pc.max(1)
        place = (best.values > how.confidence).nonzero()[:, 0]
        score, kind = best.values[place], best.indices[place]
    order = score.argsort(descending=True, stable=True)[:MOST_CANDIDATES]
    boxes, score, kind = boxes_p4[place[order]].float(), score[order], kind[order].float()
    apart = boxes if how.agnostic else boxes + kind[:, None] * CLASS_OFFSET
    kept = keep_best(apart, how.iou, how.limit)
    return torch.cat((boxes[kept], score[kept, None], kind[kept, None]), 1)


def suppress_batch(boxes_bp4: Tensor, scores_bpc: Tensor, how: Suppression) -> Tensor:
    """Return (b, limit, 6), padded with rows of score 0. Fake tensors give zeros of this shape."""
    padded = boxes_bp4.new_zeros((len(boxes_bp4), how.limit, 6), dtype=torch.float32)
    if isinstance(boxes_bp4, FakeTensor):
        return padded
    for row, boxes, scores in zip(padded, boxes_bp4, scores_bpc, strict=True):
        kept = suppress(boxes, scores, how)
        row[: len(kept)] = kept
    return padded


def best_batch(boxes_bp4: Tensor, scores_bpc: Tensor, how: Suppression) -> Tensor:
    """Return (b, limit, 6) of a head that marks each object once: the best scores, padded with rows of score 0.

    Of the `limit` best places, the best pairs of place and class; with `agnostic` a place has its best class alone.
    """
    classes = scores_bpc.shape[2]
    boxes_bp4, scores_bpc = (
        functional.pad(one.float(), (0, 0, 0, how.limit)) for one in (boxes_bp4, scores_bpc)
    )
    if how.agnostic:
        best, kind_bp = scores_bpc.max(2)
        score, place = best.topk(how.limit, 1)
        kind = kind_bp.gather(1, place)
    else:
        chosen = scores_bpc.amax(2).topk(how.limit, 1).indices
        own_bkc = scores_bpc.gather(1, chosen[..., None].expand(-1, -1, classes))
        score, number = own_bkc.flatten(1).topk(how.limit, 1)
        place, kind = chosen.gather(1, number // classes), number % classes
    boxes = boxes_bp4.gather(1, place[..., None].expand(-1, -1, 4))
    rows = torch.cat((boxes, score[..., None], kind[..., None].float()), 2)
    return torch.where(score[..., None] > how.confidence, rows, 0.0)


def keep_best(boxes_n4: Tensor, limit_iou: float, limit: int) -> Tensor:
    """Return the numbers of the boxes that stay, at most `limit`. Boxes come best first."""
    kept: list[Tensor] = []
    count = 0
    for start in range(0, len(boxes_n4), BLOCK):
        block = boxes_n4[start : start + BLOCK]
        free = torch.ones(len(block), dtype=torch.bool, device=block.device)
        if kept:
            free = ~(_overlaps(boxes_n4[torch.cat(kept)], block) > limit_iou).any(0)
        worse = (_overlaps(block, block) > limit_iou).triu(1)
        stays = free
        while True:
            following = free & ~(worse & stays[:, None]).any(0)
            if torch.equal(following, stays):
                break
            stays = following
        kept.append(stays.nonzero()[:, 0] + start)
        count += len(kept[-1])
        if count >= limit:
            break
    return (
        torch.cat(kept)[:limit]
        if kept
        else torch.zeros(0, dtype=torch.long, device=boxes_n4.device)
    )


def _overlaps(first: Tensor, second: Tensor) -> Tensor:
    low = torch.maximum(first[:, None, :2], second[None, :, :2])
    high = torch.minimum(first[:, None, 2:], second[None, :, 2:])
    shared = (high - low).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (first, second)]
    return shared / (areas[0][:, None] + areas[1][None] - shared)
