"""The loss of a YOLO detector: which places answer for which box, and how far they are from it.

Task-aligned assignment (Feng et al., "TOOD", 2021): of the places inside a box, the ten of highest score^0.5 *
overlap^6 answer for it, overlap being CIoU (Zheng et al., 2020) and not below 0. A place that several boxes claim goes
to the one it overlaps most. Those places learn a class score that grows with their rank, the box (1 - CIoU) and the
distribution of its four distances (Li et al., "Generalized focal loss", 2020), weighted by that score; all others learn
score 0. A head without a distribution (YOLO26) learns the distances by their L1 loss, relative to the picture. For a
one-to-one head, seven places are candidates and the best alone answers.

Everything is dense over padded boxes and all places: nothing here has a shape that depends on a value, so the same code
is planned on fake tensors. All in float32 (the caller's business), or float64. Numbers agree with Ultralytics' 8.3 and
8.4 programs, losses, assignment and gradients (tests/systems/yolofuse).

Shape suffixes: b batch, m boxes of a picture (padded), p places of all levels, c classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mpt.systems.yolofuse.nn.layers.yolo_head import BINS, corners, flatten, places

EPSILON = 1e-7
BACKGROUND_EPSILON = 1e-9
CANDIDATES = 10
SCORE_POWER, OVERLAP_POWER = 0.5, 6.0
FARTHEST = BINS - 1 - 0.01
"""Largest distance in strides that the distribution is taught."""


class Assignment(NamedTuple):
    """The target of each place. Boxes are corners in pixels; `scores` is 0 for the background."""

    scores_bpc: Tensor
    boxes_bp4: Tensor
    foreground_bp: Tensor
    matched_bp: Tensor
    """Number of the box within its picture; 0 if there is none."""


class Choice(NamedTuple):
    """How many places answer for a box: of `candidates` at first those, then the best `kept` of them."""

    candidates: int = CANDIDATES
    kept: int = CANDIDATES
    least_side: float = 0.0
    """Sides of true boxes under this many pixels count as that long when places are chosen."""


ONE_TO_MANY, ONE_TO_ONE = Choice(), Choice(candidates=7, kept=1)


class DetectionSums(NamedTuple):
    """The three losses before gains, summed and not yet divided by `normaliser`, the sum of all target scores."""

    box: Tensor
    kind: Tensor
    distance: Tensor
    normaliser: Tensor


def ciou(first: Tensor, second: Tensor) -> Tensor:
    """Return the complete IoU of boxes (..., 4) given as corners: IoU less centre distance and difference in aspect."""
    left1, top1, right1, bottom1 = first.unbind(-1)
    left2, top2, right2, bottom2 = second.unbind(-1)
    width1, height1 = right1 - left1, bottom1 - top1 + EPSILON
    width2, height2 = right2 - left2, bottom2 - top2 + EPSILON
    across = (torch.minimum(right1, right2) - torch.maximum(left1, left2)).clamp(min=0)
    down = (torch.minimum(bottom1, bottom2) - torch.maximum(top1, top2)).clamp(min=0)
    shared = across * down
    iou = shared / (width1 * height1 + width2 * height2 - shared + EPSILON)
    hull_width = torch.maximum(right1, right2) - torch.minimum(left1, left2)
    hull_height = torch.maximum(bottom1, bottom2) - torch.minimum(top1, top2)
    diagonal = hull_width.square() + hull_height.square() + EPSILON
    apart = (
        (left2 + right2 - left1 - right1).square() + (top2 + bottom2 - top1 - bottom1).square()
    ) / 4
    aspect = (4 / math.pi**2) * (
        torch.atan(width2 / height2) - torch.atan(width1 / height1)
    ).square()
    with torch.no_grad():
        share = aspect / (aspect - iou + (1 + EPSILON))
    return iou - (apart / diagonal + aspect * share)


def contained(centres_p2: Tensor, boxes_bm4: Tensor, least_side: float) -> Tensor:
    """Return (b, m, p): does the box contain the place? Sides under `least_side` pixels count as that long."""
    if least_side > 0:
        middle = (boxes_bm4[..., :2] + boxes_bm4[..., 2:]) / 2
        half = (boxes_bm4[..., 2:] - boxes_bm4[..., :2]).clamp(min=least_side) / 2
        boxes_bm4 = torch.cat((middle - half, middle + half), -1)
    x, y = centres_p2.unbind(-1)
    left, top, right, bottom = boxes_bm4[..., None].unbind(2)
    nearest = torch.minimum(torch.minimum(x - left, right - x), torch.minimum(y - top, bottom - y))
    return nearest > BACKGROUND_EPSILON


@torch.no_grad()
def assign(
    scores_bpc: Tensor,
    boxes_bp4: Tensor,
    centres_p2: Tensor,
    true_boxes_bm4: Tensor,
    true_classes_bm: Tensor,
    valid_bm: Tensor,
    choice: Choice = ONE_TO_MANY,
) -> Assignment:
    """Return the task-aligned assignment. Scores are probabilities; boxes and centres are in pixels."""
    classes = scores_bpc.shape[2]
    inside = contained(centres_p2, true_boxes_bm4, choice.least_side) & valid_bm[..., None]
    index = true_classes_bm[..., None].expand(-1, -1, scores_bpc.shape[1])
    score_bmp = scores_bpc.transpose(1, 2).gather(1, index)
    overlap = ciou(true_boxes_bm4[:, :, None], boxes_bp4[:, None]).clamp(min=0) * inside
    alignment = score_bmp.pow(SCORE_POWER) * overlap.pow(OVERLAP_POWER) * inside

    best = alignment.topk(min(choice.candidates, alignment.shape[2]), dim=2).indices
    chosen = torch.zeros_like(inside).scatter_(2, best, True) & inside
    claims = chosen.sum(1, keepdim=True)
    favourite = torch.zeros_like(inside).scatter_(1, overlap.argmax(1, keepdim=True), True)
    chosen = torch.where(claims > 1, favourite, chosen)
    if choice.kept < choice.candidates:
        best = (alignment * chosen).topk(min(choice.kept, alignment.shape[2]), dim=2).indices
        chosen = chosen & torch.zeros_like(inside).scatter_(2, best, True)

    foreground = chosen.any(1)
    matched = chosen.to(torch.uint8).argmax(1)
    alignment, overlap = alignment * chosen, overlap * chosen
    rank = (
        alignment
        * overlap.amax(2, keepdim=True)
        / (alignment.amax(2, keepdim=True) + BACKGROUND_EPSILON)
    )
    strength = rank.amax(1) * foreground
    kinds = true_classes_bm.gather(1, matched)
    scores = functional.one_hot(kinds, classes).to(strength.dtype) * strength[..., None]
    boxes = true_boxes_bm4.gather(1, matched[..., None].expand(-1, -1, 4)) * foreground[..., None]
    return Assignment(scores, boxes, foreground, matched)


def distribution_loss(logits_bp64: Tensor, distances_bp4: Tensor) -> Tensor:
    """Return (b, p): cross-entropy of each distribution with the two bins next to its distance, mean of the sides."""
    distances_bp4 = distances_bp4.clamp(0, FARTHEST)
    lower = distances_bp4.floor()
    upper_share = distances_bp4 - lower
    logs = logits_bp64.reshape(*logits_bp64.shape[:2], 4, BINS).log_softmax(3)
    bins = lower.long()[..., None]
    low = logs.gather(3, bins)[..., 0]
    high = logs.gather(3, bins + 1)[..., 0]
    return -(low * (1 - upper_share) + high * upper_share).mean(2)


def relative_distance(apart_bp4: Tensor, steps_p1: Tensor, width: int, height: int) -> Tensor:
    """Return (b, p): the mean of four distances in strides, as a share of the picture's sides."""
    pixels = (apart_bp4 * steps_p1).abs()
    return (pixels[..., 0::2].sum(2) / width + pixels[..., 1::2].sum(2) / height) / 4


