"""Face swapping between two people: phase `autoencoder`, then `code_disc` and `patch_disc` if they have power.

Each person's stream is drawn and back-propagated alone: the loss is a sum over both, so the gradient is that of
doing them together while the activations of one stream are held at a time. Losses are summed over the batch, as
DeepFaceLab does, and computed in float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from mpt.config.options import Options, setting_of
from mpt.errors import ConfigError
from mpt.seams import Batch, DataSpec, Evidence, Inference, Legend, Loss, Phase, Precision, gather
from mpt.systems.deepfacelab.losses.shared import face_swap as losses
from mpt.systems.deepfacelab.metrics.shared.face_swap import overlap, peak_signal_to_noise

DATASET = "procedural_faces"


class Settings(Options):
    """Settings of the losses; powers of the discriminators belong to the model."""

    masked_training: bool = True
    """Compare faces under their mask only."""
    stretch_mask: bool = True
    """Let half coverage by the blurred mask count in full; a Quick96 does not."""
    eyes_mouth_priority: bool = False
    """Weigh eyes and mouth far above the rest."""
    blur_out_mask: bool = False
    """Train on targets whose surround is smoothed towards the mask."""
    face_style_power: float = Field(0.0, ge=0, le=100)
    """Draw the swap's colours, inside the mask, towards the destination's."""
    bg_style_power: float = Field(0.0, ge=0, le=100)
    """Draw the swap, outside the mask, towards the destination."""
    preview_count: int = Field(6, ge=1)


class Autoencoder(Protocol):
    """The methods of both families of model. A drawn face is (image, mask)."""

    def encode_src(self, image: Tensor) -> Tensor: ...

    def encode_dst(self, image: Tensor) -> Tensor: ...

    def encode_swap(self, image: Tensor) -> Tensor: ...

    def draw_src(self, code: Tensor) -> tuple[Tensor, Tensor]: ...

    def draw_dst(self, code: Tensor) -> tuple[Tensor, Tensor]: ...

    def draw_swap(self, code: Tensor) -> tuple[Tensor, Tensor]: ...


class FaceSwap(Legend):
    """Train an autoencoder with a shared encoder to redraw two people, each from a bent picture."""

    metric, higher_is_better = "source_psnr", True
    inputs = ("dst_target",)
    inputs_note = (
        "each picture was taken for an aligned face; to swap the faces in whole frames or in a video: "
        "mpt infer RUN --input frames=DIR --input aligned=DIR -o DIR"
    )
    preview_columns = 8
    """Source, redrawn; destination, redrawn; swap, swap in place, and the two masks drawn for it."""

    def __init__(
        self,
        settings: Settings,
        model_settings: Any,
        modules: Mapping[str, nn.Module],
        precision: Precision,
        extra: Mapping[str, Any],
    ) -> None:
        self.settings, self.precision = settings, precision
        powers = (settings.face_style_power, settings.bg_style_power)
        self.face_style, self.surround_style = (
            0.0 if extra.get("pretrain") else power / 100 for power in powers
        )
        notes = (describe_masks(extra.get("masks", {})), extra.get("rules"))
        self.metric_note = "; ".join(note for note in notes if note) or None
        # Without warps DeepFaceLab leaves inter_AB out, of the training and of the norm that is clipped.
        unwarped = extra.get("random_warp") is False and "inter_AB" in dict(
            modules["autoencoder"].named_children()
        )
        self.resting = modules["autoencoder"].get_submodule("inter_AB") if unwarped else None
        self.modules: dict[str, nn.Module] = dict(modules)
        self.autoencoder = modules["autoencoder"]
        self.faces = cast(Autoencoder, self.autoencoder)
        self.code_discriminator = modules.get("code_discriminator")
        self.patch_discriminator = modules.get("patch_discriminator")
        self.true_face_power: float = model_settings.true_face_power
        self.gan_power: float = model_settings.gan_power
        self.trainable: dict[str, nn.Module] = {"autoencoder": self.autoencoder}
        # While it pretrains, DeepFaceLab asks a code discriminator that it never trains.
        if self.code_discriminator is not None and not extra.get("pretrain"):
            self.trainable["code_disc"] = self.code_discriminator
        if self.patch_discriminator is not None:
            self.trainable["patch_disc"] = self.patch_discriminator
        self.soften = partial(losses.soften, stretched=settings.stretch_mask)
        self.drawing_loss = precision.loss(self.compare)
        self.verdict = precision.loss(losses.verdict)
        self.background = precision.loss(losses.background)
        self.style_error = precision.loss(losses.style_error)
        self.surround_error = precision.loss(losses.surround_error)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The networks, each alone; memory tricks find the repeated stages inside."""
        discriminators = [
            module for name, module in self.trainable.items() if name != "autoencoder"
        ]
        return [*self.autoencoder.children(), *discriminators]

    def phases(self, optimizers: Mapping[str, Optimizer]) -> Sequence[Phase]:
        """Return the autoencoder's phase and those of the discriminators there are."""
        functions: dict[str, Callable[[Batch], Iterator[Loss | list[Loss]]]] = {
            "autoencoder": self.autoencoder_losses,
            "code_disc": self.code_disc_losses,
            "patch_disc": self.patch_disc_losses,
        }
        return [
            Phase(name, module, optimizers[name], functions[name])
            for name, module in self.trainable.items()
        ]

    def draw(self, batch: Batch, phase: Phase) -> Batch:
        """Smooth the targets' surround if that is asked for. Random numbers were drawn with the data."""
        if not self.settings.blur_out_mask:
            return batch
        smoothed = {
            f"{side}_target": losses.smooth_surround(batch[f"{side}_target"], batch[f"{side}_mask"])
            for side in ("src", "dst")
        }
        return {**batch, **smoothed}

    @property
    def draws_by_shape(self) -> bool:
        """Nothing is drawn; the targets' values are used if their surround is smoothed."""
        return not self.settings.blur_out_mask

    def autoencoder_losses(self, batch: Batch) -> Iterator[Loss | list[Loss]]:
        """Yield the source's losses, with those of the discriminators, then the destination's and the styles'."""
        with resting(self.resting):
            yield from self.drawing_losses(batch)

    def drawing_losses(self, batch: Batch) -> Iterator[list[Loss]]:
        """Yield the losses of the autoencoder's phase; those of one side share a graph."""
        code = self.faces.encode_src(batch["src_warped"])
        image, mask = self.faces.draw_src(code)
        parts = self.side_losses(image, mask, batch, "src")
        if self.code_discriminator is not None:
            parts["true_face"] = self.true_face_power * self.verdict(
                self.code_discriminator(code), real=True
            )
        if self.patch_discriminator is not None:
            parts |= self.patch_losses(image, batch)
        yield summed("src_", parts)
        # the generator would keep the source's graph alive through the destination's
        del code, image, mask, parts
        image, mask = self.faces.draw_dst(self.faces.encode_dst(batch["dst_warped"]))
        yield summed("dst_", self.side_losses(image, mask, batch, "dst"))
        if self.face_style or self.surround_style:
            style = (image * mask).detach()
            del image, mask
            yield summed("", self.style_losses(batch, style))

    def style_losses(self, batch: Batch, style: Tensor) -> dict[str, Tensor]:
        """Return per sample how far the swap's colours are from the destination's drawing under its mask (which trains
        the decoder alone), and how far its surround is from the destination's.

        The surround is outside of the source's mask: DeepFaceLab's own, though its swap lies on the destination's.
        """
        parts = {}
        with contextlib.nullcontext() if self.surround_style else torch.no_grad():
            code = self.faces.encode_swap(batch["dst_warped"])
        if self.face_style:
            image, mask = self.faces.draw_swap(code.detach())
            parts["face_style"] = self.face_style * self.style_error(image * mask.detach(), style)
        if self.surround_style:
            image, _ = self.faces.draw_swap(code)
            softened = self.soften(batch["src_mask"])
            error = self.surround_error(batch["dst_target"], image, softened)
            parts["background_style"] = self.surround_style * error
        return parts

    def side_losses(
        self, image: Tensor, mask: Tensor, batch: Batch, side: str
    ) -> dict[str, Tensor]:
        """Return one side's losses per sample."""
        target, true_mask = batch[f"{side}_target"], batch[f"{side}_mask"]
        result: dict[str, Tensor] = self.drawing_loss(
            target, true_mask, batch[f"{side}_eyes_mouth"], image, mask
        )
        return result

    def compare(
        self, target: Tensor, true_mask: Tensor, eyes_mouth: Tensor, image: Tensor, mask: Tensor
    ) -> dict[str, Tensor]:
        """Return the losses of a drawing, per sample."""
        parts = {"mask": losses.mask_error(true_mask, mask)}
        if self.settings.eyes_mouth_priority:
            parts["eyes_mouth"] = losses.eyes_mouth_error(target, image, eyes_mouth)
        if self.settings.masked_training:
            softened = self.soften(true_mask)
            target, image = target * softened, image * softened
        return {**parts, "face": losses.reconstruction(target, image)}

    def patch_losses(self, image: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the patch discriminator's loss of the drawn source, and the penalty of its surround."""
        assert self.patch_discriminator is not None
        softened = self.soften(batch["src_mask"])
        center, pixels = self.patch_discriminator(self.under_mask(image, softened))
        verdict: Tensor = self.gan_power * (
            self.verdict(center, real=True) + self.verdict(pixels, real=True)
        )
        if not self.settings.masked_training:
            return {"gan": verdict}
        return {"gan": verdict, "background": self.background(batch["src_target"], image, softened)}

    def under_mask(self, image: Tensor, softened: Tensor) -> Tensor:
        """Return the image as the patch discriminator sees it."""
        return image * softened.to(image.dtype) if self.settings.masked_training else image

    def code_disc_losses(self, batch: Batch) -> Iterator[Loss]:
        """Yield half the cross-entropy of calling destinations' codes real, then half that of calling sources' not."""
        assert self.code_discriminator is not None
        for side, encode, real in (
            ("dst", self.faces.encode_dst, True),
            ("src", self.faces.encode_src, False),
        ):
            with torch.no_grad():
                code = encode(batch[f"{side}_warped"])
            logits = self.code_discriminator(code)
            yield Loss(side, 0.5 * self.verdict(logits, real=real).sum(), "sum")

    def patch_disc_losses(self, batch: Batch) -> Iterator[Loss]:
        """Yield half the cross-entropy on true sources, then half that on drawn ones, of both outputs."""
        assert self.patch_discriminator is not None
        softened = self.soften(batch["src_mask"])
        center, pixels = self.patch_discriminator(self.under_mask(batch["src_target"], softened))
        real = self.verdict(center, real=True) + self.verdict(pixels, real=True)
        yield Loss("real", 0.5 * real.sum(), "sum")
        del center, pixels, real
        with torch.no_grad():
            image, _ = self.faces.draw_src(self.faces.encode_src(batch["src_warped"]))
        center, pixels = self.patch_discriminator(self.under_mask(image, softened))
        drawn = self.verdict(center, real=False) + self.verdict(pixels, real=False)
        yield Loss("drawn", 0.5 * drawn.sum(), "sum")

    def redraw(self, batch: Batch) -> dict[str, Tensor]:
        """Return float32 drawings by name: `swap` and, for the sides that the batch has, `src` and `dst`; with
        masks."""
        drawn: dict[str, Tensor] = {}
        jobs = {
            "src": (self.faces.encode_src, self.faces.draw_src, "src_warped"),
            "dst": (self.faces.encode_dst, self.faces.draw_dst, "dst_warped"),
            "swap": (self.faces.encode_swap, self.faces.draw_swap, "dst_warped"),
        }
        for name, (encode, draw, field) in jobs.items():
            if field in batch:
                image, mask = draw(encode(batch[field]))
                drawn[name], drawn[f"{name}_mask"] = image.float(), mask.float()
        return drawn

    def evaluate_batch(self, batch: Batch) -> Evidence:
        """Return each sample's PSNR under the true mask and overlap of masks, of swaps too if the true are known."""
        drawn = self.redraw(batch)
        found: Evidence = {}
        with self.precision.float32():
            for side, name in (("src", "source"), ("dst", "destination"), ("swap", "swap")):
                if f"{side}_mask" in batch:
                    mask = batch[f"{side}_mask"]
                    found[f"{name}_psnr"] = peak_signal_to_noise(
                        drawn[side] * mask, batch[f"{side}_target"] * mask
                    )
                    found[f"{name}_mask_iou"] = overlap(drawn[f"{side}_mask"], mask)
        return found

    def conclude(self, evidence: Sequence[Evidence]) -> dict[str, float]:
        """Return the mean of each figure over all samples: PSNR in dB, overlap as a share."""
        return {name: float(gather(evidence, name).mean()) for name in evidence[0]}

    def preview(self, batch: Batch) -> Tensor | None:
        """Return a row of `preview_columns` tiles per sample."""
        count = self.settings.preview_count
        few = {name: value[:count] for name, value in batch.items()}
        return self.tiles(few, self.redraw(few), ("src", "dst"))

    def tiles(self, batch: Batch, drawn: Mapping[str, Tensor], sides: Sequence[str]) -> Tensor:
        """Return the rows of a preview: each side with its redrawing, then the swap in four pictures."""
        target, swap = batch["dst_target"], drawn["swap"]
        mask = drawn["swap_mask"]
        if "dst_mask" in drawn:
            # what both drawings call face is replaced, as DeepFaceLab's merger does
            mask = mask * drawn["dst_mask"]
        columns = []
        for side in sides:
            # Outside its mask a drawing is not trained: shown, it would only distract.
            columns += [batch[f"{side}_target"], drawn[side] * drawn[f"{side}_mask"]]
        columns += [swap * drawn["swap_mask"], target + (swap - target) * mask]
        columns += [
            picture.expand_as(target) for picture in (drawn["swap_mask"], drawn["dst_mask"])
        ]
        return torch.stack(columns, dim=1).flatten(0, 1).clamp(0, 1)

    def infer(self, batch: Batch | None, count: int, seed: int) -> Inference:
        """Swap destination faces, given alone or as a whole batch; return grids, swaps and masks."""
        assert batch is not None, "a face swap is made from pictures"
        if "dst_warped" not in batch:
            batch = {**batch, "dst_warped": batch["dst_target"]}
        drawn = self.redraw(batch)
        sides = ("src", "dst") if "src" in drawn else ("dst",)
        figures = {}
        for index in range(len(drawn["swap"])):
            figures[f"swap-{index:04d}"] = drawn["swap"][index : index + 1].clamp(0, 1)
            figures[f"mask-{index:04d}"] = drawn["swap_mask"][index : index + 1].expand(
                -1, 3, -1, -1
            )
        outputs = torch.cat((drawn["swap"], drawn["swap_mask"]), dim=1)
        return Inference(
            tiles=self.tiles(batch, drawn, sides),
            columns=4 + 2 * len(sides),
            outputs=outputs,
            figures=figures,
        )


def summed(prefix: str, parts: Mapping[str, Tensor]) -> list[Loss]:
    """Return losses per sample as sums over the samples, by prefixed names."""
    return [Loss(f"{prefix}{name}", value.sum(), "sum") for name, value in parts.items()]


def build(
    settings: Settings,
    model_settings: Options,
    modules: Mapping[str, nn.Module],
    data: DataSpec,
    precision: Precision,
) -> FaceSwap:
    """Build the task around `autoencoder` and whichever discriminators the model has."""
    for side in ("src", "dst"):
        found = data.require(f"{side}_warped", "task face_swap").shape
        if found[-1] != (wanted := setting_of(model_settings, "image_size", found[-1])):
            raise ConfigError(
                f"model: it swaps faces of {wanted} pixels, and the data set delivers {found[-1]}; leave "
                "dataset.image_size out so that it follows the model"
            )
    return FaceSwap(settings, model_settings, modules, precision, data.extra)


@contextlib.contextmanager
def resting(network: nn.Module | None) -> Iterator[None]:
    """Keep a network's weights from getting gradients inside the block.

    They stay the optimizer's, so that its state is kept. They are those of the moment: a precision mode puts others in
    their place.
    """
    weights = () if network is None else network.parameters()
    parameters = [weight for weight in weights if weight.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def describe_masks(masks: Mapping[str, Mapping[str, int]]) -> str | None:
    """Name the sources of the faces' masks; None if the data do not record them."""
    words = {
        "xseg": "painted XSeg masks",
        "polygons": "painted polygons",
        "hull": "hulls of landmarks",
        "file": "files",
    }
    sides = [
        f"{side}: " + ", ".join(f"{count} {words.get(kind, kind)}" for kind, count in found.items())
        for side, found in masks.items()
    ]
    return f"masks of {'; '.join(sides)}" if sides else None
