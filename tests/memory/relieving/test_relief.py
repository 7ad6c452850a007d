"""What tricks declare for the planner and the ladder, read from their files; a trick from outside is one of them."""

from __future__ import annotations

import pytest

from mpt.config.load import load_config
from mpt.memory.relieving.relief import environment, reliefs, splitter

pytestmark = pytest.mark.tier("fast")


CONFIG = {"model": "small_cnn", "dataset": "digits", "train": {"batch_size": 32}}


def test_the_installed_tricks_are_found_by_what_they_relieve_the_cheapest_first() -> None:
    assert [one.name for one in reliefs("activations")] == ["recompute", "offload_activations"]
    assert [one.name for one in reliefs("gradients")] == ["optimizer_in_backward"]
    assert [one.name for one in reliefs("optimizer", "gradients")] == [
        "optimizer_in_backward",
        "cpu_optimizer",
        "low_bit_optimizer",
    ]
    assert splitter() == "micro_batch"
    assert reliefs("activations")[0].proposals == ("sqrt", "selective", "all")


def test_the_allocators_variables_come_from_the_chosen_tricks() -> None:
    chosen = load_config({**CONFIG, "memory": {"expandable_segments": True}}).memory.plugins
    assert environment(chosen) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert environment(load_config(CONFIG).memory.plugins) == {}