def detection_sums(
    raw: Sequence[Tensor],
    strides: Sequence[int],
    true_boxes_bm4: Tensor,
    true_classes_bm: Tensor,
    valid_bm: Tensor,
    choice: Choice = ONE_TO_MANY,
    bins: int = BINS,
) -> DetectionSums:
    """Return the losses of a batch from the head's raw maps. True boxes are corners in pixels, padded to m."""
    centres, steps = places(raw, strides)
    box_logits, class_logits = flatten(raw, bins)
    predicted = corners(box_logits, centres, bins)
    target = assign(
        class_logits.detach().sigmoid(),
        predicted.detach() * steps,
        centres * steps,
        true_boxes_bm4,
        true_classes_bm,
        valid_bm,
        choice,
    )
    weight = target.scores_bpc.sum(2)
    kind = functional.binary_cross_entropy_with_logits(
        class_logits, target.scores_bpc, reduction="sum"
    )
    # The background gets a unit box about the place: its weight is 0, and so are its gradients, as long as they are
    # finite.
    around = torch.cat((centres - 0.5, centres + 0.5), 1)
    true_bp4 = torch.where(target.foreground_bp[..., None], target.boxes_bp4 / steps, around)
    box = ((1 - ciou(predicted, true_bp4)) * weight).sum()
    sides = torch.cat((centres - true_bp4[..., :2], true_bp4[..., 2:] - centres), 2)
    if bins > 1:
        far = distribution_loss(box_logits, sides)
    else:
        height, width = (side * strides[0] for side in raw[0].shape[2:])
        far = relative_distance(box_logits - sides, steps, width, height)
    distance = (far * weight).sum()
    return DetectionSums(box, kind, distance, target.scores_bpc.sum())
