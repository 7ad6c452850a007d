"""The collector is left as it was, and a command says nothing about leaks at its end."""

import gc
from pathlib import Path

import pytest

from mpt.run.process import collector
from tests.programs import run_mpt


@pytest.fixture(autouse=True)
def _as_before():
    before = gc.isenabled(), gc.get_threshold()
    yield
    assert (gc.isenabled(), gc.get_threshold()) == before


def test_a_training_collects_nothing_until_it_begins_and_then_as_usual() -> None:
    usual = gc.get_threshold()
    collector.pause()
    assert not gc.isenabled()
    collector.collect_as_usual()
    frozen = gc.get_freeze_count()
    assert (gc.isenabled(), gc.get_threshold(), frozen > 1000) == (True, usual, True)
    collector.end()
    assert gc.get_freeze_count() == 0


def test_other_commands_collect_rarely_and_programs_that_import_mpt_are_left_alone() -> None:
    collector.collect_rarely()
    collector.collect_as_usual()
    collector.end()
    collector.pause()
    collector.collect_rarely()
    assert (gc.isenabled(), gc.get_threshold()[0]) == (True, collector.RARELY[0])
    collector.end()


def test_a_training_ends_without_a_word_about_leaks(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        "model: {name: small_cnn, features: 4, image_size: 8}\ndataset: digits\ntrain: {steps: 1, device: cpu}\n"
    )
    done = run_mpt("train", config, "--runs", tmp_path, "--quiet", "--no-report", check=True)
    assert done.stdout + done.stderr == ""
