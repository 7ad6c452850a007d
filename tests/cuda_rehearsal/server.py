"""Runs each rehearsal in a process of its own, forked from one in which torch, mpt and the extension are loaded.

A device cannot be given back, and what one test leaves on it would be another's; to import torch anew for each would
take most of the time that the default suite has for rehearsals.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import pkgutil
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cuda_rehearsal.__main__ import ROOT, environment
from tests.cuda_rehearsal.cards import VARIABLE, Machine

LOADED = (
    "mpt.commands.compare",
    "mpt.commands.convert",
    "mpt.commands.infer",
    "mpt.commands.plan",
    "mpt.commands.train",
    "mpt.inference.half",
    "mpt.planner.server.beside",
    "mpt.report.run_page.page",
    "pytest",
    "scipy.linalg",
    "torch._dynamo",
    "torch.utils.flop_counter",
)
FOR_ONE = "MPT_REHEARSAL_OF_ONE"
"""Environment variable that says that one test alone will run: what it does not use need not be loaded."""
WHOLE = (
    "data",
    "engine",
    "memory",
    "metrics",
    "nn",
    "optim",
    "precision",
    "run",
    "tasks",
    "workflows",
)
"""Packages of mpt of which a run takes some modules or others."""


@dataclass
class Rehearsal:
    """One test: its function by module and name, what it is called with, and the machine it wants."""

    module: str
    function: str
    arguments: dict[str, Any]
    machine: Machine
    outcome: Path


@dataclass
class Outcome:
    """How it ended, in words that pickle."""

    kind: str
    text: str = ""
    printed: str = ""


@dataclass
class Server:
    """The process that forks, from the side of pytest."""

    process: subprocess.Popen[bytes]
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="rehearsal-")))
    served: int = 0

    @classmethod
    def start(cls) -> Server:
        command = [sys.executable, "-c", "from tests.cuda_rehearsal.server import serve; serve()"]
        here = environment(Machine())
        del here[VARIABLE]
        here.setdefault("OMP_NUM_THREADS", "1")
        return cls(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=here,
                cwd=ROOT,
                start_new_session=True,
            )
        )

    def run(
        self, module: str, function: str, arguments: dict[str, Any], machine: Machine
    ) -> Outcome:
        """Rehearse one test and wait for it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.served += 1
        path = self.folder / str(self.served)
        pickle.dump(Rehearsal(module, function, arguments, machine, path), self.process.stdin)
        self.process.stdin.flush()
        status = self.process.stdout.readline().decode().strip()
        printed = path.with_suffix(".out")
        said = printed.read_text("utf-8", "replace") if printed.exists() else ""
        if not path.exists():
            return Outcome(
                "died",
                f"the rehearsal's process ended without a word ({status or 'with its server'})",
                said,
            )
        outcome: Outcome = pickle.loads(path.read_bytes())
        outcome.printed = said
        return outcome

    def stop(self) -> None:
        """End the server and whatever it runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def serve() -> None:
    """Fork for each request on the standard input; answer with the exit status when it is done."""
    import torch  # noqa: F401 - loaded for the forks

    from tests.cuda_rehearsal import build

    build.load()
    if not os.environ.get(FOR_ONE):
        for name in (*LOADED, *modules_of_mpt()):
            with contextlib.suppress(ImportError):  # what is not installed here, tests skip
                importlib.import_module(name)
    read_what_every_run_reads()
    gc.freeze()  # what is loaded is not looked at, and so not copied, in the forks
    answers = os.fdopen(os.dup(1), "wb")
    while True:
        try:
            wanted = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pid = os.fork()
        if pid == 0:
            answers.close()
            rehearse(wanted)
        status = os.waitpid(pid, 0)[1]
        answers.write(f"exit {os.waitstatus_to_exitcode(status)}\n".encode())
        answers.flush()


def modules_of_mpt() -> Iterator[str]:
    """Yield the names of the modules in packages of which every run takes some."""
    for package in WHOLE:
        folder = ROOT / "mpt" / package
        yield from (found.name for found in pkgutil.walk_packages([str(folder)], f"mpt.{package}."))


def read_what_every_run_reads() -> None:
    """Read all parts' settings and the report's templates, which processes keep, and leave the report's drawings out.

    Reports draw files' numbers with matplotlib, which has nothing to do with the device and took half of a short run.
    Neither has what else is taken away here: waiting for the disk, two thirds of the digits to be tested on, and the
    stack that torch keeps of every seed.
    """
    import mpt.data.digits
    import mpt.report.drawing
    from mpt.cli import make_app
    from mpt.config.load import load_config
    from mpt.report.run_page.page import environment

    make_app()
    for config in ("classify_digits", "dcgan_amp"):
        load_config(f"@{config}")
    templates = environment()
    for name in templates.list_templates(extensions=["j2"]):
        templates.get_template(name)
    mpt.report.drawing.drawn = lambda plot: "<svg></svg>"
    os.fsync = lambda file: None
    whole = mpt.data.digits.read_digits
    mpt.data.digits.read_digits = lambda split: tuple(
        part[:: 3 if split == "test" else 1] for part in whole(split)
    )
    traceback.format_stack = lambda *_, **__: []


def rehearse(wanted: Rehearsal) -> None:
    """Run one test in this process, write its outcome, and end the process."""
    output = os.open(wanted.outcome.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(0)
    try:
        os.environ.update(environment(wanted.machine))
        from tests.cuda_rehearsal import torch_cuda

        torch_cuda.install(wanted.machine)
        warnings.simplefilter("error")
        function = getattr(importlib.import_module(wanted.module), wanted.function)
        function(**wanted.arguments)
        races = torch_cuda.installed().notes.races
        assert not races, "work that nothing orders:\n" + "\n".join(dict.fromkeys(map(str, races)))
        outcome = Outcome("passed")
    except BaseException as error:
        kind = "skipped" if type(error).__name__ == "Skipped" else "failed"
        outcome = Outcome(kind, str(error) if kind == "skipped" else traceback.format_exc())
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    wanted.outcome.write_bytes(pickle.dumps(outcome))
    os._exit(0)
