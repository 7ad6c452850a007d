"""The report is complete, valid, and safe to open whatever the run was called."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from mpt.errors import DataError, InputOutputError
from mpt.report.reading.read_run import read_run
from mpt.report.run_page.figures import write_figures
from mpt.report.run_page.page import describe_run, rank_figures, write_report
from mpt.report.run_page.pictures import MOST_SAMPLES

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Reader(HTMLParser):
    """Collects tags, attributes and text, and whether the tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read_page(path):
    reader = Reader()
    reader.feed((path / "report.html").read_text())
    assert reader.open == []
    return reader


def test_the_page_is_whole_and_says_what_the_run_was(make_run):
    path = make_run(reason="because this card has tensor cores")
    write_report(path)
    page = read_page(path)
    for word in (
        "because this card has tensor cores",
        "dcgan",
        "bfloat16",
        "overflow",
        "optimizer state",
        "batch_size: 32",
    ):
        assert word in page.text
    assert sum(tag == "svg" for tag, _ in page.tags) == 6
    assert sum(tag == "img" for tag, _ in page.tags) == MOST_SAMPLES


def test_events_and_environment_are_told_without_what_machines_need(make_run):
    path = make_run()
    events = [
        {
            "step": 3,
            "kind": "scale",
            "phase": "gen",
            "message": "gen: loss scale 8 -> 4",
            "scale": 4.0,
        },
        {"step": 3, "kind": "overflow", "phase": "gen", "message": "skipped", "scale": 8388608.0},
        {"step": 5, "kind": "resume", "message": "resumed", "notes": []},
        {"step": 5, "kind": "settings", "message": "changed: optimizer.lr 0.1 -> 0.2"},
    ]
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    environment = {"torch": "2.13.0", "threads": 1, "command": ["mpt", "train", "my config.yaml"]}
    resumed = {**environment, "threads": 2, "command": ["mpt", "train", "c.yaml", "--resume"]}
    (path / "env.json").write_text(json.dumps({**environment, "resumes": [resumed]}))
    content = describe_run(read_run(path))
    assert [message for *_, message in content["events"]] == [
        "gen: loss scale 8 -> 4",
        "skipped; scale 8388608",
        "resumed",
        "changed: optimizer.lr 0.1 -> 0.2",
    ]
    assert content["environment"] == [
        ("torch", "2.13.0"),
        ("threads", "1"),
        ("command", "mpt train 'my config.yaml'"),
        ("resume 1, command", "mpt train c.yaml --resume"),
        ("resume 1, changed", "threads 1 -> 2"),
    ]
    write_report(path)
    said = "A resume at step 5 changed: optimizer.lr 0.1 -&gt; 0.2."
    assert said in (path / "report.html").read_text()
    assert said.replace("&gt;", "\\>") in (path / "report.md").read_text()


