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

LARGEST_START = 1 << 30
"""The keys' first numbers are below it, so that a place up to it can be added in 32 bits."""
STREAMS = 3
"""How many tensors share the random bits of an element: each takes 16 of 32, the third those in the middle."""


def make_key(*parts: int | str) -> tuple[int, int]:
    """Return two numbers, of 30 and 32 bits, that are a function of the parts."""
    digest = hashlib.blake2s(repr(parts).encode(), digest_size=8).digest()
    first, second = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
    return first % LARGEST_START, second - (1 << 31)


def random_bits(count: int, key: tuple[int, int], start: int, device: torch.device) -> Tensor:
    """Return `count` random int32 numbers: those of the places `start` and on in the sequence of the key.

    Every line is a pass over memory, which is what rounding at random costs; hence in place, and no more of them.
    """
    assert start + count <= LARGEST_START, "tensors of more than 2^30 elements are not numbered"
    bits = torch.arange(start + key[0], start + key[0] + count, dtype=torch.int32, device=device)
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D).add_(key[1])
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - (1 << 32))
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def stream(bits: Tensor, number: int) -> Tensor:
    """Return the numbers from 0 to 65535 that one of the tensors sharing these random bits gets."""
    shift = (16, 0, 8)[number % STREAMS]
    return (bits >> shift).bitwise_and_(0xFFFF) if shift else bits & 0xFFFF


def round_at_random(numbers: Tensor, halves: Tensor) -> Tensor:
    """Return float32 numbers as bfloat16, each one of its two neighbours by a random number from 0 to 65535.

    What bfloat16 can hold stays as it is. `numbers` is used up: the result is a view of its upper halves.
    """
    flat = numbers.view(-1)
    flat.view(torch.int32).add_(halves)
    return flat.view(torch.int16)[1::2].view(torch.bfloat16).view(numbers.shape)  # the numbers are little-endian


def with_remainder(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 numbers as the sum of two in bfloat16: the nearest, and what is left."""
    nearest = numbers.to(torch.bfloat16)
    return nearest, (numbers - nearest).to(torch.bfloat16)
