"""No escape sequence of others reaches a terminal, no formula of others a spreadsheet."""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpt import cli
from mpt.boards.boards import Boards
from mpt.boards.console import Console
from mpt.boards.feed import Board, Feed
from mpt.engine.building.devices import choose_device
from mpt.errors import ConfigError
from mpt.foreign.text import SPELT_OUT, HarmlessStream, csv_cell, from_csv_cell, harmless
from mpt.inference.outputs import write_table
from mpt.run.records.layout import RunDirectory
from mpt.run.records.recorder import Recorder
from mpt.run.records.skipped_files import write_skipped_files
from tests.report.conftest import write_run

RED = "\x1b[31mred"
TITLE = "\x1b]0;title\x07"
FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", "'quoted"]


def test_control_characters_are_escaped_and_all_else_is_left() -> None:
    assert harmless(f"a{RED}\n\tb\u202e\x9b") == "a\\x1b[31mred\n\tb\\u202e\\x9b"
    text = "größe – ×1.5 \N{NARROW NO-BREAK SPACE} 顔 \\x1b"
    assert harmless(text) == text


def test_a_guarded_stream_lets_progress_bars_begin_a_line_anew() -> None:
    stream = io.StringIO()
    print("\r 50%|##", end="", file=HarmlessStream(stream))
    print("name\rfake", file=HarmlessStream(stream))
    assert stream.getvalue() == "\r 50%|##name\\rfake\n"


@pytest.mark.parametrize(
    "words", [["list", "runs"], ["list", "runs", "--json"], ["report", "odd\x1b[31m"]]
)
def test_names_of_runs_do_not_reach_the_terminal_raw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    write_run(tmp_path / "odd\x1b[31m", model="\x1b[32m")
    with pytest.raises(SystemExit):
        cli.main([*words, "--runs", str(tmp_path)])
    said = capsys.readouterr()
    assert "x1b[31m" in said.out + said.err or "u001b[31m" in said.out
    assert "\x1b" not in said.out + said.err


@pytest.mark.parametrize(
    "words", [["list", "models"], ["validate", "net\x1b[31m.yaml"], ["train", "\x1b]0;x\x07.yaml"]]
)
def test_docstrings_and_names_of_files_do_not_reach_the_terminal_raw(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
) -> None:
    monkeypatch.setenv("MPT_PARTS", "")
    (tmp_path / "parts" / "nn").mkdir(parents=True)
    source = f'"""A network of {RED}{TITLE}."""\nfrom mpt.config.options import ModelOptions\n'
    (tmp_path / "parts" / "nn" / "mine.py").write_text(
        source + "class Settings(ModelOptions):\n    pass\n"
    )
    with pytest.raises(SystemExit):
        cli.main([*words, "--parts", str(tmp_path / "parts")])
    said = capsys.readouterr()
    assert "\\x1b" in said.out + said.err
    assert "\x1b" not in said.out + said.err


def test_what_a_board_raises_does_not_reach_the_terminal_raw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Board:
        raise OSError(f"{RED}{TITLE}")

    boards = Boards([], RunDirectory(tmp_path), {})
    boards.open["mlflow"] = Feed(fail)
    boards.close()
    with Console("plain", 1) as console:
        console.warning(*boards.take_problems())
        console.message(RED)
    assert "\x1b" not in (said := capsys.readouterr().err)
    assert said.count("\\x1b[31mred") == 2


def test_cells_of_tables_are_no_formulas(tmp_path: Path) -> None:
    for text in FORMULAS:
        assert csv_cell(text) == "'" + text
        assert from_csv_cell(csv_cell(text)) == text
    assert (csv_cell(-0.5), csv_cell("plain")) == (-0.5, "plain")
    run = RunDirectory(tmp_path)
    with Recorder(run) as recorder:
        recorder.write_evaluation(1, {"=cmd|'/c calc'!A1": -0.5})
    write_skipped_files(run, {"=1+1.png": "-damaged"})
    assert write_skipped_files(run, {"@x.png": "cut"}) == 2
    write_table([{"input": "=1+1.png", "label": "@cat", "score": -1}], tmp_path / "labels.csv")
    for name in ("results.csv", "skipped_files.csv", "labels.csv"):
        for row in csv.reader(io.StringIO((tmp_path / name).read_text())):
            assert not [cell for cell in row if cell[:1] in "=+@" or cell[:2] == "-d"], row
    table = (tmp_path / "results.csv").read_text()
    assert "-0.5" in table
    assert "'-0.5" not in table


@pytest.mark.parametrize("name", ["mps", "xpu", "meta", "vulkan"])
def test_a_device_that_this_machine_has_not_is_refused_in_a_line(name: str) -> None:
    if sys.platform == "darwin":
        pytest.skip("a Mac may have mps")
    with pytest.raises(
        ConfigError, match=f"device: {name} is asked for, but torch sees no {name} device"
    ):
        choose_device(name)


def test_letters_of_our_own_are_spelt_in_ascii_where_the_terminal_has_no_others() -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii", errors=SPELT_OUT)
    stream.write("0.5× of 3 µs ± 1, 2–3 … имя\n")
    stream.flush()
    assert written.getvalue() == b"0.5x of 3 us +- 1, 2-3 ... \\u0438\\u043c\\u044f\n"


def test_the_command_line_spells_letters_that_the_terminal_lacks() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mpt", "train", "nowhere×.yaml"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr.startswith("error: nowherex.yaml: no such file")
