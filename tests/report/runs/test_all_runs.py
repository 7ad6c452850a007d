"""The page over all runs of a folder."""

import json
import re
from typing import Any

import pytest

from mpt import cli
from mpt.commands.report import Command as ReportArguments
from mpt.commands.report import run
from mpt.errors import CheckpointError, ConfigError
from mpt.report.reading import read_run
from mpt.report.runs import run_overlay

pytestmark = pytest.mark.tier("fast")


def rows_of(page: str) -> dict[str, str]:
    """Return run -> its row's markup."""
    rows = re.findall(r"<tr data-model.*?</tr>", page, re.DOTALL)
    return {
        re.sub(r"<.*?>", "", re.search(r"<td>(.*?)</td>", row).group(1)).strip(): row
        for row in rows
    }  # type: ignore[union-attr]


def test_a_page_over_all_runs_shows_each_and_marks_the_best_of_its_kind(
    make_run: Any, tmp_path: Any
) -> None:
    make_run("worse", final=0.8)
    (make_run("better", final=0.9) / "report.html").write_text("")
    make_run("alone", metric="frechet_distance", higher_is_better=False)
    make_run("<b>stopped", finished=False, final=0.99)
    (tmp_path / "compare-x").mkdir()
    verdict = {"mode": "amp", "verdict": {"outcome": "within", "headline": "within the margin"}}
    (tmp_path / "compare-x" / "comparison.json").write_text(
        json.dumps({"metric": "accuracy", "modes": [verdict]})
    )
    run(ReportArguments(all=True, runs=str(tmp_path)))
    page = (tmp_path / "index.html").read_text()
    rows = rows_of(page)
    assert set(rows) == {"worse", "better", "alone", "&lt;b&gt;stopped"}
    assert [name for name, row in rows.items() if "number best" in row] == ["better"]
    assert '<a href="better/report.html">' in rows["better"]
    assert "href" not in rows["worse"]
    assert "unfinished" in rows["&lt;b&gt;stopped"]
    assert 'data-value="0.9"' in rows["better"]
    assert 'href="compare-x/comparison.html"' in page
    assert "amp: within the margin" in page
    assert "<b>stopped" not in page


def test_a_page_over_no_runs_or_over_one_is_refused(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match="holds no run yet"):
        run(ReportArguments(all=True, runs=str(tmp_path)))
    with pytest.raises(ConfigError, match="leave out mine"):
        run(ReportArguments(run="mine", all=True, runs=str(tmp_path)))
    with pytest.raises(SystemExit):
        cli.main(["report", "--help"])
    assert "--all" in capsys.readouterr().out


