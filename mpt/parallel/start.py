"""Joining the other processes of a training, and leaving them, whatever the reason."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from mpt.config.schema import Config
from mpt.errors import ConfigError, MptError, RankError
from mpt.parallel.meeting import connect
from mpt.parallel.place import Place, check_batch, read_place
from mpt.parallel.ranks import Ranks, code_of, is_broken_connection
from mpt.parallel.watch import END_SECONDS, WAY_ON, Fault, Watch
from mpt.parallel.world import ALONE, PeerFaultError, World

AGREEMENT_SECONDS = 3.0
"""How long a failing rank waits to see whether rank 0 fails alike, which then reports it."""


@contextlib.contextmanager
def joined(config: Config) -> Iterator[World]:
    """Be one of the processes that torchrun started, within the block; alone, do nothing.

    A failure inside the block is reported once: by the rank it happened on, or by the first one to find that another
    was lost. Raises RankError if others cannot be reached or were lost, and SystemExit if the failure was reported
    elsewhere.
    """
    place = read_place()
    if place is None:
        yield ALONE
        return
    check_batch(config.train.batch_size, place.size)
    device = choose_backend(config, place)
    store = connect(place, place.rank == 0 and not place.has_agent)
    watch = Watch(place, config.parallel.timeout)
    watch.start()
    try:
        with quiet_end(place):
            await_all(place, store, config.parallel.timeout)
            yield Ranks(place, config.parallel, device, store, watch)
            leave(place, store)
    except BaseException as error:
        place.is_ending = True
        explain(error, place, watch, store)
        raise
    finally:
        watch.close()
        with contextlib.suppress(RuntimeError):
            part(place, store)
            if dist.is_initialized() and not place.is_ending:
                dist.destroy_process_group()


def choose_backend(config: Config, place: Place) -> str:
    """Return "cuda" or "cpu". Raises ConfigError for a device that cannot be shared out."""
    wanted = config.train.device
    if wanted not in ("auto", "cuda", "cpu"):
        raise ConfigError(
            f"device: found {wanted!r} for {place.size} processes, which train together on CUDA devices or on CPUs; "
            "use auto, cuda or cpu"
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return "cpu"
    if place.local_rank < torch.cuda.device_count():
        torch.cuda.set_device(place.local_rank)
    return "cuda"


@contextlib.contextmanager
def quiet_end(place: Place) -> Iterator[None]:
    """Ignore SIGTERM while this rank is ending: torchrun sends it to the others as soon as one has ended.

    Before that it unwinds the program, as it does in a training of one process: the others are told.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        if place.is_ending:
            return
        if callable(before):
            before(number, frame)
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
        signal.signal(signal.SIGTERM, before)
    except BaseException:
        place.is_ending = True  # the handler stays until the process has ended
        raise


def await_all(place: Place, store: Any, seconds: float) -> None:
    """Wait until every rank has told of itself. Raises RankError naming those that have not.

    Before torch does: its own waiting hears no signal and names nobody.
    """
    until = time.monotonic() + seconds
    while not store.check([f"rank/{rank}" for rank in range(place.size)]):
        if time.monotonic() > until:
            missing = [str(rank) for rank in range(place.size) if not store.check([f"rank/{rank}"])]
            named = ", ".join(missing[:8]) + " and more" * (len(missing) > 8)
            raise RankError(
                f"of {place.size} processes, rank {named} did not come within {seconds:g} s (parallel.timeout). Did it "
                "start, and end at once with a message of its own?"
            )
        time.sleep(0.05)


def leave(place: Place, store: Any) -> None:
    """Wait at the end: for the first rank, which may have a report to write; it waits for the others to know."""
    place.is_waiting = True
    store.set(f"ended/{place.rank}", "1")
    for rank in (0,) if place.rank else range(place.size):
        with contextlib.suppress(RuntimeError):  # of rank 0 without an agent the store goes with it
            wait_for(store, f"ended/{rank}", END_SECONDS)


def part(place: Place, store: Any) -> None:
    """Use the store for the last time; rank 0, if it keeps the store, waits until all others have."""
    store.set(f"left/{place.rank}", "1")
    if place.rank == 0 and not place.has_agent:
        until = time.monotonic() + 2 * AGREEMENT_SECONDS
        for rank in range(1, place.size):
            wait_for(store, f"left/{rank}", max(0.0, until - time.monotonic()))


def wait_for(store: Any, key: str, seconds: float) -> bool:
    """Wait until the store has a key; return whether it has."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if store.check([key]):
            return True
        time.sleep(0.05)
    return False


def explain(error: BaseException, place: Place, watch: Watch, store: Any) -> None:
    """Report a failure once, and let it end all ranks alike.

    All ranks may have failed alike, and then rank 0 reports it; or this one alone; or because another was lost. Raises
    the error that this rank is to end with if that is not `error`.
    """
    try:
        if is_broken_connection(error):
            explain_broken_connection(place, watch, store)
            return
        code = code_of(error)
        if isinstance(error, PeerFaultError):  # the rank that met it reports it
            fault = wait_for_fault(watch, 2 * AGREEMENT_SECONDS)
            raise SystemExit(fault.code if fault is not None else code)
        if place.rank == 0:
            store.set("ending/0", "1")
            watch.write_fault(0, f"rank 0 failed: {error}", code)
        elif wait_for(store, "ending/0", AGREEMENT_SECONDS):
            # torchrun would end it as soon as this process has ended
            wait_for(store, "ended/0", END_SECONDS)
            raise SystemExit(code)
        else:
            if not watch.write_fault(
                place.rank, f"{watch.describe(place.rank)} failed: {error}", code
            ):
                raise SystemExit(code)
            if isinstance(error, MptError):
                error.args = (f"rank {place.rank} on {place.host}: {error}",)
            elif isinstance(error, Exception):  # a mistake of the program, which follows
                print(f"{watch.describe(place.rank)} failed:", file=sys.stderr, flush=True)
        store.set(f"ended/{place.rank}", "1")
    except dist.DistError:
        return  # the store is gone: nothing more can be reported


def explain_broken_connection(place: Place, watch: Watch, store: Any) -> None:
    """Name the rank that was lost. Raises RankError on the rank that found it, SystemExit on the others."""
    try:
        fault = wait_for_fault(watch)
        if fault is None:
            lost = next(iter(watch.find_lost()), None)
            who = watch.describe(lost) if lost is not None else "another process"
            text = f"{who} was lost: its process ended without a word, or the network broke"
            is_told = not watch.write_fault(lost, text, RankError.exit_code)
            fault = watch.read_fault()
            assert fault is not None
            if not is_told:
                watch.record(fault)
                with contextlib.suppress(dist.DistError):
                    store.set(f"ended/{place.rank}", "1")
                raise RankError(f"{text}. {WAY_ON}") from None
    except dist.DistError:
        fault = watch.explain_lost_store()
    watch.record(fault)
    raise SystemExit(fault.code) from None


def wait_for_fault(watch: Watch, seconds: float = 1.5) -> Fault | None:
    """Return the fault that a failing rank is about to write, or None."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        fault = watch.read_fault()
        if fault is not None:
            return fault
        time.sleep(0.1)
    return None
