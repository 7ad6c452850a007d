"""Find boxes: the cell in which a box's centre lies scores high and gives its corners.

The losses are sums over the boxes, divided by the number of boxes in the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from mpt.config.options import Options
from mpt.seams import (
    Batch,
    DataSpec,
    Evidence,
    Inference,
    Loss,
    Phase,
    Precision,
    Task,
    gather,
    log,
)

CELL = 8


class Settings(Options):
    box_weight: float = 1.0
    """Weight of the corners beside the score."""


class FindBoxes(Task):
    """Train `net` to answer (score, x1, y1, x2, y2) in each cell."""

    metric, higher_is_better = "found", True
    inputs = ("view",)

    def __init__(self, settings: Settings, net: nn.Module, precision: Precision) -> None:
        self.settings, self.modules, self.trainable = settings, {"net": net}, {"net": net}
        self.score_loss = precision.loss(functional.binary_cross_entropy_with_logits)
        self.box_loss = precision.loss(functional.smooth_l1_loss)

    def phases(self, optimizers: Mapping[str, Optimizer]) -> Sequence[Phase]:
        return [Phase("net", self.modules["net"], optimizers["net"], self.losses, normalised=True)]

    def losses(self, batch: Batch) -> Iterator[tuple[Loss, Loss]]:
        answer = self.modules["net"](batch["view"])
        wanted, corners = self.at_cells(answer, batch)
        count = batch["box_mask"].sum()
        score = self.score_loss(answer[:, 0], wanted, reduction="sum")
        at_boxes = torch.where(batch["box_mask"][..., None], corners - batch["boxes"] / CELL, 0.0)
        box = self.box_loss(at_boxes, torch.zeros_like(at_boxes), reduction="sum")
        log("boxes", batch["box_mask"].sum(1))
        yield (
            Loss("score", score, "sum", count),
            Loss("box", self.settings.box_weight * box, "sum", count),
        )

    def at_cells(self, answer: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the wanted scores (b, rows, columns), and what is answered where each box's centre lies (b, M, 4)."""
        rows, columns = answer.shape[-2:]
        middle = (batch["boxes"][..., :2] + batch["boxes"][..., 2:]) / (2 * CELL)
        cell = middle[..., 1].long().clamp(max=rows - 1) * columns + middle[..., 0].long().clamp(
            max=columns - 1
        )
        wanted = torch.zeros_like(answer[:, 0]).flatten(1)
        wanted = wanted.scatter_reduce(1, cell, batch["box_mask"].to(wanted.dtype), "amax")
        corners = (
            answer[:, 1:].flatten(2).gather(2, cell[:, None].expand(-1, 4, -1)).transpose(1, 2)
        )
        return wanted.unflatten(1, (rows, columns)), corners

    def evaluate_batch(self, batch: Batch) -> Evidence:
        answer = self.modules["net"](batch["view"]).float()
        _, corners = self.at_cells(answer, batch)
        return {
            "distance": (corners * CELL - batch["boxes"]).abs().amax(-1),
            "real": batch["box_mask"],
        }

    def conclude(self, evidence: Sequence[Evidence]) -> dict[str, float]:
        distance = gather(evidence, "distance")[gather(evidence, "real")]
        return {"found": float((distance < 4).float().mean()), "pixels_off": float(distance.mean())}

    def infer(self, batch: Batch | None, count: int, seed: int) -> Inference:
        assert batch is not None
        answer = self.modules["net"](batch["view"]).float().flatten(2)
        scores, cells = answer[:, 0].sigmoid().max(1)
        corners = answer[:, 1:].gather(2, cells[:, None, None].expand(-1, 4, 1))[..., 0] * CELL
        rows = [
            {"score": round(score, 3), "box": [round(side, 1) for side in box]}
            for score, box in zip(scores.tolist(), corners.tolist(), strict=True)
        ]
        return Inference(rows=rows, outputs=answer)


def build(
    settings: Settings,
    model_settings: Options,
    modules: Mapping[str, nn.Module],
    data: DataSpec,
    precision: Precision,
) -> FindBoxes:
    """Build the task around `net`."""
    for name in ("view", "boxes", "box_mask"):
        data.require(name, "task find_boxes")
    return FindBoxes(settings, modules["net"], precision)
