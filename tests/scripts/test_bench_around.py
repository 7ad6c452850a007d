"""The benchmark of what lies around a step: its sides take turns and its rows run."""

from __future__ import annotations

import argparse

import pytest

from scripts.speed import bench_around


def test_sides_take_turns_and_a_ratio_is_that_of_a_round() -> None:
    turns: list[str] = []
    row = bench_around.Row(
        "nothing", lambda: turns.append("ours"), lambda: turns.append("usual"), "nothing either"
    )
    line = bench_around.measure(row, 2)
    assert (turns.count("ours"), turns.count("usual")) == (3, 3)
    assert all({turns[n], turns[n + 1]} == {"ours", "usual"} for n in range(0, len(turns), 2))
    assert line.startswith("| nothing | ")
    assert line.endswith(" | nothing either |")


@pytest.mark.parametrize("key", ["checkpoint", "evaluation"])
def test_both_sides_of_a_row_run(tmp_path, key: str) -> None:
    for row in bench_around.ROWS[key](tmp_path, argparse.Namespace(megabytes=1)):
        row.ours()
        row.afterwards()
        row.usual()
