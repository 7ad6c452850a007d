"""Networks of diffusers that encode captions in each step, so that their CLIP text encoders can be trained.

Samples have the captions' tokens instead of CLIP's embeddings, which are made as the pipelines' `encode_prompt` makes
them; T5's, of SD3 and Flux, stay cached. Tokens of -1 are of a caption that is left out: its embeddings are zeros, as
those of cached ones are then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpt.errors import ConfigError
from mpt.systems.diffusion.nn.shared.library_networks import (
    Flux,
    LibraryDenoiser,
    Sd3,
    TextAndSizeUnet,
    TextUnet,
    wrap,
)

BOTH = ("text_encoder", "text_encoder_2")


class Captioned(LibraryDenoiser):
    """In front of a network's class: its conditions are made of the sample's."""

    encoders: tuple[str, ...] = BOTH
    text_encoder: Any
    text_encoder_2: Any

    def forward(self, noisy_bchw: Tensor, ticks_b: Tensor, *conditions: Tensor) -> Tensor:
        answer: Tensor = super().forward(noisy_bchw, ticks_b, *self.embed(*conditions))
        return answer

    def embed(self, *conditions: Tensor) -> tuple[Tensor, ...]:
        """Return the network's conditions: embeddings of captions, and what else it is given."""
        raise NotImplementedError

    def both(self, tokens: Tensor, tokens_2: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the states before the last layer of both encoders, side by side, and their answers."""
        first = self.text_encoder(tokens.clamp(min=0), output_hidden_states=True)
        second = self.text_encoder_2(tokens_2.clamp(min=0), output_hidden_states=True)
        return torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1), (
            first[0],
            second[0],
        )


class CaptionedUnet(Captioned, TextUnet):
    """`UNet2DConditionModel` of Stable Diffusion 1 and 2 with its encoder: `tokens` (b, tokens)."""

    fields, encoders = ("tokens",), BOTH[:1]

    def embed(self, *conditions: Tensor) -> tuple[Tensor, ...]:
        """Return the text: the last states."""
        (tokens,) = conditions
        return (kept(self.text_encoder(tokens.clamp(min=0)).last_hidden_state, tokens),)


class CaptionedTextAndSizeUnet(Captioned, TextAndSizeUnet):
    """`UNet2DConditionModel` of SDXL with both encoders: `tokens`, `tokens_2` (b, tokens) and `sizes` (b, 6)."""

    fields = ("tokens", "tokens_2", "sizes")

    def embed(self, *conditions: Tensor) -> tuple[Tensor, ...]:
        """Return the text, the second encoder's projection as the pooled one, and the sizes."""
        tokens, tokens_2, sizes = conditions
        text, (_, pooled) = self.both(tokens, tokens_2)
        return kept(text, tokens), kept(pooled, tokens), sizes


class CaptionedSd3(Captioned, Sd3):
    """`SD3Transformer2DModel` with CLIP's encoders: `text` (b, tokens, features), `tokens` and `tokens_2`."""

    fields = ("text", "tokens", "tokens_2")

    def embed(self, *conditions: Tensor) -> tuple[Tensor, ...]:
        """Return the text with CLIP's part of it, the first, made anew, and both projections as the pooled one."""
        text, tokens, tokens_2 = conditions
        clip, pooled = self.both(tokens, tokens_2)
        wide = functional.pad(clip, (0, text.shape[-1] - clip.shape[-1])).to(text.dtype)
        whole = torch.cat([kept(wide, tokens), text[:, clip.shape[1] :]], dim=1)
        return whole, kept(torch.cat(pooled, dim=-1), tokens)


class CaptionedFlux(Captioned, Flux):
    """`FluxTransformer2DModel` with CLIP's encoder: `text` (b, tokens, features) of T5, and `tokens`."""

    fields, encoders = ("text", "tokens"), BOTH[:1]

    def embed(self, *conditions: Tensor) -> tuple[Tensor, ...]:
        """Return the text as it is, and CLIP's pooled one."""
        text, tokens = conditions
        return text, kept(self.text_encoder(tokens.clamp(min=0)).pooler_output, tokens)


CAPTIONED: dict[type[LibraryDenoiser], type[Captioned]] = {
    TextUnet: CaptionedUnet,
    TextAndSizeUnet: CaptionedTextAndSizeUnet,
    Sd3: CaptionedSd3,
    Flux: CaptionedFlux,
}


def kept(encoded: Tensor, tokens_bn: Tensor) -> Tensor:
    """Return embeddings (b, ...) with zeros for captions that are left out."""
    is_there = tokens_bn[:, 0] >= 0
    return encoded * is_there.view(-1, *(1,) * (encoded.dim() - 1)).to(encoded.dtype)


def wrap_with_encoders(
    inner: Any, classes: int, build: Callable[[str], nn.Module]
) -> LibraryDenoiser:
    """Return a network of diffusers with the text encoders that `build` makes by their names.

    Raises ConfigError for a network without text.
    """
    kind = CAPTIONED.get(type(wrap(inner, classes)))
    if kind is None:
        raise ConfigError(
            f"model.text_encoders: a {type(inner).__name__} reads no text; leave it out"
        )
    net = kind(inner, classes)
    for name in kind.encoders:
        setattr(net, name, build(name))
    return net
