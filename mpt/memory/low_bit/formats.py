"""Weights as codes and scales: fp8 (e4m3) and int8 with a scale per row, NF4 in blocks of 64.

Codes are bytes. Scales are float32, held as the int32 numbers of the same bits: a precision mode casts tensors that are
floating, and a scale in half would shift a whole row. A weight is unpacked as `code * scale` in float32, rounded once
to the dtype that is asked for.

fp8's rows are scaled so that their largest value is 448, int8's so that it is 127. NF4's 16 levels are quantiles of
the normal distribution; two codes share a byte, the first in its upper half, and every block of 64 values of the
flattened weight is scaled by its largest. Its table, bytes and scales are those of bitsandbytes
(`tests/memory/test_low_bit_formats.py`).

Sources: Micikevicius et al., "FP8 formats for deep learning", 2022; Dettmers et al., "QLoRA: Efficient finetuning of
quantized LLMs", 2023, section 3 and appendix E.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
BLOCK = 64
"""Values of a weight that share a scale in NF4."""
CHUNK = 1 << 21
"""Bytes of NF4 codes that are unpacked at once, which bounds the float32 numbers alongside the unpacked weight."""
SMALLEST = 1e-38
"""A block of zeros is scaled by this."""


class Format(Protocol):
    """How a weight (out, in) is packed into tensors and unpacked again."""

    @property
    def names(self) -> tuple[str, ...]:
        """The packed tensors, in the order in which `pack` returns and `unpack` takes them."""

    def shapes(self, rows: int, columns: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of each packed tensor."""

    def pack(self, weight: Tensor) -> list[Tensor]:
        """Return the packed tensors of a weight (out, in) of any floating dtype."""

    def unpack(
        self, packed: Sequence[Tensor], rows: int, columns: int, dtype: torch.dtype
    ) -> Tensor:
        """Return the weight (out, in)."""


class RowScaled:
    """One byte per value and one scale per row."""

    names = ("codes", "scales")

    def __init__(self, dtype: torch.dtype, largest: float) -> None:
        self.dtype, self.largest = dtype, largest

    def shapes(self, rows: int, columns: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return (rows, columns) bytes and (rows,) scales."""
        return [((rows, columns), torch.uint8), ((rows,), torch.int32)]

    def pack(self, weight: Tensor) -> list[Tensor]:
        """Scale each row to the format's largest number and round to the nearest."""
        values = weight.float()
        scales = values.abs().amax(1).clamp(min=SMALLEST) / self.largest
        scaled = (values / scales[:, None]).clamp(-self.largest, self.largest)
        codes = scaled.round().to(self.dtype) if self.dtype == torch.int8 else scaled.to(self.dtype)
        return [codes.view(torch.uint8), scales.view(torch.int32)]

    def unpack(
        self, packed: Sequence[Tensor], rows: int, columns: int, dtype: torch.dtype
    ) -> Tensor:
        """Return code * scale. Codes are exact in every dtype of a forward; the product is rounded once."""
        codes, scales = packed
        # Not `codes.to`: streamed weights take a saved cast for one that can be repeated, and this one is scaled after.
        weight = torch.empty(rows, columns, dtype=dtype, device=codes.device)
        return weight.copy_(codes.view(self.dtype)).mul_(scales.view(torch.float32)[:, None])


class NormalFloat4:
    """Half a byte per value, and a scale per block of 64."""

    names = ("codes", "scales", "table")

    def shapes(self, rows: int, columns: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return two codes per byte, a scale per block, and the 16 levels."""
        size = rows * columns
        return [
            ((-(-size // 2),), torch.uint8),
            ((-(-size // BLOCK),), torch.int32),
            ((16,), torch.int32),
        ]

    def pack(self, weight: Tensor) -> list[Tensor]:
        """Scale each block by its largest value and take the nearest level, the lower one of two as near."""
        values = weight.float().flatten()
        whole = values.numel() // BLOCK * BLOCK
        blocks, rest = values[:whole].view(-1, BLOCK), values[whole:]
        scales = blocks.abs().amax(1) if whole else values.new_empty(0)
        scaled = (blocks * scales.clamp(min=SMALLEST).reciprocal()[:, None]).flatten()
        if rest.numel():  # bitsandbytes divides here, and multiplies above
            last = rest.abs().amax().clamp(min=SMALLEST)
            scales, scaled = torch.cat([scales, last[None]]), torch.cat([scaled, rest / last])
        if values.numel() % 2:
            scaled = torch.cat([scaled, scaled.new_zeros(1)])
        table = torch.tensor(NF4_LEVELS, device=weight.device)
        borders = (table[:-1] + table[1:]) / 2
        codes = torch.bucketize(scaled.clamp(-1, 1), borders).to(torch.uint8).view(-1, 2)
        return [(codes[:, 0] << 4) | codes[:, 1], scales.view(torch.int32), table.view(torch.int32)]

    def unpack(
        self, packed: Sequence[Tensor], rows: int, columns: int, dtype: torch.dtype
    ) -> Tensor:
        """Return level * scale, rounded once. Each byte is looked up in a table of all pairs of levels."""
        codes, scales, table = (
            packed[0],
            packed[1].view(torch.float32),
            packed[2].view(torch.float32),
        )
        pairs = torch.stack((table[:, None].expand(16, 16), table.expand(16, 16)), -1).view(256, 2)
        size = rows * columns
        weight = torch.empty(size, dtype=dtype, device=codes.device)
        whole = size // BLOCK * BLOCK
        for start in range(0, whole, 2 * CHUNK):
            end = min(start + 2 * CHUNK, whole)
            values = pairs.index_select(0, codes[start // 2 : end // 2].int()).view(-1, BLOCK)
            values.mul_(scales[start // BLOCK : end // BLOCK, None])
            weight[start:end].copy_(values.view(-1))
        if whole < size:
            values = pairs.index_select(0, codes[whole // 2 :].int()).view(-1)[: size - whole]
            weight[whole:].copy_(values.mul_(scales[-1]))
        return weight.view(rows, columns)


FORMATS: dict[str, Format] = {
    "fp8": RowScaled(torch.float8_e4m3fn, 448.0),
    "int8": RowScaled(torch.int8, 127.0),
    "nf4": NormalFloat4(),
}


def packed_bytes(name: str, rows: int, columns: int) -> int:
    """Return the bytes that a weight takes in a format, scales included."""
    return sum(
        math.prod(shape) * dtype.itemsize for shape, dtype in FORMATS[name].shapes(rows, columns)
    )
