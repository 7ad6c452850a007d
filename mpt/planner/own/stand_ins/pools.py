"""Pools of threads, by which libraries read weights: what they are given is done at once, in the thread of the plan.

The modes that make tensors fake hold for one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def done_at_once() -> Iterator[None]:
    """Let a pool call a function when it is handed in, inside the block."""

    def submit(
        self: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    with mock.patch.object(ThreadPoolExecutor, "submit", submit):
        yield
