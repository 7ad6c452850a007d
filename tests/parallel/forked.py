"""Several gloo ranks as forks of the test's own process: torch is imported once, and each may be made to fail."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # DTensor needs it, and every fork would import it again

from mpt.errors import MptError

LIMIT_SECONDS = 60.0
"""Ranks that have not ended by then are killed, and the test fails: nothing may wait for ever."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets, without an agent that keeps the store."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_ranks(
    size: int, work: Callable[..., Any], *args: Any, limit: float = LIMIT_SECONDS
) -> list[Any]:
    """Return what `work(rank, *args)` returns on each rank, or the exit code where it raised or was killed."""
    context = multiprocessing.get_context("fork")
    port = free_port()
    processes, pipes = [], []
    for rank in range(size):
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_one, args=(rank, size, port, sending, work, args))
        process.start()
        sending.close()
        processes.append(process)
        pipes.append(receiving)
    results: list[Any] = []
    for pipe in pipes:
        told = None
        try:
            if pipe.poll(limit):
                told = pipe.recv()
        except EOFError:
            pass
        results.append(told)
    late = []
    for rank, process in enumerate(processes):
        process.join(15)
        if process.is_alive():
            late.append(rank)
            process.kill()
            process.join()
    assert not late, f"ranks {late} did not end within {limit} s"
    return [
        told["value"] if told is not None and "value" in told else process.exitcode
        for told, process in zip(results, processes, strict=True)
    ]


def _one(
    rank: int, size: int, port: int, pipe: Any, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(environment(rank, size, port))
    torch.set_num_threads(1)
    code = 0
    try:
        pipe.send({"value": work(rank, *args)})
    except MptError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)
