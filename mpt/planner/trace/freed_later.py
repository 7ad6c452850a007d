"""Memory that ends while a stream still uses it which is not its own (`Tensor.record_stream`).

The caching allocator gives such memory to nobody before that stream has come so far. The host starts work long before
the card does it, so all of it is taken until the host waits for an event of after its end: FSDP1's limit of two
gathered layers is such a wait. What streams do by the time that the host is blocked is not planned: it is free then.
"""

from __future__ import annotations


class FreedLater:
    """Storages, by their numbers, in the order in which they ended."""

    def __init__(self) -> None:
        self._used: set[int] = set()
        self._waiting: list[int] = []
        self.ended = 0
        """How many have ended so far, which an event remembers."""

    def use(self, number: int) -> None:
        """Note that another stream uses a storage."""
        self._used.add(number)

    def ends(self, number: int) -> bool:
        """Note the end of a storage; return whether it must wait."""
        if number not in self._used:
            return False
        self._used.discard(number)
        self._waiting.append(number)
        self.ended += 1
        return True

    def release(self, ended: int) -> list[int]:
        """Return the storages among the first `ended` ones whose memory was not free yet, and is now."""
        count = max(0, ended - self.ended + len(self._waiting))
        ready, self._waiting = self._waiting[:count], self._waiting[count:]
        return ready
