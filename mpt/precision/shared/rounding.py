"""Float32 numbers into half storage without losing small updates: rounding at random, or keeping the remainder.

Rounded to the nearest, an update below half an ulp (1/512 of its weight) is lost. Rounded up or down at random, in
proportion to the distance, it is kept on average; the random bits are a function of a key and the element's place, so
that they are the same on every device, in any order of work, and after a resume. Kept as a second bfloat16 number, the
remainder adds eight bits to the eight of the first; so does a code of eight bits in parts of the first number's
spacing, for float16 too.

Sources: Gupta et al., "Deep learning with limited numerical precision", 2015; Zamirai et al., "Revisiting BFloat16
training", 2020 (both ways, with the remainder as Kahan's compensation). Hash: Chris Wellons, "lowbias32", 2018;
multiplication: Dietzfelbinger et al., "A reliable randomized algorithm for the closest-pair problem", 1997.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

BLOCK = 2**21
"""Places that share a key; the table has a number for each place of a block."""


def make_key(*parts: int | str) -> int:
    """Return an odd number of 32 bits, signed, that is a function of the parts."""
    digest = hashlib.blake2s(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True) | 1


def make_table(count: int, device: torch.device) -> Tensor:
    """Return the numbers of the first places of every block: odd int32, as random as lowbias32 makes them."""
    assert count <= BLOCK
    bits = torch.arange(count, dtype=torch.int32, device=device)
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - (1 << 32))
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).bitwise_or_(1)


def random_halves(table: Tensor, key: Sequence[int | str], start: int, out: Tensor) -> None:
    """Fill int32 numbers whose upper halves are random: those of the places `start` and on.

    A place's number is multiplied by the key's, both odd; the upper half of the product is uniform over the keys. That
    is one pass over memory, whereas a hash of key and place would be a dozen.
    """
    done = 0
    while done < len(out):
        block, low = divmod(start + done, BLOCK)
        count = min(len(out) - done, BLOCK - low)
        torch.mul(table[low : low + count], make_key(*key, block), out=out[done : done + count])
        done += count


def round_at_random(numbers: Tensor, halves: Tensor) -> Tensor:
    """Return flat float32 numbers as bfloat16, each one of its two neighbours, by int32 numbers with random upper
    halves.

    Numbers that bfloat16 can hold stay as they are, and a NaN stays one: adding to CUDA's, 0x7FFFFFFF, would carry
    into the sign and leave -0. Both tensors are used up.
    """
    # The random halves are signed: from -32768 to 32767.
    bits = numbers.view(torch.int32)
    # which copies tensors that are strided or of another dtype element by element
    if bits.device.type == "cpu":
        is_nan = numbers.isnan() if has_nan(numbers) else None
        bits.add_(halves.bitwise_right_shift_(16)).add_(1 << 15).bitwise_and_(-1 << 16)
        rounded = numbers.to(torch.bfloat16)
        return rounded if is_nan is None else rounded.masked_fill_(is_nan, torch.nan)
    is_nan = numbers.isnan()
    bits.add_(halves.view(torch.int16)[1::2]).add_(1 << 15)  # tensors are little-endian
    return numbers.view(torch.int16)[1::2].view(torch.bfloat16).masked_fill_(is_nan, torch.nan)


def has_nan(numbers: Tensor) -> bool:
    """Return whether numbers on the CPU hold a NaN, which costs a tenth of finding them. Fakes hold none."""
    if not numbers.numel():
        return False
    largest = numbers.amax()
    return not isinstance(largest, FakeTensor) and bool(largest.isnan())


def with_remainder(numbers: Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Return float32 numbers as the nearest in a half dtype, and the rest in float32.

    That is to be rounded at random too: updates that are all alike are rounded alike to the nearest, and the error of
    up to half of 1/13 of an update of 1e-4 near 1 adds up instead of averaging out.
    """
    nearest = numbers.to(dtype)
    return nearest, numbers - nearest


def spacing(numbers: Tensor) -> Tensor:
    """Return the distance of each number of a half dtype to the next one of larger magnitude, in float32.

    That of bfloat16 below 2^-119 is returned as 2^-126.
    """
    bits = numbers.view(torch.int16).to(torch.int32)
    if numbers.dtype == torch.float16:
        exponents = bits.bitwise_right_shift_(10).bitwise_and_(31).clamp_(min=1).add_(102)
    else:
        exponents = bits.bitwise_right_shift_(7).bitwise_and_(255).sub_(7).clamp_(min=1)
    return exponents.bitwise_left_shift_(23).view(torch.float32)


def code_remainder(remainder: Tensor, nearest: Tensor, halves: Tensor) -> Tensor:
    """Return int8 codes of what rounding to half left, in units of 1/256 of the half number's spacing.

    They are rounded at random by int32 numbers with random upper halves. What is not finite has the code 0. `remainder`
    and `halves` are used up.
    """
    random = halves.bitwise_right_shift_(16).add_(1 << 15).float().mul_(1 / 65536)
    scaled = remainder.div_(spacing(nearest)).mul_(256).add_(random).floor_()
    return scaled.nan_to_num_(0.0, 0.0, 0.0).clamp_(-128, 127).to(torch.int8)


def coded_remainder(codes: Tensor, nearest: Tensor) -> Tensor:
    """Return the float32 numbers that int8 codes stand for."""
    return codes.float().mul_(spacing(nearest)).mul_(1 / 256)
