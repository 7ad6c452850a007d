"""Worker processes that plan, seen from the command: requests in, plans out, in order.

Workers live as long as the session, so that torch is not imported once per recipe. On Linux one of several is started,
and the others are forks of it. A worker that dies (for want of memory, say) costs the one plan it was at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar

from mpt.config.schema import Config
from mpt.errors import MptError
from mpt.planner.answers.own_plan import OwnPlan
from mpt.planner.answers.plan import InferencePlan, Plan
from mpt.planner.client import processes
from mpt.planner.client.forks import CAN_FORK
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import Gpu
from mpt.planner.facts.placement import Placement


class PlanError(MptError):
    """A configuration that cannot be planned, with the reason."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


Found = TypeVar("Found")


@dataclass(frozen=True)
class Answer(Generic[Found]):
    """A plan, or the plans of several worlds, or the error instead of it."""

    found: Found | None = None
    error: str = ""
    exit_code: int = 0
    lacks_data: bool = False
    """Whether the data are what it lacks, so that nothing was built."""

    def get(self) -> Found:
        """Return the plan, or raise PlanError."""
        if self.found is None:
            raise PlanError(self.error, self.exit_code)
        return self.found


class Answered:
    """A row of a table that a plan was asked for."""

    answer: Answer[Plan]

    @property
    def plan(self) -> Plan:
        """The plan, if there could be one."""
        return self.answer.get()

    @property
    def error(self) -> str:
        """Why it could not be planned; empty if it could."""
        return self.answer.error


class _Worker:
    def __init__(self, planner: processes.Planner | None = None) -> None:
        self.planner = planner or processes.start()
        self.process, self.errors = self.planner.process, self.planner.errors
        self.is_busy = self.has_forks = False

    def ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer as plain data, or None when the worker died."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.is_busy = True
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except (OSError, ValueError):  # ValueError: the pipe to a process that ended was closed
            return None
        finally:
            self.is_busy = False
        return dict(json.loads(line)) if line else None

    def fork(self) -> _Worker | None:
        """Return a further worker that knows what this one does; None if it does not fork. It must be idle."""
        planner = self.planner.fork(self.ask)
        self.has_forks |= planner is not None
        return None if planner is None else _Worker(planner)

    def last_words(self) -> str:
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "no message"

    def stop(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):  # requests that no living process has
                    pipe.close()
        self.planner.end(self.has_forks)


