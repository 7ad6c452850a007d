"""`mpt report` works on any run, without torch."""

import json
import shutil
import subprocess
import sys

import pytest

from mpt.commands import report
from mpt.commands.report import Command as ReportArguments
from mpt.errors import CheckpointError


def test_the_newest_run_s_report_is_written_and_its_paths_are_said(classifier, tmp_path, capsys):
    report.run(ReportArguments(runs=str(tmp_path)))
    said = capsys.readouterr().out.split()
    assert said == [str(classifier / f"report.{kind}") for kind in ("html", "md", "json")]
    assert json.loads((classifier / "report.json").read_text())["model"] == "small_cnn"
    assert "small_cnn" in (classifier / "report.html").read_text()


def test_a_run_that_was_stopped_at_its_very_start_is_not_the_newest(classifier, tmp_path, capsys):
    (tmp_path / "early" / "checkpoints").mkdir(parents=True)
    try:
        report.run(ReportArguments(runs=str(tmp_path)))
        assert str(classifier / "report.html") in capsys.readouterr().out
    finally:
        shutil.rmtree(tmp_path / "early")


def test_a_run_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="absent"):
        report.run(ReportArguments(run="absent", runs=str(tmp_path)))
    with pytest.raises(CheckpointError):
        report.run(ReportArguments(runs=str(tmp_path)))


def test_reports_and_verdicts_are_made_without_torch():
    imported = "mpt.commands.report, mpt.report.comparison_pages.comparison_page"
    code = f"import sys, {imported}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
