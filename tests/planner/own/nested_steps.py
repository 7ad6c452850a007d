"""Steps on nested tensors (`layout=torch.jagged`), by which sequences of several lengths are not padded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """A block of a transformer on (batch, words of each, features)."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.second = nn.LayerNorm(features), nn.LayerNorm(features)
        self.project = nn.ModuleList([nn.Linear(features, features) for _ in range(3)])
        self.out = nn.Linear(features, features)
        self.network = nn.Sequential(
            nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features)
        )

    def forward(self, words: Tensor) -> Tensor:
        read = self.norm(words)
        query, key, value = (
            project(read).unflatten(-1, [self.heads, -1]).transpose(1, 2)
            for project in self.project
        )
        found = functional.scaled_dot_product_attention(query, key, value)
        words = words + self.out(found.transpose(1, 2).flatten(-2))
        return words + self.network(self.second(words))


def transformer(
    device: str = "cuda", half: bool = False, lengths: tuple[int, ...] = (37, 12, 50)
) -> Any:
    """Texts of three lengths, classified by the mean of their words."""
    embed, block, head = nn.Embedding(50, 32), Block(32, 2), nn.Linear(32, 10)
    model = nn.ModuleList([embed, block, head]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    texts = [torch.randint(0, 50, (length,), device=device) for length in lengths]
    labels = torch.randint(0, 10, (len(lengths),), device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=half):
            words = block(embed(torch.nested.nested_tensor(texts, layout=torch.jagged)))
            padded = torch.nested.to_padded_tensor(words, 0.0)
            loss = functional.cross_entropy(head(padded.mean(1)), labels)
        loss.backward()
        optimizer.step()

    return step


def embedded(device: str = "cuda", by_offsets: bool = False) -> Any:
    """A batch that is nested before the step, of which words are summed."""
    embed, head = nn.Embedding(50, 32).to(device), nn.Linear(32, 10).to(device)
    optimizer = torch.optim.AdamW([*embed.parameters(), *head.parameters()], 1e-3)
    if by_offsets:
        places = torch.tensor([0, 3, 8, 10], device=device)
        texts = torch.nested.nested_tensor_from_jagged(
            torch.randint(0, 50, (10,), device=device), places
        )
    else:
        texts = torch.nested.nested_tensor(
            [torch.randint(0, 50, (length,)) for length in (3, 5, 2)],
            layout=torch.jagged,
            device=device,
        )
    labels = torch.randint(0, 10, (3,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        words = torch.nested.to_padded_tensor(functional.gelu(embed(texts)), 0.0)
        functional.cross_entropy(head(words.sum(1)), labels).backward()
        optimizer.step()

    return step
