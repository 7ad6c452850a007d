"""A device-side assert in words; the repeat itself is rehearsed in tests/cuda_rehearsal/test_mended_faults.py."""

from types import SimpleNamespace
from typing import Any

import pytest

from mpt.workflows.training import blocking_rerun

pytestmark = pytest.mark.tier("fast")


class Numbers:
    def name_of(self, index: int) -> str:
        return f"picture-{index}.png"


class Loader:
    dataset = Numbers()

    def indices(self, step: int) -> tuple[list[int], int]:
        return [10 * step, 10 * step + 1], 0


def explain(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, Any] | None, step: int
) -> tuple[str, list[Any]]:
    asked: list[Any] = []
    monkeypatch.setattr(
        blocking_rerun, "repeat", lambda training, samples: (asked.extend(samples), found)[1]
    )
    training: Any = SimpleNamespace(progress=SimpleNamespace(step=step), loader=Loader())
    return str(blocking_rerun.explain_assert(training)), asked


def test_the_batch_of_the_step_is_tried_and_then_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said, asked = explain(
        monkeypatch, {"sample": 21, "error": "Assertion `t < n_classes` failed"}, 3
    )
    assert asked == [(30, 0), (31, 0), (20, 0), (21, 0)]
    assert "It is picture-21.png: Assertion `t < n_classes` failed" in said


def test_an_assert_that_no_sample_repeats_leaves_the_line_to_blocking_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said, asked = explain(monkeypatch, None, 0)
    assert asked == [(0, 0), (1, 0)]
    assert "None of the 2 last samples" in said
    assert "CUDA_LAUNCH_BLOCKING=1" in said
