"""The tables of `scripts/recompute_table.py` on a page: those that are made again take their old places."""

from __future__ import annotations

from scripts.recompute_table import END, START, replace_tables


def test_tables_that_are_not_made_again_stay_in_their_places() -> None:
    page = f"# Page\n\n{START}\n\n### One\n\n| a |\n\n### Two\n\n| b |\n\n{END}\n\nrest\n"
    assert replace_tables(page, []) == page
    made = replace_tables(page, ["### Two\n\n| c |", "### Three\n\n| d |"])
    assert made == page.replace("| b |", "| c |\n\n### Three\n\n| d |")
