"""`mpt train CONFIG --nproc N`: torch's own launcher, with this command's signals and exit codes.

torchrun ends with 1 whatever its processes ended with, and prints a table of them. Here the code is the one that the
processes ended with, and only their messages are reported.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from collections.abc import Sequence

from mpt.errors import RankError

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
SAVING_SECONDS = "600"
"""Seconds that stopped processes may take to save."""


def launch(words: Sequence[str], nproc: int, max_restarts: int) -> int:
    """Run `mpt train` with these words in several processes and return the exit code."""
    set_environment(nproc)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    silence()
    options = ["--standalone", f"--nproc-per-node={nproc}", f"--max-restarts={max_restarts}"]
    try:
        # without a folder for the processes' output torch makes one and leaves it there
        with tempfile.TemporaryDirectory(prefix="mpt-launch-", ignore_cleanup_errors=True) as name:
            options.append(f"--log-dir={name}")
            run.run(run.parse_args([*options, "-m", "mpt", "train", *words]))  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        codes = [failure.exitcode for failure in failed.failures.values()]
        return next((code for code in codes if code > 0), RankError.exit_code)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def set_environment(nproc: int) -> None:
    """Set the variables that torch's launcher and the processes read, unless the user has."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of the agent too
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SAVING_SECONDS)
    known = [name for name in SIGNALS if hasattr(signal, name)]
    handled = [
        name for name in known if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN
    ]
    os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", ",".join(handled))


def silence() -> None:
    """Let torch's launcher say nothing: its processes' messages are enough."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
