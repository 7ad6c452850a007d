"""One seed out of several numbers, so that a sample's random draws depend on (seed, epoch, index) and nothing else.

A generator that runs on from sample to sample would give other draws for another number of workers. The mixing is
SplitMix64's finaliser (Steele, Lea & Flood, "Fast Splittable Pseudorandom Number Generators", 2014), applied per
number.
"""

from __future__ import annotations

MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Return a 63-bit seed that changes unpredictably with each of the numbers and with their order."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state >> 1
