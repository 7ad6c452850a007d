"""Several processes that train together, on torch's own engine: torchrun's variables, c10d's groups.

There are two groups. Gradients, batches and buffers go over the first one (NCCL on GPUs, gloo on CPUs). Messages of
ranks to each other go over the second one, always gloo, in numbers of a fixed length: `agree` is the one point at
which an update's outcome is settled, and since nothing of the first group is awaited there, a rank that failed can
always reach it. A fault that cannot be settled so (a process that was killed, a mistake of the program) is found by
`mpt.parallel.watch`.
"""

from __future__ import annotations

import signal
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore

from mpt.config.schema import Parallel
from mpt.errors import ConfigError, MptError, Terminated
from mpt.parallel.exchange import Exchange
from mpt.parallel.mail import Mail
from mpt.parallel.meeting import connect
from mpt.parallel.place import Place
from mpt.parallel.watch import Watch
from mpt.parallel.world import FAULT_KINDS, Outcome, PeerFaultError, Stop, World, share

T = TypeVar("T")
AFTER_WATCH_SECONDS = 120.0
"""How much longer than the watch torch's own collectives wait: the watch says more."""
FIELDS = 8
"""Numbers in which a rank reports the outcome of its update."""


class Ranks(World):
    """One of several processes."""

    def __init__(
        self, place: Place, settings: Parallel, device_type: str, store: Any, watch: Watch
    ) -> None:
        self.rank, self.size, self.settings = place.rank, place.size, settings
        self.host, self.on_machine = place.host, place.on_machine
        self.location, self.watch, self.store = place, watch, store
        self.is_sharded = settings.strategy == "fsdp"
        self.can_fail_alone = not self.is_sharded and not settings.sync_batchnorm
        self.waited = 0.0
        self.signal: int | None = None
        self.stop: Stop | None = None
        self.exchanges: dict[str, Exchange] = {}
        self.letters: Mail | None = None
        self.on_gpu = device_type == "cuda"
        timeout = timedelta(seconds=settings.timeout + AFTER_WATCH_SECONDS)
        backend = "nccl" if self.on_gpu else "gloo"
        # norms and flags of tensors on the host are summed there
        if self.on_gpu and settings.offload:
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            store=PrefixStore("groups", store),
            rank=self.rank,
            world_size=self.size,
            timeout=timeout,
            device_id=self.card(),  # else NCCL guesses the card, and connects only at the first sum
        )
        self.talk = dist.new_group(backend="gloo", timeout=timeout)
        watch.remember(0)  # the store may go with it

    def choose_device(self, wanted: str) -> str:
        """Return this rank's card, or on a CPU the requested device."""
        card = self.card()
        return str(card) if card is not None else "cpu" if wanted == "auto" else wanted

    def card(self) -> torch.device | None:
        """Return this rank's card, by its number on this machine. Raises ConfigError if there are too few."""
        if not self.on_gpu:
            return None
        number, cards = self.location.local_rank, torch.cuda.device_count()
        if number >= cards:
            raise ConfigError(
                f"device: {number + 1} processes or more run on this machine, and torch sees {cards} CUDA device(s); "
                f"start {cards} of them, or use --device cpu"
            )
        return torch.device("cuda", number)

    def place(self, count: int) -> tuple[int, int]:
        """Return the range of this rank's samples in a batch."""
        return share(count, self.rank, self.size)

    def whole(self, part: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        """Return the whole batch: all fields as bytes, in one collective. A part may have no samples."""
        most = share(count, 0, self.size)[1]
        own = next(iter(part.values()))
        fields = [
            (name, v.contiguous(), v.shape[1:].numel() * v.element_size())
            for name, v in part.items()
        ]
        sent = torch.zeros(
            sum(most * each for _, _, each in fields), dtype=torch.uint8, device=own.device
        )
        start = 0
        for _, value, each in fields:
            data = value.reshape(-1).view(torch.uint8)
            sent[start : start + len(data)] = data
            start += most * each
        received = torch.empty(self.size, len(sent), dtype=torch.uint8, device=own.device)
        with self.waiting():
            self._gather_bytes(received, sent)
        counts = [
            stop - begin
            for begin, stop in (share(count, rank, self.size) for rank in range(self.size))
        ]
        batch: dict[str, Tensor] = {}
        start = 0
        for name, value, each in fields:
            joined = torch.empty(count * each, dtype=torch.uint8, device=own.device)
            if counts[0] == counts[-1]:  # one copy for thousands of ranks
                joined.view(self.size, -1).copy_(received[:, start : start + counts[0] * each])
            else:
                torch.cat(
                    [received[rank, start : start + n * each] for rank, n in enumerate(counts)],
                    out=joined,
                )
            batch[name] = joined.view(value.dtype).view(count, *value.shape[1:])
            start += most * each
        return batch

    def _gather_bytes(self, received: Tensor, sent: Tensor) -> None:
        dist.all_gather(list(received), sent)

    def exchange(self, phase: str, parameters: Sequence[nn.Parameter]) -> Exchange:
        """Return the reducer of a phase's gradients, made at its first update."""
        if self.is_sharded:
            parameters = ()  # summed as they arise
        if phase not in self.exchanges:
            settings = self.settings
            dtype = (
                None if settings.reduce_dtype == "auto" else getattr(torch, settings.reduce_dtype)
            )
            found: Exchange | None = None
            error: RuntimeError | None = None
            try:
                size = settings.bucket_mib * 2**20
                found = Exchange(
                    parameters, self._send, size, dtype, settings.overlap, self.waiting
                )
            except RuntimeError as refused:
                error = refused
            # Buckets are sent whatever happens, so all ranks must have them.
            if not all(self.collect(found is not None)):
                raise error or PeerFaultError(
                    "out_of_memory", "another rank has no room for the buckets of gradients"
                )
            assert found is not None
            self.exchanges[phase] = found
        return self.exchanges[phase]

    def _send(self, buffer: Tensor) -> Any:
        return dist.all_reduce(buffer, async_op=True)

    def agree(self, site: str, own: Outcome, exchange: Exchange) -> tuple[Outcome, list[bool]]:
        """Return how an update went on all ranks together, and which weights have a gradient on any.

        Sends the buckets again if any rank had sent them too early. Raises PeerFaultError if another rank failed
        worse than this one did.
        """
        flags = exchange.with_gradients()
        signal = self.stop.signal_number if self.stop is not None else None
        told = torch.zeros(FIELDS, dtype=torch.int64)
        told[0] = zlib.crc32(site.encode())
        told[1] = FAULT_KINDS.index(own.fault)
        told[2] = not own.finite
        told[3] = exchange.guessed_wrong
        told[4] = own.is_random
        told[5] = signal or 0
        told[6] = zlib.crc32(bytes(flags))
        rows = torch.empty(self.size, FIELDS, dtype=torch.int64)
        with self.waiting():
            dist.all_gather(list(rows), told, group=self.talk)
        assert bool((rows[:, 0] == rows[0, 0]).all()), (
            f"ranks are not at one point; rank {self.rank} is at {site}"
        )
        self.signal = int(rows[:, 5].max()) or None
        worst = int(rows[:, 1].argmax())
        fault = FAULT_KINDS[int(rows[worst, 1])]
        if fault != "none":
            exchange.wait()
            text = self._tell(own.text, worst)
            if own.fault != fault:
                raise PeerFaultError(fault, text)
            return own, flags
        if bool(rows[:, 3].any()):
            exchange.send_again()
        with self.waiting():
            exchange.wait()
        if bool((rows[:, 6] != rows[0, 6]).any()):
            flags = [any(of_all) for of_all in zip(*self.collect(flags), strict=True)]
        return Outcome("none", "", not bool(rows[:, 2].any()), bool(rows[:, 4].any())), flags

    def agreed_stop(self, stop: Stop) -> int | None:
        """Return the signal that any rank had received at the last update. From now on, `stop` is watched."""
        self.stop = stop
        return self.signal

    def tell(self, value: T) -> T:
        """Return the first rank's value."""
        return self._tell(value, 0)

    def _tell(self, value: T, source: int) -> T:
        box = [value]
        with self.waiting():
            dist.broadcast_object_list(box, source, group=self.talk)
        return box[0]

    def ask(self, work: Callable[[], T]) -> T:
        """Let the first rank do something and return its result. If it fails there, all end alike."""
        if self.is_first:
            try:
                result = work()
            except BaseException as error:
                self.ending(error)
                if isinstance(error, Exception):  # others that are stopped too hear nothing
                    self.tell((code_of(error) or 1, None))
                self.shared_failure = error
                raise
            return self.tell((0, result))[1]
        code, told = self.tell((0, cast(T, None)))
        if code:
            self.shared_failure = SystemExit(code)
            raise self.shared_failure
        return told

    def share_failure(self, own: BaseException | None) -> None:
        """Raise a failure of any rank on all: its own there, PeerFaultError on the others.

        Of sharded networks the others may be inside a layer, so that they cannot be met: see `mpt.parallel.watch`.
        """
        if not self.is_sharded and (own is None or own is not self.shared_failure):
            told = self.collect(None if own is None else f"{type(own).__name__}: {own}")
            others = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
            if others:
                self.shared_failure = own or PeerFaultError("error", others[0])
                raise self.shared_failure
        if own is not None:
            raise own

    def collect(self, value: T) -> list[T]:
        """Return every rank's value, in their order."""
        values: list[Any] = [None] * self.size
        with self.waiting():
            dist.all_gather_object(values, value, group=self.talk)
        return values

    def gather(self, value: T) -> list[T]:
        """Return every rank's value on the first rank, and nothing on the others."""
        values: list[Any] | None = [None] * self.size if self.is_first else None
        with self.waiting():
            dist.gather_object(value, values, 0, group=self.talk)
        return values or []

    def add(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums of scalar tensors over the ranks, by name and in the first rank's order.

        One that a rank lacks counts as zero there.
        """
        names = list(
            dict.fromkeys(name for of_rank in self.collect(list(values)) for name in of_rank)
        )
        if not names:
            return {}
        device = self.meeting_device(
            next((value.device for value in values.values()), torch.device("cpu"))
        )
        zero = torch.zeros((), device=device)
        own = [
            values[name].float().reshape(()).to(device) if name in values else zero
            for name in names
        ]
        sums = torch.stack(own)
        with self.waiting():
            dist.all_reduce(sums)
        return dict(zip(names, sums, strict=True))

    def meeting_device(self, otherwise: torch.device) -> torch.device:
        """Return the device to send tensors from: NCCL knows this rank's card alone, gloo takes them as they are."""
        return torch.device("cuda", torch.cuda.current_device()) if self.on_gpu else otherwise

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Put the mean over the ranks into tensors, which may be on different devices."""
        if tensors:
            device = self.meeting_device(tensors[0].device)
            flat = torch.cat([tensor.detach().to(device).float().reshape(-1) for tensor in tensors])
            with self.waiting():
                self._send(flat).wait()
            put_back(flat / self.size, tensors)

    @torch.no_grad()
    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Put the first rank's values into tensors."""
        with self.waiting():
            for tensor in tensors:
                value = tensor.detach().to(self.meeting_device(tensor.device)).contiguous()
                dist.broadcast(value, 0)
                if value.data_ptr() != tensor.data_ptr():
                    tensor.copy_(value)

    def note_step(self, step: int) -> None:
        """Remember the step for the message if this rank is lost."""
        self.location.step = step
        self.location.moves += 1

    def watch_over(self, on_lost: Callable[[str], None]) -> None:
        """Call a function with a text if this is the process that is to record that another one was lost."""
        self.watch.on_lost = on_lost

    def ending(self, error: BaseException) -> None:
        """Report that this rank ends with a failure alone, so that nobody ends it before it has reported it."""
        self.location.is_ending = True
        if (
            self.is_first
            and not isinstance(error, PeerFaultError)
            and not is_broken_connection(error)
        ):
            self.store.set("ending/0", "1")

    def waiting(self) -> Waiting:
        """Count the time within a block as spent waiting for other ranks."""
        return Waiting(self)

    def settle(self) -> None:
        """Leave nothing gathered of sharded networks."""
        if self.units:
            from mpt.parallel.shard import settle

            settle(self.units)

    def mail(self) -> Mail:
        """Return a store for messages between the ranks' threads, over a connection of its own."""
        if self.letters is None:
            self.letters = Mail(connect(self.location, False), self.rank, self.size)
        return self.letters

    def take_waited_seconds(self) -> float:
        """Return the seconds spent waiting for others since the last call."""
        waited, self.waited = self.waited, 0.0
        return waited


def code_of(error: BaseException) -> int:
    """Return the exit code that a failure ends with."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return error.exit_code if isinstance(error, (MptError, Terminated)) else 1


def is_broken_connection(error: BaseException) -> bool:
    """Return whether a collective failed because another process is gone."""
    if isinstance(error, PeerFaultError) or not isinstance(error, RuntimeError):
        return False
    words = (
        "Connection closed by peer",
        "Connection reset",
        "Broken pipe",
        "gloo/transport",
        "NCCL",
        "Socket Timeout",
    )
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


class Waiting:
    """A block in which a rank waits for others."""

    def __init__(self, world: Ranks) -> None:
        self.world = world

    def __enter__(self) -> None:
        self.started = time.perf_counter()
        self.world.location.is_waiting = True

    def __exit__(self, *_: object) -> None:
        self.world.location.is_waiting = False
        self.world.location.moves += 1
        self.world.waited += time.perf_counter() - self.started


def put_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the pieces of a flat tensor into tensors."""
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    for piece, tensor in zip(pieces, tensors, strict=True):
        tensor.copy_(piece.view(tensor.shape))
