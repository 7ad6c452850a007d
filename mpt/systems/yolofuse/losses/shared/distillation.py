"""Losses against a teacher's answers at every place, in addition to the truth.

Classes: binary cross-entropy with the teacher's probabilities. Boxes: the divergence from the teacher's distributions
of the four distances (Zheng et al., "Localization distillation for dense object detection", 2022), or 1 - CIoU with its
boxes for a head without distributions, weighted by the teacher's largest probability. Both are sums over the places:
the caller divides them by the same number as the losses of the truth, so that micro-batches add up to the whole batch.

Shape suffixes: b batch, p places of all levels, c classes, n bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from mpt.systems.yolofuse.losses.shared.detection import ciou
from mpt.systems.yolofuse.nn.layers.yolo_head import corners, flatten, places


class TeacherSums(NamedTuple):
    """The losses before gains, summed over the places."""

    kind: Tensor
    box: Tensor


def teacher_sums(
    raw: Sequence[Tensor],
    taught: Sequence[Tensor],
    strides: Sequence[int],
    bins: int,
    teacher_bins: int,
) -> TeacherSums:
    """Return the distance of a network's raw maps from the teacher's; the teacher's pass no gradient."""
    boxes, kinds = flatten(raw, bins)
    true_boxes, true_kinds = (one.detach() for one in flatten(taught, teacher_bins))
    probabilities_bpc = true_kinds.sigmoid()
    kind = functional.binary_cross_entropy_with_logits(kinds, probabilities_bpc, reduction="sum")
    # Cross-entropy less the teacher's own entropy: the rest is 0 if the network answers as the teacher.
    own = functional.binary_cross_entropy_with_logits(
        true_kinds, probabilities_bpc, reduction="sum"
    )
    confidence_bp = probabilities_bpc.amax(2)
    if bins == teacher_bins > 1:
        apart_bp = divergence(boxes, true_boxes, bins)
    else:
        centres, _ = places(raw, strides)
        apart_bp = 1 - ciou(
            corners(boxes, centres, bins), corners(true_boxes, centres, teacher_bins)
        )
    return TeacherSums(kind - own, (apart_bp * confidence_bp).sum())


def divergence(logits_bpn: Tensor, true_bpn: Tensor, bins: int) -> Tensor:
    """Return (b, p): the Kullback-Leibler divergence of each distribution from the true one, mean of the four sides."""
    shape = (*logits_bpn.shape[:2], 4, bins)
    found, true = logits_bpn.reshape(shape).log_softmax(3), true_bpn.reshape(shape).log_softmax(3)
    return (true.exp() * (true - found)).sum(3).mean(2)
