"""Differences of two configurations as lines to read."""

import pytest

from mpt.config.differences import find_differences

pytestmark = pytest.mark.tier("fast")


def test_differences_are_dotted_and_in_the_order_of_the_new_one() -> None:
    before = {"a": 1, "b": {"c": None, "gone": [1]}, "same": {"x": 1.0}}
    now = {"b": {"new": {"deep": True}, "c": "word"}, "a": 2, "same": {"x": 1.0}}
    assert [str(difference) for difference in find_differences(before, now)] == [
        "b.new.deep absent -> true",
        "b.c null -> word",
        "a 1 -> 2",
        "b.gone [1] -> absent",
    ]


def test_a_section_that_became_a_scalar_is_told() -> None:
    assert [d.key for d in find_differences({"m": {"x": 1}}, {"m": True})] == ["m", "m.x"]
