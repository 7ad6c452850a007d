"""Amounts of memory as people write and read them: `6GB`, `6GiB`, `6144MiB`, `6G`.

Cards are sold in "GB" and made of GiB: an "8GB" card holds 8 * 2^30 bytes. So `GB`, `G` and `GiB` mean the same here,
and `MB`, `M` and `MiB` too; a plain number of bytes is accepted when it is large enough to be meant as one.
"""

from __future__ import annotations

import re

from mpt.errors import ConfigError

UNITS = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
SMALLEST = 16 * 2**20
BYTE_UNITS = ("B", "KiB", "MiB", "GiB")


def parse_budget(text: str, option: str = "--vram") -> int:
    """Return the bytes that an option's words mean. Raises ConfigError with the allowed forms."""
    found = re.fullmatch(
        r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(?:([kmgt])(?:i?b)?|b)?\s*", text, re.IGNORECASE
    )
    allowed = "write a size such as 6GiB, 6GB or 6144MiB"
    if found is None:
        raise ConfigError(f"{option}: {text!r} is not an amount of memory; {allowed}")
    amount = int(float(found.group(1)) * (UNITS[found.group(2).lower()] if found.group(2) else 1))
    if amount < SMALLEST:
        raise ConfigError(
            f"{option}: {text!r} is {amount} bytes, less than any GPU has or desktop takes; {allowed}"
        )
    return amount


def format_bytes(value: float, step: int | None = None) -> str:
    """Return bytes as in "1.50 GiB", in the binary unit of this power of 1024, by default `byte_step`'s."""
    step = byte_step(value) if step is None else step
    return f"{value / 1024**step:.{max(step - 1, min(step, 1))}f} {BYTE_UNITS[step]}"


def byte_step(value: float) -> int:
    """Return which power of 1024 leaves one to four digits before the point, 3 at most."""
    return next((step for step in range(3) if abs(value) < 1024 ** (step + 1)), 3)


def describe_bytes(amount: float) -> str:
    """Return bytes for people: MiB below 10 GiB, else GiB."""
    mebibytes = amount / 2**20
    return f"{mebibytes:,.0f} MiB" if mebibytes < 10240 else f"{mebibytes / 1024:,.1f} GiB"
