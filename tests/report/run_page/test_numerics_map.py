"""The heat map of what a precision loses."""

import pytest

from mpt.report.run_page.numerics_map import cell

pytestmark = pytest.mark.tier("fast")


def test_headroom_just_below_zero_is_no_minus_zero() -> None:
    assert [cell("forward_headroom_bits", bits).text for bits in (-0.3, 0.2, -1.4)] == [
        "0",
        "0",
        "-1",
    ]