def test_the_page_asks_the_network_for_nothing_and_runs_our_script_alone(make_run):
    path = make_run()
    write_report(path)
    page = read_page(path)
    (script,) = re.findall(r"<script>(.*?)</script>", (path / "report.html").read_text(), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policies = [attributes.get("content") or "" for tag, attributes in page.tags if tag == "meta"]
    assert any(
        f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
        for policy in policies
    )
    assert not {"fetch(", "XMLHttpRequest", "innerHTML", "eval("} & {
        word for word in script.split() if "(" in word
    }
    for tag, attributes in page.tags:
        assert tag not in {"iframe", "object", "embed", "link", "base", "form"}
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in {"src", "href", "xlink:href", "data"}:
                assert (value or "").startswith(("data:image/png;base64,", "#", "samples/step-")), (
                    tag,
                    name,
                    value,
                )
    assert "@import" not in (path / "report.html").read_text()


def test_markup_in_a_run_s_name_and_files_is_shown_and_not_obeyed(make_run):
    path = make_run(name="<img src=x onerror=alert(1)>", reason="<script>alert(2)</script>")
    (path / "events.jsonl").write_text(
        json.dumps({"step": 1, "kind": "<b>", "message": "</table><script>3</script>"})
    )
    (path / "env.json").write_text(json.dumps({"<i>": "</main>"}))
    write_report(path)
    page = read_page(path)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not {"b>", "i"} & {tag for tag, _ in page.tags}
    assert all(attributes.get("src") != "x" for _, attributes in page.tags)
    assert "<img src=x onerror=alert(1)>" in page.text
    assert "<script" not in (path / "report.md").read_text().replace("\\<script", "")


def test_pipes_and_newlines_do_not_break_the_markdown_tables(make_run):
    path = make_run()
    (path / "events.jsonl").write_text(
        json.dumps({"step": 1, "kind": "warning", "message": "a | b\n# c"})
    )
    write_report(path)
    row = next(line for line in (path / "report.md").read_text().splitlines() if "warning" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 5
    assert "# c" in row


def test_json_holds_no_nan_and_the_numbers_of_the_run(make_run):
    path = make_run(final=float("nan"))
    write_report(path)

    def refuse(constant):
        raise AssertionError(constant)

    content = json.loads((path / "report.json").read_text(), parse_constant=refuse)
    assert content["final"] is None
    assert content["precision"]["mode"] == "amp"
    assert content["curves"]["losses"]["disc/real"]["step"][0] == 0


def test_the_page_of_a_run_that_failed_says_why_above_its_curves_until_it_goes_on(make_run):
    path = make_run(finished=False)
    why = "the loss of gen is not finite at step 3; first at gen.head"
    events = [{"kind": "stopped", "step": 3, "message": why}]
    (path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    write_report(path)
    assert f"It ended with: {why}." in read_page(path).text.partition("Losses")[0]
    events += [{"kind": "resume", "step": 2, "message": "resumed at step 2"}]
    (path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    write_report(path)
    assert "It ended with" not in read_page(path).text


def test_a_run_cut_off_in_its_middle_still_gets_its_report(make_run):
    path = make_run(finished=False)
    for name in ("env.json", "events.jsonl", "config.yaml"):
        (path / name).unlink()
    (path / "samples" / "step-00000000.png").write_bytes(b"not an image")
    write_report(path)
    page = read_page(path)
    assert "has not reached its end" in page.text
    assert "env.json is missing" in page.text
    assert "could not be read" in page.text


def test_a_run_with_a_config_alone_gets_a_report(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {name: dcgan}\n")
    write_report(tmp_path)
    assert "dcgan" in read_page(tmp_path).text


def test_the_reports_are_the_same_when_made_again(make_run):
    path = make_run()
    write_report(path)
    before = [(path / f"report.{kind}").read_bytes() for kind in ("html", "md", "json")]
    write_report(path)
    assert before == [(path / f"report.{kind}").read_bytes() for kind in ("html", "md", "json")]


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(DataError):
        write_report(tmp_path)


def test_a_report_that_cannot_be_written_says_so(make_run):
    path = make_run()
    (path / "report.md").mkdir()
    before = set(path.iterdir())
    with pytest.raises(InputOutputError, match=r"report\.md"):
        write_report(path)
    assert set(path.iterdir()) == before


def test_a_file_in_place_of_the_folder_of_figures_is_named_as_that(make_run, tmp_path):
    (tmp_path / "mine.yaml").touch()
    with pytest.raises(InputOutputError, match=r"mine\.yaml .*: a file stands where a directory"):
        write_figures(make_run(), tmp_path / "mine.yaml")


def test_each_process_of_a_training_is_shown_and_of_many_the_extremes():
    few = dict(rank_figures({"count": 2, "step_seconds": [0.5, 1.0], "peak_bytes": [2**30, 2**31]}))
    assert few["processes"] == "2"
    assert few["step of each process, without waiting"].count(",") == 1
    assert "1.00 GiB" in few["peak memory of each process"]
    many = dict(
        rank_figures({"count": 16, "step_seconds": [0.5] * 15 + [1.0], "peak_bytes": [0] * 16})
    )
    assert " to " in many["step of each process, without waiting"]
    assert "peak memory of each process" not in many
    assert rank_figures({}) == []


@pytest.mark.parametrize("change", ["gone on", "to go on", "no total"])
def test_a_run_that_goes_on_past_its_summary_has_a_report_that_says_so(make_run, change):
    path = make_run()
    if change == "gone on":
        with (path / "metrics.jsonl").open("a") as file:
            file.write('{"kind":"train","step":150,"time":1,"losses":{"net/loss":0.5}}\n')
    elif change == "to go on":
        config = path / "config.yaml"
        config.write_text(
            config.read_text() + "\ntrain: {steps: 200}\n"
            if "train:" not in config.read_text()
            else re.sub(r"steps: \d+", "steps: 200", config.read_text())
        )
    else:
        summary = json.loads((path / "summary.json").read_text())
        summary.pop("total_steps", None)
        (path / "summary.json").write_text(json.dumps({**summary, "steps": 50}))
    write_report(path)
    page, report = (
        (path / "report.html").read_text(),
        json.loads((path / "report.json").read_text()),
    )
    assert report["finished"] is False
    assert "has not reached its end" in page
    assert ("is at step 150" in page) == (change == "gone on")


def test_the_page_of_an_interrupted_run_names_the_step_at_which_it_stopped(make_run):
    path = make_run()
    summary, config = path / "summary.json", path / "config.yaml"
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "total_steps": 200}))
    config.write_text(config.read_text().replace("steps: 100", "steps: 200"))
    write_report(path)
    assert "it stopped at step 100 of 200." in read_page(path).text


def test_device_utilisation_is_a_figure_and_a_curve_or_not_measured(make_run):
    path = make_run()
    summary, log = json.loads((path / "summary.json").read_text()), path / "metrics.jsonl"
    figures = dict(describe_run(read_run(path))["figures"])
    assert figures["device utilisation"] == "not measured"

    summary["peak_memory"]["kind"] = "cuda"
    summary["device_utilization"] = {"not_measured": "nvidia-ml-py is not installed"}
    (path / "summary.json").write_text(json.dumps(summary))
    figures = dict(describe_run(read_run(path))["figures"])
    assert figures["device utilisation"] == "not measured: nvidia-ml-py is not installed"

    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in [line for line in lines if line["kind"] == "train"][:3]:
        line["device_utilization"] = 0.5
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary["device_utilization"] = {"mean": 0.874, "samples": 9}
    (path / "summary.json").write_text(json.dumps(summary))
    write_report(path)
    assert "device utilisation87 %" in read_page(path).text.replace("\n", "")
    assert "Device utilisation, sampled by the driver" in read_page(path).text

    (path / "summary.json").unlink()  # a run that is under way
    assert dict(describe_run(read_run(path))["figures"])["device utilisation"] == "50 %"
