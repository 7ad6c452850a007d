"""Answers about batch sizes of timm's benchmark are asked and counted as its tables have them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.plans import check_timm_fits as script
from scripts.plans.check_timm_times import Row

MIB = 2**20
RAN = script.Answer(
    "a", "contiguous", 224, 384, ran=True, allocated=20000 * MIB, reserved=21000 * MIB,
    kinds=("fits", "may fit"), chances=(0.97, 0.5),
)  # fmt: skip
FAILED = replace(
    RAN, batch=512, ran=False, allocated=23000 * MIB, kinds=("does not fit", "fits"),
    chances=(0.02, 1.0), largest_tensor=2**31,
)  # fmt: skip


def row(batch: int) -> Row:
    return Row("a", 100.0, batch, 224, channels_last=False)


def test_a_row_says_that_its_batch_ran_and_the_next_larger_did_not() -> None:
    assert [*script.series()][:5] == [512, 384, 256, 192, 128]
    assert [*script.series()][-6:] == [8, 6, 4, 3, 2, 1]
    assert [*script.questions(row(192))] == [(192, True), (256, False)]
    assert [*script.questions(row(512))] == [(512, True)]


def test_verdicts_and_chances_are_counted_and_wrong_ones_listed() -> None:
    text = script.report([RAN, FAILED, replace(RAN, batch=1, error="no tensor, at line 3")])
    first, second = re.split(r"^## With a context", text, flags=re.M)[1:]
    assert "| fits | 1 | 1 | 1 | 0 | 100.0% |" in first
    assert "| does not fit | 1 | 1 | 0 | 1 | 100.0% |" in first
    assert "| 0% to 5% | 1 | 0 | 0.0% |" in first
    assert "| 95% to 100% | 1 | 1 | 100.0% |" in first
    assert "Wrong answers: none." in first
    assert "| fits | 1 | 1 | 0 | 1 | 0.0% |" in second
    assert "| a, contiguous | 512 | did not | fits | 100% | 23,450 | 21,450 |" in second
    assert "- 1 questions: no tensor" in text
    assert text.endswith("in float16: a, contiguous (512).")


def test_answers_that_are_there_are_not_planned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def answer(row: Row, batch: int, ran: bool) -> script.Answer:
        asked.append(batch)
        return replace(RAN, batch=batch, ran=ran)

    monkeypatch.setattr(script, "answer", answer)
    script.plan_rows([row(384)], tmp_path / "rows")
    script.plan_rows([row(384), row(256)], tmp_path / "rows")
    assert asked == [384, 512, 256]
    assert [one.batch for one in script.load(tmp_path / "rows")] == asked


def test_a_layout_in_which_a_model_reached_less_is_counted() -> None:
    last = [replace(row(384), channels_last=True), replace(row(96), model="b", channels_last=True)]
    rows = [row(256), replace(row(128), model="b"), replace(row(64), model="c"), *last]
    assert script.smaller_in(rows) == {"contiguous": 1, "channels_last": 1}
    assert "1 questions. Verdict and chance" in script.page([RAN], rows, "0")
