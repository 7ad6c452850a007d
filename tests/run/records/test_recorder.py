"""Records: whole lines, strict JSON, no step twice."""

from __future__ import annotations

import json
import math
import os
import resource
from pathlib import Path

import pytest

from mpt.errors import InputOutputError
from mpt.run.records.layout import create_run
from mpt.run.records.recorder import LineFile, Recorder, read_lines

pytestmark = pytest.mark.tier("fast")


def fill(run, steps) -> None:
    with Recorder(run) as recorder:
        for step in steps:
            recorder.write_metrics(step, {"losses": {"disc/real": step / 7}})
            if step % 5 == 0:
                recorder.write_evaluation(step, {"accuracy": step / 100})
                recorder.write_event(step, "skipped", {"phase": "disc"})


def test_lines_are_strict_json_with_non_finite_numbers_as_text(tmp_path) -> None:
    run = create_run(tmp_path, "demo")
    with Recorder(run) as recorder:
        recorder.write_metrics(
            1, {"losses": {"a": math.nan, "b": -math.inf}, "scales": (math.inf, 2.5)}
        )
    text = run.metrics_path.read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line["losses"] == {"a": "NaN", "b": "-Infinity"}
    assert line["scales"] == ["Infinity", 2.5]
    assert math.isnan(float(line["losses"]["a"]))
    assert (line["kind"], line["step"]) == ("train", 1)


def test_resume_after_a_checkpoint_duplicates_no_step(tmp_path) -> None:
    run = create_run(tmp_path, "demo")
    fill(run, range(1, 14))
    with run.metrics_path.open("a") as file:
        file.write('{"kind": "train", "step": 14, "los')
    with Recorder(run) as recorder:
        assert recorder.truncate_after(10) == 3
    fill(run, range(11, 21))
    train = [line["step"] for line in read_lines(run.metrics_path) if line["kind"] == "train"]
    assert train == list(range(1, 21))
    assert [line["step"] for line in read_lines(run.events_path)] == [5, 10, 15, 20]
    assert run.results_path.read_text() == "step,accuracy\n5,0.05\n10,0.1\n15,0.15\n20,0.2\n"


def test_a_lost_process_stays_an_event_of_the_run_that_goes_back(tmp_path) -> None:
    run = create_run(tmp_path, "demo")
    with Recorder(run) as recorder:
        for step, kind in ((5, "overflow"), (14, "rank_lost"), (14, "overflow")):
            recorder.write_event(step, kind, {})
        recorder.truncate_after(10)
    assert [line["kind"] for line in read_lines(run.events_path)] == ["overflow", "rank_lost"]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_half_written_last_line_is_tolerated_and_the_next_line_does_not_grow_onto_it(
    tmp_path, cut: int
) -> None:
    run = create_run(tmp_path, "demo")
    fill(run, [1, 2, 3])
    content = run.metrics_path.read_bytes()
    run.metrics_path.write_bytes(content[:-cut])
    assert [line["step"] for line in read_lines(run.metrics_path)] == [1, 2]
    fill(run, [3])
    assert [line["step"] for line in read_lines(run.metrics_path)] == [1, 2, 3]


def test_garbage_between_lines_is_passed_over(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n[1]\n\n' + b"[" * 100_000 + b'\n{"step": 2}\n{"step"')
    assert [line["step"] for line in read_lines(path)] == [1, 2]
    assert list(read_lines(tmp_path / "absent.jsonl")) == []


def test_a_line_that_does_not_fit_on_the_disk_leaves_no_half_behind(tmp_path) -> None:
    run = create_run(tmp_path, "demo")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Recorder(run) as recorder:
        recorder.write_metrics(1, {})
        size = run.metrics_path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
        try:
            with pytest.raises(InputOutputError) as caught:
                recorder.write_metrics(2, {"note": "x" * 100})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert caught.value.exit_code == 5
        assert run.metrics_path.stat().st_size == size
        recorder.write_metrics(2, {})
    assert [line["step"] for line in read_lines(run.metrics_path)] == [1, 2]


def test_a_new_metric_widens_the_results_table(tmp_path) -> None:
    run = create_run(tmp_path, "demo")
    with Recorder(run) as recorder:
        recorder.write_evaluation(1, {"a": 1.5})
        recorder.write_evaluation(2, {"b": 2.5, "a": math.nan})
    assert run.results_path.read_text() == "step,a,b\n1,1.5,\n2,nan,2.5\n"


def test_a_link_planted_at_the_metrics_file_is_refused(tmp_path) -> None:
    run = create_run(tmp_path, "demo")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    run.metrics_path.symlink_to(victim)
    with pytest.raises(InputOutputError, match="symbolic link"):
        Recorder(run)
    assert victim.read_text() == "precious"


def test_a_full_disk_while_lines_are_dropped_is_told_and_leaves_the_record_as_it_was(
    tmp_path, monkeypatch
) -> None:
    run = create_run(tmp_path, "demo")
    fill(run, range(1, 6))
    content = run.metrics_path.read_bytes()

    def full(path, data, *, durable=True):
        raise InputOutputError(f"{path} could not be written: the disk is full")

    def resume() -> None:
        with Recorder(run) as recorder:
            recorder.truncate_after(2)

    monkeypatch.setattr("mpt.run.records.recorder.write_atomically", full)
    with pytest.raises(InputOutputError, match="disk is full"):
        resume()
    assert run.metrics_path.read_bytes() == content


@pytest.mark.parametrize(
    "bad", ['{"kind":"evaluate","metrics":{"a":1}}', '{"kind":"evaluate","step":"x","metrics":{}}']
)
def test_an_evaluation_without_a_step_is_passed_over(tmp_path, bad: str) -> None:
    run = create_run(tmp_path, "demo")
    fill(run, [5])
    with run.metrics_path.open("a") as file:
        file.write(bad + "\n")
    with Recorder(run) as recorder:
        assert recorder.evaluations == [(5, {"accuracy": 0.05})]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_pipe_in_place_of_a_record_is_refused_and_not_waited_on(
    tmp_path: Path, name: str
) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputOutputError, match=rf"{name} could not be written: not a regular file"):
        LineFile(tmp_path / name)
    reader = os.open(tmp_path / name, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(InputOutputError, match="not a regular file"):
            LineFile(tmp_path / name)
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    "left", [b"", b"step,accuracy\n\0\0\0\0\0\0", None], ids=["empty", "zeros", "missing"]
)
def test_results_that_a_power_loss_left_empty_are_made_anew(
    tmp_path: Path, left: bytes | None
) -> None:
    run = create_run(tmp_path, "run")
    with Recorder(run) as recorder:
        recorder.write_evaluation(4, {"accuracy": 0.5})
    whole = run.results_path.read_bytes()
    run.results_path.unlink()
    if left is not None:
        run.results_path.write_bytes(left)
    with Recorder(run):
        assert run.results_path.read_bytes() == whole == b"step,accuracy\n4,0.5\n"
