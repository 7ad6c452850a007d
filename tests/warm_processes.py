"""Processes of `python -m mpt...` that tests start, as forks of one in which torch and mpt are imported already.

Python's start and the import of torch take seconds of a processor, and most of what a planning process or a short
training takes; hundreds of tests start one. What is started is a process as any other: with its own number and
standard streams, a child of the test's process, which waits for it and may kill it. A process is started as usual if
anything that is read while Python starts would differ: its options, another folder with an `mpt`, a variable such as
`PYTHONWARNINGS` or `LD_PRELOAD`. Linux alone can hand over a child; elsewhere all are started as usual.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PYTHON, FOLDERS = sys.executable, tuple(sys.path)
PLANNING = ("mpt.planner.server.worker", "mpt.planner.server.beside")
"""Modules that run without torch's compiler: their processes have a server of their own."""
LOADED = (
    "mpt.commands.compare",
    "mpt.commands.plan",
    "mpt.commands.train",
    "mpt.commands.validate",
    "mpt.engine.loop.assembly",
    "mpt.parallel.ranks",
    "mpt.report.page",
    "mpt.workflows.blocking_rerun",
    "torch._dynamo",
    "torch.utils.flop_counter",
)
READ_AT_THE_START = re.compile(
    r"PYTHON(?!PATH$)|LD_|DYLD_|OMP_|MKL_|KMP_|OPENBLAS|TORCH|PYTORCH|CUDA|TRITON|LANG|LC_|TZ"
)
"""Variables that decide how Python or torch starts."""
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER: whose parent ends becomes this process's child."""
FIRST_FREE = 200
"""Files of lower numbers are handed over."""
SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT)


class Server:
    """The process that forks, from the side of the tests."""

    def __init__(self, kind: str) -> None:
        self.asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        code = f"from tests.warm_processes import serve; serve({asked.fileno()}, {kind!r})"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = _usual(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, pass_fds=[asked.fileno()]
        )
        asked.close()
        self.environment = environment

    def start(self, asked: dict[str, Any], environment: dict[str, str]) -> int | None:
        """Start a process as `Popen._execute_child` is asked to; return its number, None if it has to start anew."""
        if read_at_the_start(self.environment) != read_at_the_start(environment):
            return None
        streams = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        kept = [number for number in asked["pass_fds"] if number > 2]
        files = [usual if own == -1 else own for usual, own in enumerate(streams)] + kept
        request = {
            "module": asked["args"][2],
            "words": list(asked["args"][3:]),
            "folder": os.path.abspath(asked["cwd"] or os.getcwd()),
            "environment": environment,
            "kept": kept,
            "session": asked["start_new_session"],
        }
        text = json.dumps(request).encode()
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
        adopt(True)
        try:
            self.asking.sendmsg([len(text).to_bytes(4, "big")], [rights])
            self.asking.sendall(text)
            return int.from_bytes(receive(self.asking, 4), "big")
        except (OSError, EOFError):  # it could not import all of it, and said why
            return None
        finally:
            adopt(False)

    def stop(self) -> None:
        self.asking.close()
        self.process.wait()


def adopt(does: bool) -> None:
    """Let processes below this one whose parents end be this one's children, or those of the first process as usual."""
    ctypes.CDLL(None).prctl(SUBREAPER, int(does), 0, 0, 0)


def receive(connection: socket.socket, size: int) -> bytes:
    """Return exactly so many bytes. Raises EOFError if the other side is gone."""
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise EOFError
        found += part
    return found


_servers: dict[str, Server] = {}
_lock = threading.Lock()
_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_names = list(inspect.signature(_execute).parameters)


