"""What a run says fits the terminal, and says the same in every style."""

import io
import json
import re
import time
from typing import Any

import pytest

from mpt.boards.console import Console

pytestmark = pytest.mark.tier("fast")


ROW: dict[str, Any] = {
    "kind": "train",
    "step": 60,
    "losses": {"disc/real": 0.38, "disc/fake": 0.4622, "gen/loss": 1.353},
    "samples_per_second": 1405.0,
    "memory": {"peak_bytes": 6_518_636},
    "scale": {"disc": 65536.0, "gen": 32768.0},
    "skipped": {"disc": 1, "gen": 0},
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_steps_and_time_stay_whole_on_a_terminal_of_any_width(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with Console("auto", 1200, terminal) as console:
        console.row(ROW)
        console.progress.refresh()
        console.message("a message")
    said = terminal.getvalue()
    assert "60/1200" in said
    assert ("disc/real 0.38" in said) == (width >= 60)
    assert "a message\n" in said
    assert (
        max(map(len, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said).replace("\r", "\n").splitlines()))
        <= width
    )
    assert ("peak 6.2 MiB" in said) == (width == 200)


def test_plain_lines_hold_every_figure_and_each_begins_with_the_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda text: text)
    stream = io.StringIO()
    with Console("auto", 1200, stream) as console:
        console.row(ROW)
        console.row(
            {"kind": "evaluate", "step": 60, "metrics": {"accuracy": 0.5}, "test_samples": 360}
        )
        console.message("two\nlines")
        console.row(
            {
                **ROW,
                "losses": {},
                "memory": {},
                "scale": {},
                "skipped": {},
                "samples_per_second": 0.3321,
            }
        )
        console.warning("hot")
    now = "%Y-%m-%d %H:%M:%S"
    assert stream.getvalue().splitlines() == [
        f"{now}  step 60/1200  disc/real 0.38  disc/fake 0.4622  gen/loss 1.353  1405 samples/s  peak 6.2 MiB"
        "  scale disc 65536 gen 32768  skipped disc 1",
        f"{now}  step 60/1200  evaluated on 360 test samples: accuracy 0.5",
        f"{now}  two",
        f"{now}  lines",
        f"{now}  step 60/1200  0.33 samples/s",
        f"{now}  warning: hot",
    ]
    assert capsys.readouterr().out == ""


def test_json_goes_to_stdout_and_nothing_else_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    with Console("json", 1200, stream) as console:
        console.row(ROW)
        console.message("chatter")
        console.warning("hot")
    assert json.loads(capsys.readouterr().out) == ROW
    assert stream.getvalue() == ""


def test_quiet_says_warnings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda text: "now")
    stream = io.StringIO()
    with Console("quiet", 1200, stream) as console:
        console.row(ROW)
        console.message("chatter")
        console.warning("hot")
    assert stream.getvalue() == "now  warning: hot\n"


class Closed(io.StringIO):
    """An output whose reader has left, or whose disk is full."""

    def write(self, text: str) -> int:
        raise OSError(32, "Broken pipe")

    def flush(self) -> None:
        raise OSError(32, "Broken pipe")


class ClosedTerminal(Closed):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Closed, ClosedTerminal])
def test_an_output_that_cannot_be_written_ends_the_talking_and_not_the_training(
    stream: type[Closed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with Console("auto", 1200, stream()) as console:
        console.message("a message")
        console.row(ROW)
        console.advance(3)
        console.warning("a warning")
        assert console.stream.is_lost


def test_rows_for_programs_end_where_nobody_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", Closed())
    with Console("json", 1200) as console:
        console.row(ROW)
        console.row(ROW)
        assert console.rows.is_lost


def test_without_a_standard_error_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    with Console("auto", 1200) as console:
        console.row(ROW)
        console.message("a message")
