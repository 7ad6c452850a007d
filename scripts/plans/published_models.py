"""BERT-large as the measured runs had it in 2022: eager attention, dropout of 0.1, one layer normalisation after each
part.

Only for `scripts/plans/check_plan.py`. Shapes and order of operations follow "BERT: Pre-training of Deep Bidirectional
Transformers" (Devlin et al. 2019) and its widely used PyTorch port; weights are never loaded. Token ids arrive as the
first row of an image, since the classification task carries those.

The runs were made in January 2022, before torch 1.11, whose softmax still kept its input for backward beside its
output (https://github.com/pytorch/pytorch/pull/65242): so does the one here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class SoftmaxOf2022(torch.autograd.Function):
    """Softmax over the last axis that keeps its input too."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = functional.softmax(scores, dim=-1)
        ctx.save_for_backward(scores, weights)
        return weights

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        scores, weights = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, weights, -1, scores.dtype)


class Layer(nn.Module):
    """Self-attention, then the wide part; each followed by dropout, the sum and a layer normalisation."""

    def __init__(self, width: int, heads: int, wide: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.widen, self.narrow, self.norm_out = (
            nn.Linear(width, wide),
            nn.Linear(wide, width),
            nn.LayerNorm(width),
        )

    def attend(self, x_btd: Tensor, mask_b11t: Tensor) -> Tensor:
        """Return (b, t, d), before the output's projection. A function of its own: what it made dies with it."""
        b, t, d = x_btd.shape
        query, key, value = (
            part(x_btd).view(b, t, self.heads, d // self.heads).permute(0, 2, 1, 3)
            for part in (self.query, self.key, self.value)
        )
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(d // self.heads)
        scores = scores + mask_b11t
        weights: Tensor = SoftmaxOf2022.apply(scores.float())  # float32 under autocast, as ever
        weights = functional.dropout(weights, self.dropout, self.training)
        return torch.matmul(weights, value).permute(0, 2, 1, 3).contiguous().view(b, t, d)

    def forward(self, x_btd: Tensor, mask_b11t: Tensor) -> Tensor:
        """Return (b, t, d)."""
        context = self.out(self.attend(x_btd, mask_b11t))
        x_btd = self.norm(functional.dropout(context, self.dropout, self.training) + x_btd)
        wide = functional.gelu(self.widen(x_btd))
        return self.norm_out(
            functional.dropout(self.narrow(wide), self.dropout, self.training) + x_btd
        )


class BertLarge(nn.Module):
    """24 layers of 1024; tokens in the first row of images (b, 1, t, t) to logits."""

    def __init__(
        self, num_classes: int = 2, layers: int = 24, width: int = 1024, recompute: bool = False
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.tokens, self.positions = (
            nn.Embedding(30522, width, padding_idx=0),
            nn.Embedding(512, width),
        )
        self.types, self.norm = nn.Embedding(2, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            Layer(width, width // 64, 4 * width, 0.1) for _ in range(layers)
        )
        self.pool, self.head = nn.Linear(width, width), nn.Linear(width, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits (b, classes)."""
        token_bt = image[:, 0, 0].long()
        position_t = torch.arange(token_bt.shape[1], device=image.device)
        x_btd = (
            self.tokens(token_bt)
            + self.types(torch.zeros_like(token_bt))
            + self.positions(position_t)
        )
        x_btd = functional.dropout(self.norm(x_btd), 0.1, self.training)
        mask = torch.zeros(
            len(token_bt), 1, 1, token_bt.shape[1], device=image.device, dtype=x_btd.dtype
        )
        for layer in self.layers:
            x_btd = (
                checkpoint(layer, x_btd, mask, use_reentrant=False)
                if self.recompute
                else layer(x_btd, mask)
            )
        pooled = functional.dropout(torch.tanh(self.pool(x_btd[:, 0])), 0.1, self.training)
        logits: Tensor = self.head(pooled)
        return logits
