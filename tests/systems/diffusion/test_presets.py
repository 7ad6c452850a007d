"""Presets by card are what the table of cards says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpt.config.load import load_config
from scripts.plans import diffusion_presets as script


def test_files_and_rows_are_what_the_table_says() -> None:
    texts = script.texts()
    assert {path for path, text in texts.items() if path.read_text("utf-8") != text} == set()
    assert len(texts) == 1 + 6 + 4, "the page, every size of Flux, and four of SDXL"


def test_a_preset_adds_to_the_memory_of_its_configuration() -> None:
    config = load_config("@flux_lora", patches=[Path("@flux_lora_8gb")])
    assert set(config.memory.tricks) == {"lora", "low_bit_base", "recompute", "stream_weights"}


def test_a_recipe_that_does_not_fit_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "usable_bytes", lambda gpu, size: 2**30)
    with pytest.raises(SystemExit, match="does not fit a card of"):
        script.texts()