def _usual(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
    """Start a process as usual."""
    process = subprocess.Popen.__new__(_Usual)
    process.__init__(*words, **options)  # type: ignore[misc]
    return process


class _Usual(subprocess.Popen[bytes]):
    _execute_child = _execute


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Start processes so within the block, if this system can."""
    needed = {"args", "pass_fds", "cwd", "env", "p2cread", "c2pwrite", "errwrite", "process_group"}
    if sys.platform != "linux" or not needed <= set(_names):
        yield
        return
    subprocess.Popen._execute_child = _start  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = _execute  # type: ignore[attr-defined]
        for server in _servers.values():
            server.stop()
        _servers.clear()


def _start(self: subprocess.Popen[Any], *values: Any) -> None:
    asked = dict(zip(_names[1:], values, strict=True))
    environment = dict(os.environ if asked["env"] is None else asked["env"])
    if not is_common(asked, environment):
        _execute(self, *values)
        return
    kind = "planning" if asked["args"][2] in PLANNING else "any"
    with _lock:
        if kind not in _servers:
            _servers[kind] = Server(kind)
        number = _servers[kind].start(asked, environment)
    if number is None:
        _execute(self, *values)
        return
    self.pid = number
    self._child_created = True  # type: ignore[attr-defined]
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    self._close_pipe_fds(*(asked[name] for name in pipes))  # type: ignore[attr-defined]


def is_common(asked: dict[str, Any], environment: dict[str, str]) -> bool:
    """Return whether a process runs a module of mpt, in this Python, in no way that is out of the common."""
    words, folder = asked["args"], Path(asked["cwd"] or ".")
    return (
        not isinstance(words, str | bytes)
        and len(words) > 2
        and all(isinstance(word, str) for word in words)
        and words[:2] == [PYTHON, "-m"]
        and (words[2] == "mpt" or words[2].startswith("mpt."))
        and not (asked["shell"] or asked["preexec_fn"] or asked["executable"])
        and asked["process_group"] in (-1, None)
        and asked["umask"] in (-1, None)
        and asked["uid"] is None
        and asked["gid"] is None
        and asked["gids"] is None
        and asked["close_fds"]
        and all(number < FIRST_FREE for number in asked["pass_fds"])
        and all(signal.getsignal(one) is not signal.SIG_IGN for one in SIGNALS)
        and folder.is_dir()
        and not any(
            map(hides_a_module, [folder, *environment.get("PYTHONPATH", "").split(os.pathsep)])
        )
    )


def hides_a_module(folder: str | Path) -> bool:
    """Return whether a folder on the import path has a module that Python would find there instead of another."""
    if str(folder) in FOLDERS or Path(folder).resolve() == ROOT:
        return False
    names = {path.stem for path in Path(folder).glob("*.py")}
    names |= {path.parent.name for path in Path(folder).glob("*/__init__.py")}
    special = {"sitecustomize", "usercustomize"}
    return bool(names & special) or any(PathFinder.find_spec(name, FOLDERS) for name in names)


def read_at_the_start(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that decide how Python or torch starts."""
    return {name: value for name, value in environment.items() if READ_AT_THE_START.match(name)}


def serve(number: int, kind: str) -> None:
    """Fork for each request; a fork's parent ends at once, so that it becomes the child of who asks."""
    preload(kind)
    gc.collect()
    gc.freeze()  # what is loaded is not looked at, and so not copied, in the forks
    path = [folder for folder in sys.path if folder]
    connection = socket.socket(fileno=number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ends = os.pipe()
    reading, writing = os.fdopen(ends[0], "rb", 0), os.fdopen(ends[1], "wb", 0)
    while True:
        try:
            request, files = read_request(connection)
        except EOFError:
            os._exit(0)
        middle = os.fork()
        if middle == 0:
            child = os.fork()
            if child == 0:
                break
            writing.write(child.to_bytes(4, "big"))
            os._exit(0)
        os.waitpid(middle, 0)
        connection.sendall(reading.read(4))
        for file in files:
            os.close(file)
    connection.close()
    become(request, files, path)


def read_request(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next request and the files that came with it."""
    size, ancillary, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(64 * 4))
    if not size:
        raise EOFError
    files = array.array("i")
    for _, _, data in ancillary:
        files.frombytes(data[: len(data) - len(data) % files.itemsize])
    size += receive(connection, 4 - len(size)) if len(size) < 4 else b""
    return json.loads(receive(connection, int.from_bytes(size, "big"))), list(files)


def become(request: dict[str, Any], files: list[int], path: list[str]) -> None:
    """Be the process that is asked for, to its end."""
    if request["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    above = [os.dup2(file, FIRST_FREE + index) for index, file in enumerate(files)]
    os.closerange(3, FIRST_FREE)
    for file, wanted in zip(above, [0, 1, 2, *request["kept"]], strict=True):
        os.dup2(file, wanted)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    given = os.environ.get("PYTHONPATH")
    added = [folder or request["folder"] for folder in given.split(os.pathsep)] if given else []
    sys.path[:] = list(dict.fromkeys([request["folder"], *added, *path]))
    importlib.invalidate_caches()
    sys.argv = [request["module"], *request["words"]]
    sys.modules.pop(request["module"], None)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    runpy._run_module_as_main(request["module"], alter_argv=True)  # type: ignore[attr-defined]


def preload(kind: str) -> None:
    """Import what such processes import, and read what ships."""
    if kind == "planning":
        from mpt.planner.device import late_compiler

        with late_compiler.without_triton():
            late_compiler.postpone()
            import mpt.planner.plans.inference
            import mpt.planner.plans.plan
            import mpt.planner.plans.worlds
            import mpt.planner.server.refusals  # noqa: F401
    else:
        for name in LOADED:
            importlib.import_module(name)
    from mpt.config.load import load_config

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for config in ("classify_digits", "dcgan_amp"):
            load_config(f"@{config}")
