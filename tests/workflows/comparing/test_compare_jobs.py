"""How many runs of a comparison go on at a time, and with which devices."""

from pathlib import Path
from typing import Any

import pytest

from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.run.process.launch import SIDE_BY_SIDE
from mpt.workflows.comparing import compare_jobs
from mpt.workflows.comparing.compare_jobs import CARDS, busy_cores, choose_jobs, visible_cards


def config(**train: Any) -> Config:
    return load_config(
        {
            "model": "small_cnn",
            "dataset": "digits",
            "train": {"threads": 1, "device": "cpu", **train},
        }
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Eight cores of which none is busy, and no card."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(compare_jobs, "usable_cores", lambda: 8)
    monkeypatch.setattr(compare_jobs.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(compare_jobs, "busy_cores", lambda: 0.0)
    monkeypatch.setattr(compare_jobs, "visible_cards", lambda: ())
    return monkeypatch


@pytest.mark.parametrize(
    ("train", "busy", "expected", "said"),
    [
        ({}, 0.0, 8, "8 cores, 1 for each run"),
        ({"threads": 3}, 0.0, 2, "8 cores, 3 for each run"),
        ({"threads": None}, 0.0, 1, "8 cores, 8 for each run"),
        ({}, 5.2, 3, "keep 5.2 busy; --jobs says otherwise"),
        ({}, 40.0, 1, "keep 40.0 busy"),
        ({"device": "auto"}, 0.0, 8, "8 cores"),
        ({"device": "cuda:1"}, 0.0, 1, "train.device is cuda:1"),
        ({"device": "mps"}, 0.0, 1, "train.device is mps"),
    ],
)
def test_there_are_as_many_as_cores_are_free(
    machine: pytest.MonkeyPatch, train: dict[str, Any], busy: float, expected: int, said: str
) -> None:
    machine.setattr(compare_jobs, "busy_cores", lambda: busy)
    jobs = choose_jobs(
        [config(), config(**train)] if train.get("device") is None else [config(**train)], 3
    )
    assert jobs.count == expected
    assert said in jobs.describe(2)
    assert jobs.times_alone == (expected > 1)


def test_runs_do_not_share_an_intel_gpu(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(compare_jobs, "version", lambda package: "2.13.0+xpu")
    assert (
        choose_jobs([config(device="auto")], 3).describe(2)
        == "one run at a time (runs would share an Intel GPU)"
    )
    assert choose_jobs([config(device="auto")], 3, 2).count == 2
    assert choose_jobs([config(device="cpu")], 3).count == 8


def test_what_is_asked_for_is_what_is_done(machine: pytest.MonkeyPatch) -> None:
    assert choose_jobs([config(threads=8)], 3, 5).count == 5
    assert choose_jobs([config()], 3, 1).count == 1
    assert choose_jobs([config()], 1).count == 1, "with one seed every run is timed"


def test_the_first_seed_is_timed_alone_and_the_others_say_that_they_were_not(
    machine: pytest.MonkeyPatch,
) -> None:
    jobs = choose_jobs([config()], 3, 2)
    assert jobs.environment(1, beside=False) == {}
    assert jobs.environment(1, beside=True) == {SIDE_BY_SIDE: "2"}
    assert jobs.turns(9, 3) == 6
    assert "before them the 3 of the first seed one by one" in jobs.describe(3)


def test_each_run_has_a_card_of_its_own_and_all_are_timed(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(compare_jobs, "visible_cards", lambda: ("3", "5", "GPU-8a"))
    jobs = choose_jobs([config(device="auto")], 3)
    assert jobs.count == 3
    assert not jobs.times_alone
    assert [jobs.environment(slot, beside=True) for slot in range(3)] == [
        {CARDS: card} for card in ("3", "5", "GPU-8a")
    ]
    shared = choose_jobs([config(device="cuda")], 3, 4)
    assert shared.times_alone, "two of four share a card"
    assert shared.environment(3, beside=True) == {CARDS: "3", SIDE_BY_SIDE: "4"}
    machine.setattr(compare_jobs, "visible_cards", lambda: ("0",))
    assert choose_jobs([config(device="cuda")], 3).count == 1
    assert choose_jobs([config(device="auto"), config(device="cpu")], 3).count == 1


def test_cards_are_those_that_torch_counts_and_the_environment_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compare_jobs, "COUNT", "print(2)")
    monkeypatch.setenv(CARDS, "GPU-1, GPU-2,GPU-3")
    assert visible_cards() == ("GPU-1", "GPU-2")
    monkeypatch.delenv(CARDS)
    monkeypatch.setattr(compare_jobs, "devices", lambda pattern: [Path("/dev/nvidia0")])
    assert visible_cards() == ("0", "1")
    monkeypatch.setattr(compare_jobs, "devices", lambda pattern: [])
    monkeypatch.setattr(compare_jobs, "COUNT", "raise SystemExit(1)")
    assert visible_cards() == ()


def test_programs_that_give_way_are_not_counted_as_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "stat"
    ticks = iter([(100, 0, 10), (130, 999, 20)])

    class Counting(type(file)):  # type: ignore[misc]
        def read_text(self, *arguments: Any) -> str:
            return "cpu  {} {} {} 7 7\ncpu0 1 1 1\n".format(*next(ticks))

    monkeypatch.setattr(compare_jobs.os, "sysconf", lambda name: 100)
    assert busy_cores(0.1, Counting(file)) == pytest.approx(4.0)
    assert busy_cores(0.0, tmp_path / "absent") == 0.0
