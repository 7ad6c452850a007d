"""Numbers as people read them. Bytes and seconds stay plain numbers until they are printed here."""

from __future__ import annotations

import math
from collections.abc import Iterable

from mpt.config.sizes import byte_step, format_bytes


def show_bytes(value: float, among: Iterable[float] | None = None) -> str:
    """Write bytes in the binary unit that leaves one to four digits before the point.

    `among` are all values of a table, which are then in one unit: that of the largest, or the next smaller one if
    some value is under a tenth of it.
    """
    if not math.isfinite(value):
        return "–"
    step = byte_step(value)
    sizes = [abs(size) for size in among or () if math.isfinite(size) and size != 0]
    if sizes:
        step = byte_step(max(sizes))
        if step > 0 and min(sizes) < 0.1 * 1024**step:
            step -= 1
    return format_bytes(value, step)


def show_seconds(value: float, decimals: int = 1) -> str:
    """Write a duration: microseconds to days. `decimals` are those of seconds under ten."""
    if not math.isfinite(value):
        return "–"
    if abs(value) < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if abs(value) < 1:
        return f"{value * 1e3:.3g} ms" if abs(value) < 0.1 else f"{value * 1e3:.0f} ms"
    if abs(value) < 120:
        return f"{value:.{decimals if abs(value) < 10 else 1}f} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def show_count(value: float) -> str:
    """Write a count with thousands set apart."""
    return (
        f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}") if math.isfinite(value) else "–"
    )


def counted(number: float, what: str) -> str:
    """Return a number of things, in the plural unless it is one."""
    written = str(number) if isinstance(number, int) else f"{number:.3g}"
    return f"{written} {what}" if written == "1" else f"{written} {what}s"


def show_figure(value: float) -> str:
    """Write a metric, a loss or a rate with about four digits."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def show_ratio(value: float) -> str:
    """Write a ratio to the baseline."""
    if not math.isfinite(value):
        return "–"
    return (
        f"{value:.3f}\N{MULTIPLICATION SIGN}"
        if abs(value) < 10
        else f"{value:.3g}\N{MULTIPLICATION SIGN}"
    )


def show_spread(mean: float, deviation: float) -> str:
    """Write a mean and its standard deviation to the same decimal place."""
    shown = show_figure(mean)
    if not math.isfinite(deviation):
        return shown
    if "e" in shown or not math.isfinite(mean):
        return f"{shown} ± {show_figure(deviation)}"
    decimals = len(shown.partition(".")[2])
    return f"{mean:.{max(decimals, 2)}f} ± {deviation:.{max(decimals, 2)}f}"
