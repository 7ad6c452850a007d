"""Printed numbers carry the right unit at its edges."""

import math

import pytest

from mpt.report.units import (
    show_bytes,
    show_count,
    show_figure,
    show_ratio,
    show_seconds,
    show_spread,
)

pytestmark = pytest.mark.tier("fast")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 20, "3.0 MiB"),
        (6 << 30, "6.00 GiB"),
        (math.nan, "–"),
    ],
)
def test_bytes_are_binary(value, text):
    assert show_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5e-6, "5 µs"),
        (0.0123, "12.3 ms"),
        (0.5, "500 ms"),
        (61, "61.0 s"),
        (150, "2 min 30 s"),
        (7260, "2 h 01 min"),
    ],
)
def test_durations_keep_three_digits(value, text):
    assert show_seconds(value) == text


def test_a_ratio_of_seconds_can_be_checked_from_those_shown() -> None:
    """2.354 s and 0.339 s are 6.94 times; of "2.4 s" a reader would find 7.08."""
    assert show_seconds(2.354, 2) == "2.35 s"
    assert show_seconds(23.54, 2) == "23.5 s"
    assert show_seconds(0.339, 2) == "339 ms"


def test_figures_counts_and_ratios_are_short():
    assert show_figure(0.94321) == "0.9432"
    assert [show_figure(one) for one in (1e-7, 1.5e-4, -2.346e8)] == ["1e-7", "1.5e-4", "-2.35e8"]
    assert show_figure(12345.6) == "12346"
    assert (show_figure(math.nan), show_figure(math.inf)) == ("–", "∞")
    assert show_count(1234567).split() == ["1", "234", "567"]
    assert show_ratio(0.5) == "0.500×"
    assert show_ratio(123.4) == "123×"
    assert show_spread(0.95154, 0.00071) == "0.9515 ± 0.0007"
    assert show_spread(0.5, math.nan) == "0.5"


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        ([6 << 30, 3 << 30], ["6.00 GiB", "3.00 GiB"]),
        ([6 << 30, 100 << 20], ["6144.0 MiB", "100.0 MiB"]),
        ([2 << 30, 900 << 20], ["2.00 GiB", "0.88 GiB"]),
        ([3 << 20, 0], ["3.0 MiB", "0.0 MiB"]),
        ([math.nan, 3 << 20], ["–", "3.0 MiB"]),
        ([math.nan], ["–"]),
    ],
)
def test_all_bytes_of_a_table_are_in_one_unit(sizes: list[float], texts: list[str]) -> None:
    assert [show_bytes(size, iter(sizes)) for size in sizes] == texts
