"""A decoder of token ids (Radford et al., "Language models are unsupervised multitask learners", 2019): GPT-2's blocks.

Letters in shapes: b samples, t tokens, w width, v vocabulary. The last layer shares the embedding's weight.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from mpt.config.options import Options
from mpt.seams import DataSpec

TASK = "next_token"


class Settings(Options):
    layers: int = Field(2, ge=1)
    """Number of blocks."""
    width: int = Field(32, ge=1)
    """Numbers per token; a multiple of `heads`."""
    heads: int = Field(4, ge=1)
    """Attention heads."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_btw: Tensor) -> Tensor:
        parts = self.attend(self.before(x_btw)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_btw = x_btw + self.project(seen.transpose(1, 2).flatten(2))
        return x_btw + self.narrow(
            functional.gelu(self.widen(self.between(x_btw)), approximate="tanh")
        )


class Decoder(nn.Module):
    def __init__(self, settings: Settings, vocabulary: int, length: int) -> None:
        super().__init__()
        width = settings.width
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, settings.heads) for _ in range(settings.layers)))
        self.end = nn.LayerNorm(width)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        places = torch.arange(tokens_bt.shape[1], device=tokens_bt.device)
        x_btw = self.blocks(self.tokens(tokens_bt) + self.places(places))
        return functional.linear(self.end(x_btw), self.tokens.weight)


def build(settings: Settings, data: DataSpec) -> dict[str, nn.Module]:
    """Build `net`: ids (b t) to logits (b t v)."""
    (length,) = data.require("tokens", "model decoder").shape
    return {"net": Decoder(settings, data.extra["vocabulary"], length)}
