"""A run is read whatever state it is in: complete, cut off, damaged or hostile."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpt.errors import DataError
from mpt.report.reading.log_values import curves, number
from mpt.report.reading.read_run import MOST_LINES, read_run

pytestmark = pytest.mark.tier("fast")


def test_a_finished_run_is_read_from_its_files(make_run):
    record = read_run(make_run(mode="amp", seed=3, final=0.9, peak_bytes=1 << 20))
    assert (record.model, record.dataset, record.mode, record.dtype) == (
        "dcgan",
        "shapes",
        "amp",
        "bfloat16",
    )
    assert (record.seed, record.steps, record.final, record.peak_bytes) == (3, 100, 0.9, 1 << 20)
    assert record.is_finished
    assert record.problems == []
    assert len(record.samples) == 10


def test_without_a_summary_the_logs_speak(make_run):
    record = read_run(make_run(finished=False, final=0.9, step_seconds=0.02))
    assert not record.is_finished
    assert (record.final, record.steps, record.mode) == (0.9, 99, "amp")
    assert record.best >= 0.9
    assert record.step_seconds == pytest.approx(0.02, rel=0.1)
    assert record.peak_bytes == 50 << 20


def test_a_killed_run_s_metric_and_its_direction_are_those_that_its_evaluations_say(make_run):
    path = make_run(final=40.0, metric="negative_elbo", finished=False)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    told = {"metric": "loss", "higher_is_better": False}
    (path / "metrics.jsonl").write_text(
        "".join(json.dumps({**line, **told}) + "\n" for line in lines)
    )
    record = read_run(path)
    assert (record.metric, record.higher_is_better) == ("loss", False)
    losses = [line["metrics"]["loss"] for line in lines if line["kind"] == "evaluate"]
    assert (record.final, record.best) == (losses[-1], min(losses))
    # logs of earlier versions: the first figure, and higher is better
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert (read_run(path).metric, read_run(path).higher_is_better) == ("negative_elbo", True)


def test_an_interrupted_run_s_summary_does_not_make_it_finished(make_run):
    path = make_run()
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(
        json.dumps({**summary, "steps": 100, "total_steps": 200, "final": None})
    )
    record = read_run(path)
    assert not record.is_finished
    assert math.isnan(record.final)


def test_of_two_resumes_from_one_step_the_last_is_what_held(make_run):
    path = make_run()
    changes = [(3, "changed: a 1 -> 2"), (3, "changed: a 1 -> 3"), (5, "changed: b 1 -> 2")]
    lines = [
        json.dumps({"kind": "settings", "step": step, "message": message})
        for step, message in changes
    ]
    (path / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert read_run(path).settings_changes == [(3, "changed: a 1 -> 3"), (5, "changed: b 1 -> 2")]


def test_a_gpu_s_step_is_timed_over_windows_that_end_in_a_synchronisation(make_run):
    path = make_run(step_seconds=0.02)
    text = (
        (path / "summary.json")
        .read_text()
        .replace("tracked", "cuda")
        .replace('"median_step_seconds": 0.02', '"median_step_seconds": 1e-5')
    )
    (path / "summary.json").write_text(text)
    assert read_run(path).step_seconds == pytest.approx(0.02, rel=0.1)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="not a run directory"):
        read_run(tmp_path)
    with pytest.raises(DataError, match="no such"):
        read_run(tmp_path / "absent")


def test_a_line_cut_off_by_a_crash_costs_that_line_only(make_run):
    path = make_run()
    whole = len(read_run(path).train)
    text = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(text + '{"step": 101, "kind": "tr')
    record = read_run(path)
    assert len(record.train) == whole
    assert any("1 line could not be read" in problem for problem in record.problems)


def test_steps_done_twice_count_once_and_the_later_line_wins(make_run):
    path = make_run(steps=4)
    with (path / "metrics.jsonl").open("a") as file:
        for step in (2, 3):
            file.write(
                json.dumps({"step": step, "kind": "train", "losses": {"disc/real": 9.0}}) + "\n"
            )
    steps, values = curves(read_run(path).train, "losses")["disc/real"]
    assert steps == [0, 1, 2, 3]
    assert values[2:] == [9.0, 9.0]


@pytest.mark.parametrize("name", ["config.yaml", "env.json", "events.jsonl"])
def test_a_missing_file_is_reported_and_the_rest_is_read(make_run, name):
    path = make_run()
    (path / name).unlink()
    record = read_run(path)
    assert record.final == 0.95
    assert any(name in problem for problem in record.problems)


def test_aliases_that_would_unfold_without_end_are_not_interpreted(make_run):
    path = make_run()
    bomb = "a0: &a0 {x: 1}\n" + "".join(
        f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40)
    )
    (path / "config.yaml").write_text(bomb)
    record = read_run(path)
    assert record.config == {}
    assert any("config.yaml" in problem for problem in record.problems)


@pytest.mark.parametrize(
    "text", ["{", "- 1", "\x00", "[" * 5000, "a: !!python/object/apply:os.system [true]"]
)
def test_a_config_that_is_none_is_no_crash(make_run, text):
    path = make_run()
    (path / "config.yaml").write_text(text)
    assert read_run(path).config == {}


def test_numbers_are_read_in_every_form_that_logs_use():
    assert number("0.5") == 0.5
    assert math.isnan(number("NaN"))
    assert math.isnan(number(None))
    assert math.isinf(number(float("inf")))
    assert math.isnan(number(True))
    assert math.isnan(number("abc"))
    assert number({}, 7.0) == 7.0


def write_log(path: Path, steps: int) -> None:
    """Write a log with a line per step and an evaluation every 1,000 steps, as a run does."""
    with path.open("w") as file:
        for step in range(1, steps + 1):
            file.write(
                f'{{"kind":"train","step":{step},"time":1,"losses":{{"net/loss":{step / steps}}},"skipped":{{}}}}\n'
            )
            if step % 1000 == 0:
                file.write(
                    f'{{"kind":"evaluate","step":{step},"time":1,"metrics":{{"accuracy":{step / steps}}}}}\n'
                )


def test_of_a_long_log_all_evaluations_and_evenly_chosen_steps_are_read(make_run):
    path = make_run()
    (path / "summary.json").unlink()
    write_log(path / "metrics.jsonl", 25_001)
    record = read_run(path)
    steps = [line["step"] for line in record.train]
    assert MOST_LINES / 2 <= len(steps) <= MOST_LINES + 1
    assert max(b - a for a, b in itertools.pairwise(steps)) == 4
    assert (steps[0], steps[-1], record.steps) == (1, 25_001, 25_001)
    assert [line["step"] for line in record.evaluations] == list(range(1000, 25_001, 1000))
    assert not record.problems


def test_a_pipe_in_place_of_a_file_is_not_waited_on(make_run):
    path = make_run()
    for name in ("config.yaml", "metrics.jsonl", "env.json", "summary.json"):
        (path / name).unlink()
        os.mkfifo(path / name)
    (path / "events.jsonl").write_text("")
    (path / "config-until-00000001.yaml").write_text("")
    with pytest.raises(DataError):
        read_run(path)
    (path / "metrics.jsonl").unlink()
    (path / "metrics.jsonl").write_text("")
    record = read_run(path)
    assert any(
        "config.yaml could not be read: not a regular file" in problem
        for problem in record.problems
    )


@pytest.mark.tier("full")
@pytest.mark.slow
def test_a_report_of_200_000_lines_is_made_in_flat_memory(make_run):
    path = make_run()
    write_log(path / "metrics.jsonl", 200_000)
    program = (
        "import sys\nfrom pathlib import Path\nfrom mpt.report.run_page.page import write_report\n"
        "write_report(Path(sys.argv[1]))\nprint(Path('/proc/self/status').read_text())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    # of this program alone: what getrusage tells begins with the memory of the process that started it
    peak = re.search(r"VmHWM:\s*(\d+) kB", done.stdout)
    assert peak is not None
    assert int(peak[1]) // 1024 < 150
