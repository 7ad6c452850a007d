"""Float32 numbers into bfloat16 storage without losing small updates: rounding at random, or keeping the remainder.

Rounded to the nearest, an update below half an ulp (1/512 of its weight) is lost. Rounded up or down at random, in
proportion to the distance, it is kept on average; the random bits are a hash of a key and the element's place, so that
they are the same on every device, in any order of work, and after a resume. Kept as a second bfloat16 number, the
remainder adds eight bits to the eight of the first.

Sources: Gupta et al., "Deep learning with limited numerical precision", 2015; Zamirai et al., "Revisiting BFloat16
training", 2020 (both ways, with the remainder as Kahan's compensation). Hash: Chris Wellons, "lowbias32", 2018.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

MASK = -(1 << 16)
"""The upper half of a float32's bits, which is a bfloat16."""


def make_key(*parts: int | str) -> tuple[int, int]:
    """Return two 32-bit numbers that are a function of the parts."""
    digest = hashlib.blake2s(repr(parts).encode(), digest_size=8).digest()
    first, second = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
    return first - (1 << 31), second - (1 << 31)


def random_halves(count: int, key: tuple[int, int], start: int, device: torch.device) -> Tensor:
    """Return `count` int32 numbers from 0 to 65535: those of the places `start` and on in the sequence of the key."""
    bits = torch.arange(start, start + count, dtype=torch.int64, device=device).to(torch.int32)
    bits.add_(key[0])
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - (1 << 32))
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).bitwise_xor_(key[1])
    bits.mul_(0x7FEB352D).bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - (1 << 32))
    return (bits >> 16).bitwise_and_(0xFFFF)


def round_at_random(numbers: Tensor, key: tuple[int, int], start: int = 0) -> Tensor:
    """Return float32 numbers as bfloat16, each one of its two neighbours at random. `numbers` is used up.

    What bfloat16 can hold stays as it is. `start` is the place of the first number in the sequence of the key.
    """
    flat = numbers.contiguous().view(-1)
    bits = flat.view(torch.int32)
    bits.add_(random_halves(flat.numel(), key, start, flat.device)).bitwise_and_(MASK)
    return flat.to(torch.bfloat16).view(numbers.shape)


def with_remainder(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 numbers as the sum of two in bfloat16: the nearest, and what is left."""
    nearest = numbers.to(torch.bfloat16)
    return nearest, (numbers - nearest).to(torch.bfloat16)
