"""The tables of `scripts/plans/recompute_table.py` on a page: those that are made again take their old places."""

from __future__ import annotations

import torch

from mpt.memory.recomputing.selective import Kept
from scripts.plans.memory_table import saved_bytes
from scripts.plans.recompute_table import END, START, replace_tables
from tests.engine import parts
from tests.memory import mechanism


def test_tables_that_are_not_made_again_stay_in_their_places() -> None:
    page = f"# Page\n\n{START}\n\n### One\n\n| a |\n\n### Two\n\n| b |\n\n{END}\n\nrest\n"
    assert replace_tables(page, []) == page
    made = replace_tables(page, ["### Two\n\n| c |", "### Three\n\n| d |"])
    assert made == page.replace("| b |", "| c |\n\n### Three\n\n| d |")


def test_bytes_kept_for_backward_are_counted_where_losses_are_computed_at_once() -> None:
    run, of_another_run = parts.classifier(), Kept(torch.zeros(8))
    assert (
        saved_bytes(run, parts.batch()) == mechanism.saved_bytes_of_losses(run, parts.batch()) > 0
    )
    del of_another_run
