"""CUDA graphs in somebody's own step: the memory of their private pool, and their kernels each time they are replayed.

What is recorded inside `torch.cuda.graph` takes its memory from a pool that the graph keeps, in a build as in the first
step; a replay takes none, and the time of the kernels started one by one. A step that is recorded while the script
builds is watched as the others are.
`make_graphed_callables` records a forward and its backward apart, which is not followed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

from mpt.planner.trace.cannot_plan import CannotPlan
from mpt.planner.trace.recorder import Recorder
from mpt.planner.trace.time_model import Work

CALLABLES = (
    "cannot plan: torch.cuda.make_graphed_callables is not followed; record the whole step with torch.cuda.graph, or "
    "plan it without graphs, whose pool then comes on top"
)
BUILD = "build"


class Graphs:
    """The graphs of one script; `is_used` says whether it recorded any."""

    def __init__(
        self,
        recorder: Recorder,
        watch: Callable[[], AbstractContextManager[None]],
        replayed: Callable[[Work], None],
    ) -> None:
        """`watch` watches a step that is recorded in the build; `replayed` gets a replay's kernels."""
        self.recorder, self.watch, self.replayed = recorder, watch, replayed
        self.is_used = False

    @contextmanager
    def record(self, graph: Graph, *args: Any, **options: Any) -> Iterator[None]:
        """Record a graph, as `torch.cuda.graph` does."""
        self.is_used = True
        recorder, before, step = (
            self.recorder,
            self.recorder.observer,
            self.recorder.trace.spans[-1],
        )

        def observe(func: Any, args: Any, kwargs: Any, result: Any) -> None:
            graph.work.observe(func, args, kwargs, result, recorder.outcome)

        with ExitStack() as stack:
            stack.enter_context(recorder.in_graphs())
            if step.moment == BUILD:
                recorder.enter_moment(step.step, "", "forward")
                stack.callback(recorder.enter_moment, step.step, "", BUILD)
                stack.enter_context(self.watch())
            recorder.observer = observe
            try:
                yield
            finally:
                recorder.observer = before

    @contextmanager
    def stand_in(self) -> Iterator[None]:
        """Let `torch.cuda` record such graphs inside the block."""
        made = type("CUDAGraph", (Graph,), {"graphs": self})
        answers: dict[str, Any] = {
            "CUDAGraph": made,
            "graph": self.record,
            "graph_pool_handle": lambda: (0, 0),
            "is_current_stream_capturing": lambda: False,
            "make_graphed_callables": _refuse,
        }
        with mock.patch.multiple("torch.cuda", **answers):
            yield


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    graphs: Graphs

    def __init__(self, keep_graph: bool = False) -> None:
        self.work = Work()

    def replay(self) -> None:
        """Start the recorded kernels."""
        self.graphs.replayed(self.work)

    def pool(self) -> tuple[int, int]:
        """Return a name for the pool, which all graphs share here."""
        return 0, 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise CannotPlan(CALLABLES)
