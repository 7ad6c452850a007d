"""An update that runs out of memory: one move on the ladder (`mpt.engine.recovery.ladder`), and once more.

The repeated update sees the same batch, random numbers, buffers and notes of the task; the effective batch and the
result stay the same but for BatchNorm, which sees smaller batches.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from torch.optim import Optimizer

from mpt import accelerator
from mpt.engine.recovery import ladder
from mpt.engine.state.journal import Journal
from mpt.engine.state.memory import snapshot_of
from mpt.engine.state.state import capture_random, restore_random
from mpt.engine.step.faults import describe_out_of_memory, fault_kind, out_of_memory_reason
from mpt.engine.step.step import Update, update
from mpt.errors import ConfigError, MemoryBudgetError
from mpt.memory.relieving.relief import splitter
from mpt.seams import Batch, Phase, Run
from mpt.seams.undo import notes_of, take_back


@dataclass(frozen=True)
class Trial:
    """A move that was made, and the way back from it."""

    name: str
    take_back: Callable[[], None]


class Stepping:
    """Whether an optimizer has begun to step in an update, which can then not be repeated.

    It holds nothing else: an optimizer's hook that led back to the run would keep a failed run's memory.
    """

    has_begun = False

    def note(self, *_: object) -> None:
        self.has_begun = True


class MemoryLadder:
    """Performs a run's updates, and adapts the run if one does not fit and the configuration allows it."""

    def __init__(self, run: Run, journal: Journal) -> None:
        self.run, self.journal = run, journal
        self.watched: set[Optimizer] = set()
        self.stepping = Stepping()
        self.snapshot = b""
        """Of the card's memory as it last ran out, as torch's viewer reads it; empty on a CPU."""

    def update(self, phase: Phase, batch: Batch, *, is_logged: bool = False) -> Update:
        """Perform an update; out of memory, make one move on the ladder and repeat it.

        Raises MemoryBudgetError when no move is left, when the optimizer had begun to step, or at once if neither
        `memory.micro_batch: auto` nor `memory.on_oom: adapt` allows to continue.
        """
        run = self.run
        refused: dict[str, str] = {}
        trial: Trial | None = None
        if run.adaptation.is_allowed:
            random_state, notes = capture_random(run.device), notes_of(run.task)
        while True:
            self.stepping.has_begun = False
            if phase.optimizer not in self.watched:
                self.watch(phase.optimizer)
            try:
                return update(run, phase, batch, is_logged=is_logged)
            except (RuntimeError, ConfigError) as error:
                kind = fault_kind(error)
                unsuited = trial is not None and kind == "unsuited" and not self.stepping.has_begun
                if not unsuited and kind != "out_of_memory":
                    raise
                reason = out_of_memory_reason(error)
                self.snapshot = snapshot_of(run.device)
            # Past the except block: the traceback holds the tensors that were too many.
            if unsuited:
                assert trial is not None
                trial.take_back()
                refused[trial.name] = reason
                self.tell(phase, f"{trial.name} cannot be used here ({reason})")
            if self.stepping.has_begun or not run.adaptation.is_allowed:
                self.fail(phase, reason, refused)
            undo_update(run, phase, random_state, notes)
            notes = notes_of(run.task)
            trial = self.climb(phase, refused)
            if trial is None:
                self.fail(phase, reason, refused)

    def watch(self, optimizer: Optimizer) -> None:
        """Notice from now on when this optimizer begins to step. The hook is put on once, not in every step."""
        self.watched.add(optimizer)
        optimizer.register_step_pre_hook(self.stepping.note)

    def climb(self, phase: Phase, refused: dict[str, str]) -> Trial | None:
        """Make the next move that can be made, and say which; return None when none is left."""
        run = self.run
        whole = run.config.memory.on_oom == "adapt"
        before = ladder.micro_batch_size(ladder.adapted_config(run))
        for name, value in ladder.next_moves(
            ladder.adapted_config(run), whole, ladder.least_size(run)
        ):
            if name in refused:
                continue
            try:
                take_back = ladder.move(run, name, value)
            except ConfigError as error:
                refused[name] = str(error).split("\n")[0]
                if name != splitter():
                    self.tell(phase, f"{name} cannot be used here ({refused[name]})")
                continue
            what = (
                f"micro-batch {before} -> {value}"
                if name == splitter()
                else f"memory.{name}={value} from here on"
            )
            sees = (
                f"; BatchNorm sees {value} samples"
                if name == splitter() and ladder.has_batch_norm(run)
                else ""
            )
            self.tell(phase, f"{what}, batch as before{sees}")
            return Trial(name, take_back)
        return None

    def tell(self, phase: Phase, what: str) -> None:
        """Record and show a change made for memory."""
        message = f"{phase.name}: out of memory; {what}"
        size = ladder.micro_batch_size(ladder.adapted_config(self.run))
        adapted = dict(self.run.adaptation.changes)
        self.journal.event(
            "out_of_memory", message, phase=phase.name, micro_batch=size, adapted=adapted
        )
        self.journal.console.warning(message)

    def fail(self, phase: Phase, reason: str, refused: dict[str, str]) -> NoReturn:
        """Raise MemoryBudgetError with remedies to try."""
        run = self.run
        size = ladder.micro_batch_size(ladder.adapted_config(run))
        smaller = "a half-precision mode or a smaller model"
        if self.stepping.has_begun:
            advice = (
                "the optimizer had begun to step, so the update cannot be repeated, and micro-batches do not make a "
                f"step smaller: try memory.cpu_optimizer=true, {smaller}"
            )
        elif not run.adaptation.is_allowed and size > 1:
            advice = (
                f"try memory.{splitter()}={size // 2} or memory.on_oom=adapt (same effective batch)"
            )
        elif size == 1:
            used = {**run.adaptation.changes, **run.config.memory.tricks}
            unused = (
                f"memory.{one.name}, "
                for one in ladder.later_tricks()
                if one.name not in used and not ladder.pointless(one.name, run.device)
            )
            advice = f"a micro-batch of 1 is too much already: try {next(unused, '')}{smaller}"
        else:
            refusals = "".join(f"; {name}: {why}" for name, why in refused.items())
            advice = f"nothing is left to adapt at a micro-batch of {size}{refusals}. Try {smaller}"
        where = f"in phase {phase.name} at step {self.journal.progress.step}"
        message = describe_out_of_memory(where, reason, advice)
        self.journal.event(
            "out_of_memory",
            message,
            phase=phase.name,
            micro_batch=size,
            adapted=dict(run.adaptation.changes),
        )
        raise MemoryBudgetError(message)


def undo_update(
    run: Run, phase: Phase, random_state: dict[str, Any], notes: dict[str, Any]
) -> None:
    """Put everything back as it was before an update in which no parameter has stepped."""
    phase.optimizer.zero_grad(set_to_none=True)
    phase.module.zero_grad(set_to_none=True)
    run.buffers.restore()
    take_back(run.task, notes)
    for trick in run.tricks:
        trick.abandon(phase)
    gc.collect()
    accelerator.empty_cache(run.device)
    accelerator.empty_host_cache(run.device)
    restore_random(random_state, run.device)
