"""An update as CUDA graphs: recorded once, divided at the questions of the host, and repeated.

The host asks within an update whether losses or gradients are finite, and then steps or does not. A graph has no such
branch, so the recording ends at each question and continues in another graph, as an update that succeeds would.
Repeating it runs one graph, waits for the answer, and runs the next only if it is the usual one. All graphs share a
memory pool: they run one after the other, and nothing that outlives an update lies in it but the values that are copied
out at once.

Source: PyTorch's "CUDA semantics", section "CUDA Graphs".
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mpt.memory.capturing.tape import Tape
from mpt.seams.logged import Figures
from mpt.seams.questions import Questions


@dataclass
class Segment:
    """One graph, and the question after it."""

    graph: Any
    answer: Tensor | None = None
    """Pinned memory of the host that the graph's last copy writes; None after the last graph."""
    usual: bool = True


@dataclass
class Recording:
    """The graphs of an update and its result."""

    segments: list[Segment] = field(default_factory=list)
    made: Any = None
    """The result, with places in `outputs` for tensors."""
    outputs: Tensor | None = None
    """The result's numbers, one after the other in float32."""

    def replay(self, device: torch.device) -> bool:
        """Run the graphs; return False if an answer was not the usual one and the rest has not run."""
        for segment in self.segments:
            segment.graph.replay()
            if segment.answer is not None:
                done = torch.Event(device)
                done.record()
                done.synchronize()
                if bool(segment.answer) != segment.usual:
                    return False
        return True

    def result(self) -> Any:
        """Return the result of the last repetition, in memory that the next one does not write to."""
        numbers = [] if self.outputs is None else list(self.outputs.clone().unbind())
        return exchange(self.made, lambda place: numbers[place], int)


class Counting(Questions):
    """Answers by waiting, counts the questions, and keeps the answers out of a tape's record."""

    def __init__(self, tape: Tape | None = None) -> None:
        self.asked, self.tape = 0, tape

    def ask(self, flag: Tensor, usual: bool) -> bool:
        """Return the answer."""
        self.asked += 1
        if self.tape is None:
            return super().ask(flag, usual)
        self.tape.is_paused = True
        answer = super().ask(flag, usual)
        self.tape.is_paused = False
        return answer


class Recorder(Questions):
    """Records one update on a stream, if it is the one that answers. The memory for answers is there before."""

    def __init__(self, pool: Any, stream: Any, questions: int) -> None:
        self.pool, self.stream = pool, stream
        self.segments: list[Segment] = []
        self.answers = [torch.empty((), pin_memory=True) for _ in range(questions)]
        self.graph: Any = None

    def record(self, perform: Callable[[], Any]) -> Recording:
        """Record an update. Nothing is computed; its results have no values before the first repetition."""
        recording = Recording(self.segments)
        with alone(self.stream):
            self._begin()
            try:
                made = perform()
                tensors: list[Tensor] = []

                def place(tensor: Tensor) -> int:
                    tensors.append(tensor)
                    return len(tensors) - 1

                recording.made = exchange(made, place, Tensor)
                if tensors:
                    recording.outputs = torch.stack(
                        [tensor.detach().float().reshape(()) for tensor in tensors]
                    )
            except BaseException:
                # a recording that failed says so again at its end
                with contextlib.suppress(RuntimeError):
                    self.graph.capture_end()
                raise
            self._end()
        return recording

    def ask(self, flag: Tensor, usual: bool) -> bool:
        """End this graph with the copy of an answer, begin the next, and continue as usual."""
        answer = self.answers.pop()
        answer.copy_(flag.float().reshape(()), non_blocking=True)
        self._end(answer, usual)
        self._begin()
        return usual

    def _begin(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")

    def _end(self, answer: Tensor | None = None, usual: bool = True) -> None:
        self.graph.capture_end()
        self.segments.append(Segment(self.graph, answer, usual))


@contextlib.contextmanager
def alone(stream: Any) -> Iterator[None]:
    """Make a stream the current one for a recording, which no garbage collection and no cached memory disturbs.

    cuBLAS takes its workspaces anew, inside of the recording and so from the graphs' pool, and gives them back after:
    elsewhere they would be given to others while graphs still write to them.
    """
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    torch.accelerator.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.accelerator.empty_cache()
    stream.wait_stream(torch.accelerator.current_stream())
    try:
        with stream:
            yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
        torch.accelerator.current_stream().wait_stream(stream)
        if collects:
            gc.enable()


def exchange(value: Any, change: Callable[[Any], Any], kind: type) -> Any:
    """Return a result with other objects in place of its tensors, or of the places that represent them."""
    if kind is int and isinstance(value, Place):
        return change(value.number)
    if kind is Tensor and isinstance(value, Tensor):
        return Place(change(value))
    if isinstance(value, dict):
        return {key: exchange(item, change, kind) for key, item in value.items()}
    if isinstance(value, Figures):
        other = copy.copy(value)
        other.sums, other.counts = exchange(value.sums, change, kind), dict(value.counts)
        return other
    if is_dataclass(value) and not isinstance(value, type | Place):
        return replace(
            value,
            **{one.name: exchange(getattr(value, one.name), change, kind) for one in fields(value)},
        )
    return value


@dataclass(frozen=True)
class Place:
    """Represents the tensor with this number."""

    number: int
