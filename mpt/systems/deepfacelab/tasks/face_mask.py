"""Training of XSeg: the mask of a face from its picture, by the cross-entropy of every pixel.

Losses are means over a sample's pixels, summed over the batch, as in DeepFaceLab. During pretraining the network draws
the grey picture of the face instead, by the losses of SAEHD's drawings and without its skip connections.

The network takes B, G, R, as DeepFaceLab's does; batches are RGB, so the channels are reversed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from mpt.config.options import Options
from mpt.seams import (
    Batch,
    DataSpec,
    Evidence,
    Exports,
    Inference,
    Legend,
    Loss,
    Phase,
    Precision,
    gather,
)
from mpt.systems.deepfacelab.losses.shared.dssim import dssim_at
from mpt.systems.deepfacelab.losses.shared.face_swap import COLOUR, STRUCTURE
from mpt.systems.deepfacelab.metrics.shared.face_swap import overlap

DATASET = "procedural_masks"
OUTSIDE = (0.0, 1.0, 0.0)
"""The colour that a preview shows half of outside of the mask."""


class Settings(Options):
    """Previews of the training."""

    preview_count: int = Field(6, ge=1)
    """Faces in a preview: the face under its painted mask, the drawn mask, the face under it."""


class FaceMask(Exports, Legend):
    """Train `xseg` to draw masks of faces."""

    metric, higher_is_better = "mask_iou", True
    inputs = ("face",)
    inputs_note = (
        "each picture was taken for an aligned face; to write masks into a folder of faces: "
        "mpt deepfacelab xseg-apply DIR --xseg RUN"
    )
    preview_columns = 3

    def __init__(
        self,
        settings: Settings,
        modules: Mapping[str, nn.Module],
        precision: Precision,
        extra: Mapping[str, Any],
    ) -> None:
        self.settings, self.precision = settings, precision
        self.modules: dict[str, nn.Module] = dict(modules)
        self.network = modules["xseg"]
        self.trainable: dict[str, nn.Module] = {"xseg": self.network}
        self.pretrains = bool(extra.get("pretrain"))
        self.metric_note = extra.get("labels")
        self.loss = precision.loss(structure_error if self.pretrains else cross_entropy)

    def phases(self, optimizers: Mapping[str, Optimizer]) -> Sequence[Phase]:
        """Return the one phase."""
        return [Phase("xseg", self.network, optimizers["xseg"], self.losses)]

    def logits(self, face: Tensor) -> Tensor:
        """Return logits (b 1 s s) of faces (b 3 s s), RGB in [0, 1]."""
        logits: Tensor = self.network(face.flip(1), self.pretrains)
        return logits

    def losses(self, batch: Batch) -> tuple[Loss, ...]:
        """Return the loss, summed over the samples."""
        return (Loss("loss", self.loss(self.logits(batch["face"]), batch["mask"]).sum(), "sum"),)

    def draw_masks(self, face: Tensor) -> Tensor:
        """Return masks in [0, 1], float32 (b 1 s s)."""
        return torch.sigmoid(self.logits(face).float())

    def evaluate_batch(self, batch: Batch) -> Evidence:
        """Return each sample's overlap of the drawn mask with the painted one, and the error per pixel."""
        drawn = self.draw_masks(batch["face"])
        error = (drawn - batch["mask"]).abs().mean(dim=(1, 2, 3))
        return {"mask_iou": overlap(drawn, batch["mask"]), "mask_error": error}

    def conclude(self, evidence: Sequence[Evidence]) -> dict[str, float]:
        """Return the means over all samples."""
        return {name: float(gather(evidence, name).mean()) for name in evidence[0]}

    def preview(self, batch: Batch) -> Tensor | None:
        """Return three tiles per sample."""
        few = {name: value[: self.settings.preview_count] for name, value in batch.items()}
        return self.tiles(few["face"], few["mask"], self.draw_masks(few["face"]))

    def tiles(self, face: Tensor, painted: Tensor | None, drawn: Tensor) -> Tensor:
        """Return the tiles of a preview; the first column is the bare face if no mask was painted."""
        columns = [
            face if painted is None else shade(face, painted),
            drawn.expand_as(face),
            shade(face, drawn),
        ]
        return torch.stack(columns, dim=1).flatten(0, 1).clamp(0, 1)

    def infer(self, batch: Batch | None, count: int, seed: int) -> Inference:
        """Return the masks of aligned faces, and each face under its mask."""
        assert batch is not None, "a mask is drawn of a picture"
        drawn = self.draw_masks(batch["face"])
        figures = {
            f"mask-{index:04d}": drawn[index : index + 1].expand(-1, 3, -1, -1)
            for index in range(len(drawn))
        }
        return Inference(
            tiles=self.tiles(batch["face"], batch.get("mask"), drawn),
            columns=3,
            outputs=drawn,
            figures=figures,
        )

    def export_terms(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of faces and logits."""
        return ("faces",), ("logits",)


def cross_entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over each sample's pixels, (b,)."""
    return F.binary_cross_entropy_with_logits(logits, mask, reduction="none").mean(dim=(1, 2, 3))


def structure_error(logits: Tensor, picture: Tensor) -> Tensor:
    """Return dissimilarity at two windows and the squared error of a drawn grey picture, (b,)."""
    drawn, side = torch.sigmoid(logits), picture.shape[-1]
    halves = dssim_at(picture, drawn, (int(side / 11.6), int(side / 23.2)))
    return STRUCTURE / 2 * (halves[0] + halves[1]) + COLOUR * (picture - drawn).square().mean(
        dim=(1, 2, 3)
    )


def shade(face: Tensor, mask: Tensor) -> Tensor:
    """Return faces with everything outside their mask dimmed."""
    outside = torch.tensor(OUTSIDE, device=face.device).view(1, 3, 1, 1)
    return face * mask + (0.5 * face + 0.5 * outside) * (1 - mask)


def build(
    settings: Settings,
    model_settings: Options,
    modules: Mapping[str, nn.Module],
    data: DataSpec,
    precision: Precision,
) -> FaceMask:
    """Build the task around `xseg`."""
    for field in ("face", "mask"):
        data.require(field, "task face_mask")
    return FaceMask(settings, modules, precision, data.extra)
