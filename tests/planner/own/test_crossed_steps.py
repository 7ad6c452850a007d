"""Every two of the things that scripts combine: networks, optimizers, precisions, tricks, losses and the rest.

What a plan on fake tensors of a CPU holds in each moment of two steps is what real tensors hold, to the byte. On a fake
GPU it is planned too, with the weights, gradients and states of the real one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch

from tests.planner.own.crossed_rules import IMPOSSIBLE, REFUSED, Rule, is_excluded
from tests.planner.own.crossed_steps import DIMENSIONS
from tests.planner.own.pairs import all_pairs, cover, pairs_of, touch

FOUND: tuple[dict[str, str], ...] = (
    {"loss": "squares", "trick": "accumulated"},
    {"loss": "probability"},
    {"loss": "absolute", "precision": "bfloat16"},
    {"network": "old_weight_norm", "precision": "bfloat16"},
    {"network": "old_weight_norm", "afterwards": "to_host_and_back"},
    {"network": "lstm", "precision": "bfloat16"},
    {"network": "lstm", "afterwards": "infer"},
    {"network": "lstm", "trick": "function_gradients"},
    {"network": "decoder", "afterwards": "infer", "precision": "autocast"},
    {"network": "translator", "trick": "distilled"},
    {"network": "cells", "precision": "autocast", "trick": "recomputed"},
    {"network": "cells", "precision": "island", "trick": "gradients_of_each"},
    {"network": "frozen", "trick": "frozen_in_turn"},
    {"network": "frozen", "optimizer": "of_two_kinds", "trick": "backward_twice"},
    {"network": "tied", "afterwards": "copy_all"},
    {"network": "tied", "afterwards": "save", "optimizer": "adam"},
    {"network": "looked_up", "afterwards": "note_norms"},
    {"network": "looked_up", "trick": "watched_for_anomalies"},
    {"optimizer": "lbfgs", "trick": "accumulated"},
    {"optimizer": "line_search", "network": "waves"},
    {"optimizer": "nadam", "afterwards": "save"},
    {"afterwards": "average"},
    {"afterwards": "follow", "trick": "sharpened"},
    {"afterwards": "copy_all"},
)
"""Values that were planned wrongly together once."""
RECURRENT = ("lstm", "gru", "cells", "long_cells")


def answers(combinations: Iterable[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return the differences of combinations, found by one process."""
    lines = "".join(f"{json.dumps(one)}\n" for one in combinations)
    done = subprocess.run(
        [sys.executable, "-m", "tests.planner.own.crossed"],
        input=lines, capture_output=True, text=True, check=False, timeout=1800,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == lines.count("\n"), done.stderr
    return found


def wrong(combinations: Iterable[Mapping[str, str]]) -> list[tuple[Any, Any]]:
    """Return the combinations with differences."""
    given = list(combinations)
    return [
        (one, answer)
        for one, answer in zip(given, answers(given), strict=True)
        if answer and not is_unmeasured(one, answer)
    ]


def is_unmeasured(combination: Mapping[str, str], answer: Mapping[str, Any]) -> bool:
    """Return whether oneDNN refuses a recurrent layer in half, without gradients, as soon as a mode watches it."""
    return combination.get("network") in RECURRENT and answer.keys() == {"unmeasured"}


def is_possible_here(combination: Mapping[str, str], answer: Mapping[str, Any]) -> bool:
    """Return whether this processor has an LSTM in half where others have none, and it is planned as it is."""
    in_half = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return in_half and combination.get("network") == "lstm" and not answer


def test_steps_in_which_everything_occurs_are_planned_as_they_are() -> None:
    some = list(touch(DIMENSIONS, is_excluded, FOUND))
    assert {pair for one in some for pair in one.items()} == {
        (name, value) for name, values in DIMENSIONS.items() for value in values
    }
    assert wrong(some) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_two_things_are_planned_as_they_are(part: int) -> None:
    whole = list(cover(DIMENSIONS, is_excluded))
    met = {pair for one in whole for pair in pairs_of(one)}
    assert {pair for pair in all_pairs(DIMENSIONS) if not is_excluded(dict(pair))} == met
    assert wrong(whole[part::8]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "answer"), [(IMPOSSIBLE, "raises"), (REFUSED, "gpu refused")], ids=["torch", "plan"]
)
def test_what_is_left_out_is_refused_with_its_reason(rules: tuple[Rule, ...], answer: str) -> None:
    given = [(each, rule.words) for rule in rules for each in rule.combinations()]
    found = answers(each for each, _ in given)
    missing = [
        (each, one)
        for (each, words), one in zip(given, found, strict=True)
        if re.search(words, one.get(answer, "")) is None and not is_possible_here(each, one)
    ]
    assert missing == []