class Session:
    """Plans on up to `workers` processes; a context manager.

    With `budgets`, each configuration is traced once and judged by all of them; a plan for another of them is at hand.
    """

    def __init__(
        self,
        gpu: Gpu,
        calibration: Calibration,
        allow: Sequence[str] = (),
        workers: int = 1,
        placement: Placement | None = None,
        budgets: Sequence[int] = (),
    ) -> None:
        self.placement = asdict(placement) if placement is not None else {}
        self.gpu, self.calibration, self.allow, self.workers = (
            gpu,
            calibration,
            list(allow),
            workers,
        )
        self._idle: SimpleQueue[_Worker | None] = SimpleQueue()
        self._started: list[_Worker] = []
        self._is_killed = False
        self._missing = 0
        """Workers that are yet to be forked: after the first plan, with all that it has imported and learnt."""
        self.judge_by(budgets)
        self._pool = ThreadPoolExecutor(workers)

    def __enter__(self) -> Self:
        self._started = [_Worker() for _ in range(1 if CAN_FORK else self.workers)]
        self._missing = self.workers - len(self._started)
        for worker in self._started:
            self._idle.put(worker)
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_killed = True
        for worker in list(self._started):
            if worker.is_busy:  # a plan that nobody waits for any more is not finished
                worker.process.kill()
        self._pool.shutdown(cancel_futures=True)
        for worker in reversed(self._started):  # forks before their original
            worker.stop()

    def fork_ahead(self) -> None:
        """Fork the other workers before the first plan, which they are not to wait for; else it is done after it."""
        if self._missing:
            worker = self._idle.get()
            self._fork(worker)
            self._idle.put(worker)

    def _fork(self, worker: _Worker | None) -> None:
        """Add the missing workers: forks of an idle one; if it does not fork, they are started when needed."""
        missing, self._missing = self._missing, 0
        for _ in range(missing):
            twin = None if worker is None else worker.fork()
            if twin is None:
                worker = None
            else:
                self._started.append(twin)
                if self._is_killed:
                    twin.process.kill()
            self._idle.put(twin)

    def judge_by(self, budgets: Sequence[int]) -> None:
        """Judge plans by these budgets too from now on, and keep each for when it is asked for at another of them."""
        self.budgets, self._judged = list(budgets), dict[str, Answer[Plan]]()

    def kill(self) -> None:
        """End the workers at once, from another thread: plans under way and all later ones come back as errors."""
        self._is_killed = True
        for worker in list(self._started):
            worker.process.kill()

    def plan(self, configs: Sequence[Config], **wish: Any) -> list[Answer[Plan]]:
        """Plan configurations; `wish` holds the fields of `Wish`. Answers come in the order of asking."""
        return [future.result() for future in [self.submit(config, **wish) for config in configs]]

    def submit(self, config: Config, **wish: Any) -> Future[Answer[Plan]]:
        """Have one configuration planned as soon as a worker is free."""
        return self._pool.submit(self._plan_one, config, wish)

    def submit_worlds(
        self, config: Config, sizes: Sequence[int], **wish: Any
    ) -> Future[Answer[list[Plan]]]:
        """Have a rank planned in worlds of several sizes, of which `config` has the first one's batch.

        The answer's plans are in the order of the sizes.
        """
        asked = {"placement": self.placement, **wish}
        return self._pool.submit(
            self._ask, config, {"wish": asked, "worlds": list(sizes)}, _read_plans
        )

    def infer(
        self, config: Config, data: Mapping[str, Any] | None = None, **wish: Any
    ) -> Answer[InferencePlan]:
        """Plan a configuration's inference; `wish` holds the fields of `mpt.planner.plans.inference.InferenceWish`.

        `data` is the layout of the data (`DataSpec.to_record`), if the data set itself need not be asked.
        """
        wanted = {"inference": wish, "data": data}
        return self._pool.submit(self._ask, config, wanted, InferencePlan.from_data).result()

    def plan_own(
        self,
        source: Mapping[str, Any],
        arguments: Mapping[str, Any],
        *,
        with_changes: bool = True,
        **wish: Any,
    ) -> Answer[OwnPlan]:
        """Plan somebody's own training step; `source` holds the fields of `mpt.planner.own.execution.source.Source`.

        Without changes it is planned as it stands alone.
        """
        asked = {"source": source, "arguments": arguments, "with_changes": with_changes}
        wanted = {"own": asked, "wish": wish}
        return self._pool.submit(self._send, wanted, OwnPlan.from_data).result()

    def _plan_one(self, config: Config, wish: dict[str, Any]) -> Answer[Plan]:
        asked = {"placement": self.placement, "budgets": self.budgets, **wish}
        budget = wish.get("budget_bytes")
        if budget not in self.budgets or wish.get("largest_batch"):
            return self._ask(config, {"wish": asked}, Plan.from_data)
        key = json.dumps([config.to_data(), {**asked, "budget_bytes": None}], sort_keys=True)
        if key not in self._judged:
            self._judged[key] = self._ask(config, {"wish": asked}, Plan.from_data)
        judged = self._judged[key]
        return judged if judged.found is None else Answer(judged.found.at_budget(budget))

    def _ask(
        self, config: Config, wanted: dict[str, Any], read: Callable[[Any], Found]
    ) -> Answer[Found]:
        return self._send({"config": config.to_data(), "allow": self.allow, **wanted}, read)

    def _send(self, wanted: dict[str, Any], read: Callable[[Any], Found]) -> Answer[Found]:
        request = {"gpu": asdict(self.gpu), "calibration": asdict(self.calibration), **wanted}
        worker = self._idle.get()
        if self._is_killed:
            self._idle.put(worker)
            return Answer(error="cannot plan: it took too long", exit_code=2)
        worker = worker or self._replacement()
        try:
            answer = worker.ask(request)
        except TypeError:  # nothing was sent: JSON cannot hold the request
            self._idle.put(worker)
            raise
        self._fork(None if answer is None else worker)
        if answer is None:
            words = worker.last_words()
            self._idle.put(None)
            return Answer(error=f"cannot plan: the planning process ended ({words})", exit_code=2)
        self._idle.put(worker)
        if "found" not in answer:
            return Answer(**answer)
        return Answer(read(answer["found"]))

    def _replacement(self) -> _Worker:
        worker = _Worker()
        self._started.append(worker)
        return worker


def _read_plans(data: list[dict[str, Any]]) -> list[Plan]:
    return [Plan.from_data(one) for one in data]
