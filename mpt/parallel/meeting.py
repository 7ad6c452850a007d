"""The store that the processes of a training meet at: torch's TCPStore, and a one-line error if it is not there."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from mpt.errors import RankError
from mpt.parallel.place import Place

CONNECT_SECONDS = 60.0


def connect(place: Place, is_master: bool) -> Any:
    """Return a connection to the store that ranks meet at. Raises RankError if there is none."""
    where = f"MASTER_ADDR={place.address} MASTER_PORT={place.port}"
    if not is_master:
        await_answer(place, where)
    try:
        store = open_store(place, is_master)
    except (
        RuntimeError,
        ValueError,
        TimeoutError,
    ) as error:  # torch's DistNetworkError is a RuntimeError
        text = str(error).split("\n")[0]
        if is_master and ("EADDRINUSE" in text or "already in use" in text):
            raise RankError(
                f"{where}: the port is in use on this machine; set MASTER_PORT to a free one"
            ) from None
        raise unreachable(place, where, text) from None
    return PrefixStore(f"mpt/{place.restarts}", store)


def open_store(place: Place, is_master: bool) -> Any:
    """Return torch's store. Raises TimeoutError if something listens at the port that does not answer.

    The timeout of torch's own does not hold for the first answer, which it awaits for ever (torch 2.13,
    `TCPStore::ping`): a thread waits for it, and is left behind if another program listens there.
    """
    found: list[Any] = []
    failed: list[BaseException] = []

    def open_here() -> None:
        try:
            timeout = timedelta(seconds=CONNECT_SECONDS)
            found.append(
                TCPStore(
                    place.address,
                    place.port,
                    is_master=is_master,
                    timeout=timeout,
                    wait_for_workers=False,
                )
            )
        except BaseException as error:
            failed.append(error)

    opening = threading.Thread(target=open_here, name="mpt-connect", daemon=True)
    opening.start()
    opening.join(CONNECT_SECONDS + 1.0)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(
            "what listens there does not answer as a store: another program may have the port"
        )
    return found[0]


def await_answer(place: Place, where: str) -> None:
    """Wait until somebody listens there; torch's own waiting fills the screen. Raises RankError if nobody does."""
    until = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            socket.create_connection((place.address, place.port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise unreachable(place, where, str(error)) from None
        time.sleep(0.2)


def unreachable(place: Place, where: str, text: str) -> RankError:
    """Return the message if the other processes cannot be reached."""
    return RankError(
        f"{where}: rank {place.rank} on {place.host} cannot reach the other processes there within "
        f"{CONNECT_SECONDS:.0f} s ({text[:160]}). Is the address that of the first machine, and the port open?"
    )