def test_a_table_of_runs_reads_the_ends_of_long_logs_alone(
    make_run: Any,
    tmp_path: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_run("long", final=0.9, steps=2000)
    make_run("other", final=0.8)
    make_run("stopped", finished=False)
    whole: list[str] = []
    read = read_run.read_lines
    monkeypatch.setattr(
        read_run,
        "read_lines",
        lambda path, *rest: whole.append(path.parent.name) or read(path, *rest),
    )
    assert cli_run("list", "runs", "--runs", str(tmp_path)) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert whole == ["stopped"]
    assert heading.split() == [
        "run",
        "trained",
        "steps",
        "model",
        "data",
        "precision",
        "result(*best)",
        "given",
    ]
    assert {line.split()[0] for line in lines if "*" in line} == {"long"}
    assert next(line for line in lines if line.startswith("stopped")).count("unfinished") == 1
    assert cli_run("list", "runs", "--runs", str(tmp_path), "--json") == 0
    told = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    record = read_run.read_run(tmp_path / "long")
    for name in (
        "final",
        "best",
        "steps",
        "peak_bytes",
        "step_seconds",
        "samples_per_second",
        "metric",
    ):
        assert told["long"][name] == getattr(record, name)


def test_runs_are_ranked_by_their_best_evaluation_and_both_figures_are_shown(
    make_run: Any, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, final, best in (("steady", 0.9, 0.9), ("fell", 0.8, 0.95)):
        path = make_run(name, final=final)
        summary = json.loads((path / "summary.json").read_text())
        (path / "summary.json").write_text(json.dumps({**summary, "best": best}))
    assert cli_run("list", "runs", "--runs", str(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("fell")).endswith(
        "accuracy 0.8 (best 0.95) *"
    )
    assert next(line for line in lines if line.startswith("steady")).endswith("accuracy 0.9")


def test_runs_of_one_name_are_told_apart_by_what_their_command_line_gave(
    make_run: Any, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "mpt",
        "train",
        "@digits",
        "optimizer.lr=0.02",
        "--with",
        "plan.yaml",
        "name=run",
        "--runs=x",
        "seed=1",
    ]
    (make_run("run") / "env.json").write_text(json.dumps({"command": words}))
    (make_run("run-2") / "env.json").unlink()
    for _ in range(2):  # the second time from the index
        assert cli_run("list", "runs", "--runs", str(tmp_path)) == 0
        lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
        assert lines["run"].endswith("  optimizer.lr=0.02 plan.yaml seed=1")
        assert lines["run-2"].endswith("accuracy 0.95 *")


def cli_run(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    return int(end.value.code or 0)


def test_curves_last_samples_groups_and_differing_settings_are_on_the_page(
    make_run: Any, tmp_path: Any
) -> None:
    for name, seed, mode in (("one", 0, "fp32"), ("two", 1, "fp32"), ("three", 0, "amp")):
        make_run(name, seed=seed, mode=mode, steps=100 if mode == "fp32" else 50)
    run(ReportArguments(all=True, runs=str(tmp_path)))
    page = (tmp_path / "index.html").read_text()
    text = re.search(
        r'<script type="application/json" id="overlay">(.*?)</script>', page, re.DOTALL
    )
    assert text is not None
    data = json.loads(text.group(1))
    assert data["one"]["group"] == data["two"]["group"] != data["three"]["group"]
    assert data["three"]["settings"] == {"precision.mode": "amp", "train.steps": "50"}
    assert data["three"]["told"] == "steps 50"
    assert data["one"]["told"] == "steps 100"
    steps, values = data["one"]["curves"]["accuracy"]
    assert (steps[-1], values[-1]) == (100, 0.95)
    assert len(data["one"]["curves"]["loss disc/real"][0]) <= run_overlay.MOST_POINTS + 1
    assert data["one"]["thumbnail"].startswith("data:image/jpeg;base64,")
    assert page.count("data-pick=") == 3


def test_a_run_is_told_by_settings_that_few_others_share_and_not_by_long_lists() -> None:
    usual = {
        "dataset.augment": str([{"RandomAffine": {"degrees": 10, "translate": [0.1, 0.1]}}]),
        "model.features": "24",
    }
    peers = [
        {**usual, "optimizer.name": name, "train.epochs": epochs}
        for name, epochs in (("adam", "2"), ("sgd", "5"))
    ]
    peers += [dict(peers[0]), {"dataset.augment": "[]", "model.features": "32"}]
    told = [run_overlay.tell(run_overlay.differing(one, peers), peers) for one in peers]
    assert told[1] == "optimizer sgd, epochs 5, augment [{'RandomAffine': {'degrees':…, features 24"
    assert told[0].startswith("optimizer adam, epochs 2, ")


def test_names_of_others_cannot_leave_the_page_s_data(make_run: Any, tmp_path: Any) -> None:
    path = make_run("run")
    line = {"step": 1, "kind": "evaluate", "metrics": {"</script><script>alert(1)//": 0.5}}
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    run(ReportArguments(all=True, runs=str(tmp_path)))
    assert "<script>alert(1)" not in (tmp_path / "index.html").read_text()


def test_a_run_whose_files_are_damaged_is_on_the_page_all_the_same(
    make_run: Any, tmp_path: Any
) -> None:
    path = make_run("damaged")
    (path / "config.yaml").write_text("{")
    (path / "metrics.jsonl").write_text('{"step": "x", "kind": "train", "losses": 3}\n[[[')
    for sample in (path / "samples").iterdir():
        sample.write_bytes(b"no picture")
    run(ReportArguments(all=True, runs=str(tmp_path)))
    assert "damaged" in rows_of((tmp_path / "index.html").read_text())
