"""Sequences of token ids, each of which follows from the one before: twice it, plus one or plus two."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field

from mpt.config.options import DatasetOptions
from mpt.data.pictures.seeds import mix
from mpt.seams import Batch, DataSpec, FieldSpec


class Settings(DatasetOptions):
    vocabulary: int = Field(31, ge=2)
    """Number of different tokens."""
    length: int = Field(16, ge=2)
    """Tokens of a sample."""
    size: int = Field(256, ge=1)
    """Number of training samples; half as many are for testing."""


class Letters:
    """Samples `tokens`, of (length) int64."""

    def __init__(self, settings: Settings, split: int) -> None:
        self.settings, self.split = settings, split
        self.size = settings.size if split == 0 else -(-settings.size // 2)
        fields = {"tokens": FieldSpec((settings.length,), torch.int64)}
        self.spec = DataSpec(fields, self.size, extra={"vocabulary": settings.vocabulary})

    def __len__(self) -> int:
        return self.size

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch:
        """Return the sequences of these indices."""
        return {"tokens": torch.stack([self.draw(index) for index in indices])}

    def draw(self, index: int) -> torch.Tensor:
        numbers = torch.Generator().manual_seed(mix(self.split, index))
        coins = torch.randint(1, 3, (self.settings.length,), generator=numbers)
        tokens = [int(torch.randint(self.settings.vocabulary, (), generator=numbers))]
        for coin in coins[1:].tolist():
            tokens.append((2 * tokens[-1] + coin) % self.settings.vocabulary)
        return torch.tensor(tokens)


def build(settings: Settings, split: str, seed: int) -> Letters:
    """Return one split."""
    return Letters(settings, int(split == "test"))
