"""Networks of diffusers behind one call: each class's own way to be given pictures, levels and conditions.

The network of the library is `inner`, so that its weights have the library's names behind one prefix. Random dropping
of classes inside of a network is switched off: the task draws it, before a batch is split.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpt.errors import ConfigError
from mpt.systems.diffusion.losses.shared.objectives import TIME_SCALE
from mpt.systems.diffusion.nn.shared.denoiser import Denoiser
from mpt.systems.diffusion.nn.shared.embedding import from_ticks


class LibraryDenoiser(Denoiser):
    """A network of diffusers."""

    fields: tuple[str, ...] = ()
    """Conditions of this class alongside a label."""

    def __init__(self, inner: Any, classes: int) -> None:
        super().__init__()
        self.inner = inner
        self.channels = int(inner.config.in_channels)
        known = self.class_embeddings()
        if known is not None:
            if known not in (classes, classes + 1):
                raise ConfigError(
                    f"model: this {type(inner).__name__} has {known} classes, and the data set {classes}; it needs as "
                    "many, or one more for pictures without a class"
                )
            self.classes, self.has_none = classes, known == classes + 1
        self.conditions = (*(("label",) if known is not None else ()), *self.fields)

    def class_embeddings(self) -> int | None:
        """Return the number of classes that the network has vectors for; None without classes."""
        return None

    def features(self) -> dict[str, int]:
        """Return the lengths of the embeddings that the network is given, by the condition's name."""
        return {}


class PixelUnet(LibraryDenoiser):
    """`UNet2DModel`, with `num_class_embeds` for classes."""

    def class_embeddings(self) -> int | None:
        """Return `num_class_embeds`."""
        known: int | None = self.inner.config.num_class_embeds
        return known

    def forward(self, noisy_bchw: Tensor, ticks_b: Tensor, *conditions: Tensor) -> Tensor:
        label = {"class_labels": conditions[0]} if conditions else {}
        answer: Tensor = self.inner(noisy_bchw, from_ticks(ticks_b), **label, return_dict=False)[0]
        return answer


class Dit(LibraryDenoiser):
    """`DiTTransformer2DModel`; of an answer with a variance, the mean alone is used and trained."""

    def __init__(self, inner: Any, classes: int) -> None:
        super().__init__(inner, classes)
        for module in inner.modules():
            if type(module).__name__ == "LabelEmbedding":
                module.dropout_prob = 0.0

    def class_embeddings(self) -> int | None:
        """Return the number of vectors in the first block's table of classes."""
        table = self.inner.transformer_blocks[0].norm1.emb.class_embedder.embedding_table
        return int(table.num_embeddings)

    def forward(self, noisy_bchw: Tensor, ticks_b: Tensor, *conditions: Tensor) -> Tensor:
        (label,) = conditions
        answer: Tensor = self.inner(
            noisy_bchw, from_ticks(ticks_b), class_labels=label, return_dict=False
        )[0]
        return answer[:, : self.channels]


class TextUnet(LibraryDenoiser):
    """`UNet2DConditionModel` of Stable Diffusion 1 and 2: `text` (b, tokens, features)."""

    fields: tuple[str, ...] = ("text",)

    def features(self) -> dict[str, int]:
        """Return `text`, unless its length is that of a layer in front of the attention."""
        config = self.inner.config
        wanted = config.cross_attention_dim if config.encoder_hid_dim_type is None else None
        return {"text": wanted} if isinstance(wanted, int) else {}

    def forward(self, noisy_bchw: Tensor, ticks_b: Tensor, *conditions: Tensor) -> Tensor:
        (text,) = conditions
        answer: Tensor = self.inner(noisy_bchw, from_ticks(ticks_b), text, return_dict=False)[0]
        return answer


class TextAndSizeUnet(TextUnet):
    """`UNet2DConditionModel` of SDXL: also `pooled` (b, features) and `sizes` (b, 6).

    Sizes are in pixels: the original's height and width, top and left of the crop, the target's height and width.
    """

    fields = ("text", "pooled", "sizes")

    def features(self) -> dict[str, int]:
        """Return `text`, `pooled` and the six `sizes`, each of which becomes a vector of its own."""
        config = self.inner.config
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        return {**super().features(), "pooled": pooled, "sizes": 6}

    def forward(self, noisy_bchw: Tensor, ticks_b: Tensor, *conditions: Tensor) -> Tensor:
        text, pooled, sizes = conditions
        added = {"text_embeds": pooled, "time_ids": sizes}
        answer: Tensor = self.inner(
            noisy_bchw, from_ticks(ticks_b), text, added_cond_kwargs=added, return_dict=False
        )[0]
        return answer


