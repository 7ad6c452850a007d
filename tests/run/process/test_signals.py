"""The first signal is noted, the second SIGINT ends the process, and all is as before afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from mpt.errors import Interrupted, Terminated
from mpt.run.process import signals
from mpt.run.process.signals import Hurried, StopRequest, terminated_cleanly

LOOP = """
import sys, time
from mpt.errors import Interrupted
from mpt.run.process.signals import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.005)
    print("noted", flush=True)
    if "slow" in sys.argv:
        time.sleep(60)
    print("saved", flush=True)
    try:
        stop.raise_if_requested("Saved step 7.")
    except Interrupted as error:
        print(error, flush=True)
        sys.exit(error.exit_code)
"""


@contextlib.contextmanager
def start(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", LOOP, *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        except BaseException:
            process.kill()  # or its end would be waited for
            raise


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)],
)
def test_a_signal_is_noted_the_run_saves_and_the_exit_code_says_which(
    number: signal.Signals, code: int
) -> None:
    with start() as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.read() == f"noted\nsaved\nStopped by {number.name}. Saved step 7.\n"
    assert process.returncode == code


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_interrupt_ends_the_process_at_once(first: signal.Signals) -> None:
    with start("slow") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(first)
        assert process.stdout.readline() == "noted\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=5) == 130
        assert process.stdout.read() == ""


def test_the_handlers_before_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopRequest() as stop:
        assert signal.getsignal(signal.SIGTERM) != before[1]
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal_number == signal.SIGINT
        with pytest.raises(Interrupted) as caught:
            stop.raise_if_requested("Saved.")
    assert caught.value.exit_code == 130
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_outside_the_main_thread_nothing_is_installed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def work() -> None:
        with StopRequest() as stop:
            found.append((signal.getsignal(signal.SIGTERM), stop.requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(before, False)]


def test_a_forked_worker_ends_when_told_and_ignores_ctrl_c() -> None:
    code = (
        "import os, signal, time\nfrom mpt.run.process.signals import StopRequest\nwith StopRequest():\n"
        "    child = os.fork()\n    if child == 0:\n        time.sleep(60)\n        os._exit(1)\n"
        "    time.sleep(0.1)\n    os.kill(child, signal.SIGINT)\n    time.sleep(0.1)\n"
        "    assert os.waitpid(child, os.WNOHANG) == (0, 0)\n    os.kill(child, signal.SIGTERM)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 143\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=20, check=False).returncode == 0


def test_a_step_that_takes_too_long_is_cut_short_but_not_a_save() -> None:
    with StopRequest() as stop:
        stop.patience_seconds = 0.1
        with stop.undisturbed():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)  # the time is over while the state is saved
        assert stop.late
    with StopRequest() as stop:
        stop.patience_seconds = 0.1
        os.kill(os.getpid(), signal.SIGTERM)
        begun = time.monotonic()
        with pytest.raises(Hurried):
            time.sleep(20)
        assert time.monotonic() - begun < 10
    with StopRequest() as stop:  # Ctrl-C can be pressed again, and what sends SIGUSR1 means to wait
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.requested
        assert stop.timer is None


def test_patience_follows_the_length_of_steps_within_bounds() -> None:
    stop = StopRequest()
    patience = []
    for seconds in (0.1, 6, 1000):
        stop.expect(seconds)
        patience.append(stop.patience_seconds)
    assert patience == [5, 12, 25]


def test_outside_of_training_a_signal_unwinds_the_program() -> None:
    cleaned = []

    def work() -> None:
        with terminated_cleanly():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(20)
            finally:
                cleaned.append(True)

    with pytest.raises(Terminated) as ended:
        work()
    assert cleaned
    assert ended.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


class Callback:
    """Its end is a place where Python drops what is raised."""

    def __del__(self) -> None:
        with contextlib.suppress(Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)


def test_a_signal_that_got_lost_in_a_callback_is_raised_again() -> None:
    def work() -> None:
        with terminated_cleanly():
            Callback()
            time.sleep(20)

    with pytest.raises(Terminated):
        work()


def test_a_signal_waits_for_an_import_and_does_not_disturb_the_clean_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "AGAIN_SECONDS", 0.02)
    (tmp_path / "imports_slowly.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(0.1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    cleaned = []

    def work() -> None:
        with terminated_cleanly():
            try:
                import_module("imports_slowly")
                cleaned.append("imported")
                time.sleep(20)
            finally:
                time.sleep(0.1)
                cleaned.append("cleaned")

    with pytest.raises(Terminated):
        work()
    assert cleaned == ["imported", "cleaned"]


@pytest.mark.slow
def test_a_smoke_run_in_a_step_of_minutes_ends_soon_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "lazy.py").write_text(
        "import sys, time\nfrom torch import nn\n\nclass Net(nn.Linear):\n    def __init__(self):\n"
        "        super().__init__(256, 10)\n\n    def forward(self, x):\n        print('here', flush=True)\n"
        "        time.sleep(100)\n"
    )
    (tmp_path / "c.yaml").write_text(
        "model: {name: 'lazy:Net', image_size: 16}\ndataset: {name: digits, channels: 1}\n"
    )
    (tmp_path / "temporary").mkdir()
    environment = {
        **os.environ,
        "TMPDIR": str(tmp_path / "temporary"),
        "PYTHONPATH": f"{tmp_path}:{os.getcwd()}",
    }
    command = [sys.executable, "-m", "mpt", "train", "c.yaml", "--allow", "lazy", "--smoke", "2"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith(b"here") for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
    assert not list((tmp_path / "temporary").glob("mpt-smoke-*"))