class TextTransformer(LibraryDenoiser):
    """A transformer that is given `text` (b, tokens, features) and `pooled` (b, features)."""

    fields: tuple[str, ...] = ("text", "pooled")

    def features(self) -> dict[str, int]:
        """Return `text` and `pooled`."""
        config = self.inner.config
        return {"text": config.joint_attention_dim, "pooled": config.pooled_projection_dim}


class Sd3(TextTransformer):
    """`SD3Transformer2DModel`."""

    def forward(self, noisy_bchw: Tensor, ticks_b: Tensor, *conditions: Tensor) -> Tensor:
        text, pooled = conditions
        answer: Tensor = self.inner(
            noisy_bchw,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=from_ticks(ticks_b),
            return_dict=False,
        )[0]
        return answer


class Flux(TextTransformer):
    """`FluxTransformer2DModel`: squares of 2 x 2 latents are one token; a distilled guidance is given as `GUIDANCE`."""

    GUIDANCE = 1.0

    def __init__(self, inner: Any, classes: int) -> None:
        super().__init__(inner, classes)
        self.channels //= 4

    def forward(self, noisy_bchw: Tensor, ticks_b: Tensor, *conditions: Tensor) -> Tensor:
        text, pooled = conditions
        height, width = noisy_bchw.shape[2] // 2, noisy_bchw.shape[3] // 2
        guidance = (
            noisy_bchw.new_full((len(noisy_bchw),), self.GUIDANCE)
            if self.inner.config.guidance_embeds
            else None
        )
        answer = self.inner(
            pack(noisy_bchw),
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=from_ticks(ticks_b) / TIME_SCALE,
            img_ids=places(height, width, noisy_bchw.device),
            txt_ids=torch.zeros(text.shape[1], 3, device=noisy_bchw.device),
            guidance=guidance,
            return_dict=False,
        )[0]
        return unpack(answer, height, width)


def pack(latent_bchw: Tensor) -> Tensor:
    """Return squares of 2 x 2 latents as tokens (b, h w / 4, 4 c)."""
    batch, channels, height, width = latent_bchw.shape
    squares = latent_bchw.view(batch, channels, height // 2, 2, width // 2, 2).permute(
        0, 2, 4, 1, 3, 5
    )
    return squares.reshape(batch, (height // 2) * (width // 2), channels * 4)


def unpack(tokens_bnc: Tensor, height: int, width: int) -> Tensor:
    """Return tokens of `height` x `width` squares as latents (b, c, 2 height, 2 width)."""
    batch, _, channels = tokens_bnc.shape
    squares = tokens_bnc.view(batch, height, width, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return squares.reshape(batch, channels // 4, 2 * height, 2 * width)


def places(height: int, width: int, device: torch.device) -> Tensor:
    """Return the coordinates (h w, 3) of tokens, row by row; the first is 0."""
    row, column = torch.arange(height, device=device), torch.arange(width, device=device)
    grid = torch.stack(torch.meshgrid(row, column, indexing="ij"), dim=-1).view(-1, 2)
    return torch.nn.functional.pad(grid, (1, 0)).float()


def wrap(inner: Any, classes: int) -> LibraryDenoiser:
    """Return a network of diffusers behind the common call. Raises ConfigError for a class that is not known here."""
    name = type(inner).__name__
    if name == "UNet2DConditionModel":
        added = inner.config.addition_embed_type
        if added not in (None, "text_time") or inner.config.class_embed_type is not None:
            raise ConfigError(
                f"model: this UNet2DConditionModel has addition_embed_type {added!r} and class_embed_type "
                f"{inner.config.class_embed_type!r}; those of Stable Diffusion 1, 2 and SDXL are known here"
            )
        return (TextUnet if added is None else TextAndSizeUnet)(inner, classes)
    return KNOWN[name](inner, classes)


KNOWN: dict[str, type[LibraryDenoiser]] = {
    "UNet2DModel": PixelUnet,
    "DiTTransformer2DModel": Dit,
    "UNet2DConditionModel": TextUnet,
    "SD3Transformer2DModel": Sd3,
    "FluxTransformer2DModel": Flux,
}
