"""Record each phase's update as CUDA graphs and repeat them: for networks whose kernels are shorter than their launch.

A small network's step is hundreds of kernels that each take the host longer to launch than the GPU to run. Recorded,
they are launched together: the whole of an update, from its random inputs to its optimizer's step, divided only at the
points at which the host asks whether losses or gradients are finite. Off by default: on an H200 small networks took
1.05 to 2.7 times as many steps (docs/benchmarks/gpu-h200.md), and a card that kernels keep busy gains nothing.

An update must be the same each time. After one that makes the optimizer's state, two are written down and compared
operator by operator (`mpt.memory.capturing.tape`); a step with a branch on data, numbers from the host or tensors that
are replaced is refused in a line. An update that is not as recorded runs operator by operator: a batch of another
shape, and an update that overflows or whose loss is not finite, which is undone first. After a resume, a rollback, a
fall back to bfloat16 or other micro-batches updates are recorded anew.

The graphs have a memory pool of their own, which gives nothing back: evaluations and samples cannot use it. Rates are
read from the device and Adam counts its steps there, so weights differ from other runs' by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import Field
from torch._guards import detect_fake_mode
from torch.optim import Optimizer

from mpt import accelerator
from mpt.config.options import Options
from mpt.errors import ConfigError
from mpt.memory.capturing.graphs import Counting, Recorder, Recording
from mpt.memory.capturing.rates import Rates, why_not
from mpt.memory.capturing.tape import Tape, first_change, first_difference, numbers_of
from mpt.seams import NOTHING, Batch, Phase, Run, TakesUpdates, has_dynamic_scale
from mpt.seams.questions import Questions

CONFLICTS = {
    "compile": "compiled networks record graphs of their own with mode=reduce-overhead; use one of the two",
    "recompute": "repeated forwards put random states back on the host; leave one of the two out",
    "offload_activations": "its copies wait on the host, which a graph cannot; leave one of the two out",
    "stream_weights": "its copies wait on the host, which a graph cannot; leave one of the two out",
    "cpu_optimizer": "its copies wait on the host, which a graph cannot; leave one of the two out",
    "park_optimizer": "it moves the state that graphs have the addresses of; leave one of the two out",
    "optimizer_in_backward": "it steps inside the backward, before losses are known to be finite; use one of the two",
    "low_bit_optimizer": "its steps are compiled by another library; leave one of the two out",
    "empty_cache_every": "the graphs' pool keeps its memory; leave one of the two out",
}
SAME = 2
"""Updates that are written down and must be the same."""


class Settings(Options):
    """When updates are recorded: `cuda_graphs: true`."""

    warmup: int = Field(1, ge=1)
    """Updates of each phase that go before the two which are compared; the one after those is recorded."""


@dataclass
class Known:
    """The state of recording a phase's update."""

    seen: int = 0
    tapes: list[Tape] = field(default_factory=list)
    questions: int = 0
    recording: Recording | None = None


class CudaGraphs(TakesUpdates):
    """Performs a run's updates: the first ones as they are, then by their graphs."""

    # Adam corrects its means in float32, and rates are rounded to it
    name, exact = "cuda_graphs", False

    def __init__(self, settings: Settings) -> None:
        self.warmup = settings.warmup
        self.has_graphs = False
        """Whether the run's device has graphs, or is planned as one that has."""
        self.news: list[str] = []
        self.updates: dict[str, Known] = {}
        """Phase name -> its update."""
        self.rates: dict[Optimizer, Rates] = {}
        self.inputs: Batch = {}
        """The batch's memory that graphs read."""
        self.arithmetic: tuple[Any, ...] = ()
        self.classes: tuple[type, ...] = ()
        self.is_in_doubt = True
        """Whether classes of modules may have changed since they were looked at."""
        self.said: set[str] = set()

    def attach(self, run: Run) -> None:
        """Refuse settings that cannot be recorded; on devices without graphs nothing is done."""
        self.run = run
        self.is_planned = detect_fake_mode() is not None and run.device.type != "cpu"
        if run.device.type != "cuda" and not self.is_planned:
            run.notes.append(
                f"memory.cuda_graphs: {run.device} has no CUDA graphs; nothing is done"
            )
            return
        refuse(run)
        self.has_graphs = True
        if not self.is_planned:
            self.stream = torch.Stream(run.device)
            self.pool = torch.cuda.graph_pool_handle()

    def update(
        self, phase: Phase, batch: Batch, is_logged: bool, perform: Callable[[Batch, bool], Any]
    ) -> Any:
        """Return the result of `perform` on the batch, or of the graphs that were recorded of it.

        Recorded is the update of a logged step: it computes the gradients' norm too, which others leave out.
        """
        if not self.has_graphs:
            return perform(batch, is_logged)
        self.forget_what_has_changed()
        if phase.optimizer not in self.rates:
            self.rates[phase.optimizer] = Rates(phase.optimizer, self.run.device)
        self.rates[phase.optimizer].write()
        scaler = self.run.precision.scalers.get(phase.name)
        if scaler is not None:
            scaler.keep_on(self.run.device)
        update = self.updates.setdefault(phase.name, Known())
        inputs = self.put_in(batch)
        try:
            if inputs is None:
                made = self.eagerly(phase, lambda: perform(batch, True), Counting())
            else:
                made = self.choose(update, phase, lambda: perform(inputs, True))
        finally:
            release_gradients(self.run, phase)
        if not is_logged:
            made.stats.grad_norm = None
        return made

    def choose(self, known: Known, phase: Phase, perform: Callable[[], Any]) -> Any:
        """Perform an update in the way that is its turn."""
        if self.is_planned:
            return self.planned(known, phase, perform)
        if known.recording is None and known.seen < self.warmup + SAME:
            return self.observed(known, phase, perform)
        if known.recording is None:
            self.record(known, phase, perform)
        return self.repeated(known, phase, perform)

    def eagerly(self, phase: Phase, perform: Callable[[], Any], questions: Questions) -> Any:
        """Perform an update operator by operator, as a recorded one would compute it."""
        with self.rates[phase.optimizer].in_place(), questions:
            return perform()

    def observed(self, known: Known, phase: Phase, perform: Callable[[], Any]) -> Any:
        """Perform an update, and compare it with the one before as soon as the optimizer has its state."""
        known.seen += 1
        tape = Tape(self.run.device) if known.seen > self.warmup else None
        rates, counting = self.rates[phase.optimizer], Counting(tape)
        counts, numbers = rates.counts(), {} if tape is None else numbers_of(self.run.task)
        with tape or NOTHING:
            made = self.eagerly(phase, perform, counting)
        if made.stats.skipped:  # this is not the update to record; the next will be
            known.seen, known.tapes = known.seen - 1, []
            return made
        rates.learn(counts)
        known.questions = counting.asked
        if tape is not None:
            known.tapes.append(tape)
            self.refuse_difference(known, phase, first_change(numbers, numbers_of(self.run.task)))
        return made

    def refuse_difference(self, known: Known, phase: Phase, why_not: str) -> None:
        """Raise ConfigError for an update that is not the same each time."""
        if not why_not:
            why_not = (
                first_difference(*known.tapes)
                if len(known.tapes) == SAME
                else known.tapes[0].why_not
            )
        if why_not:
            raise ConfigError(
                f"memory.cuda_graphs: phase {phase.name} cannot be recorded: {why_not}; leave it out"
            )

    def record(self, known: Known, phase: Phase, perform: Callable[[], Any]) -> None:
        """Record an update. Its counts in Python are taken back: the repetition that follows counts it."""
        rates, scaler = self.rates[phase.optimizer], self.run.precision.scalers.get(phase.name)
        counts, scaled = rates.counts(), None if scaler is None else scaler.state_dict()
        operators, known.tapes = len(known.tapes[-1].entries), []
        recorder = Recorder(self.pool, self.stream, known.questions)
        try:
            known.recording = self.eagerly(phase, lambda: recorder.record(perform), recorder)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.refuse_difference(known, phase, str(error).strip().split("\n")[0])
        release_gradients(self.run, phase)
        rates.put_back(counts)
        if scaler is not None and scaled is not None:
            scaler.load_state_dict(scaled)
        self.say_once(
            f"{phase.name}: {operators} operators recorded in {len(recorder.segments)} graphs",
            phase.name,
        )

    def repeated(self, known: Known, phase: Phase, perform: Callable[[], Any]) -> Any:
        """Repeat a recorded update; one that does not go as usual is undone and performed operator by operator."""
        assert known.recording is not None
        random = accelerator.random_state(self.run.device)
        if known.recording.replay(self.run.device):
            self.rates[phase.optimizer].count()
            made = known.recording.result()
            scaler = self.run.precision.scalers.get(phase.name)
            if scaler is not None:
                scaler.update(False)
                made.stats.scale = scaler.scale
            return made
        self.is_in_doubt = True
        self.run.buffers.restore()
        assert random is not None
        accelerator.set_random_state(self.run.device, random)
        return self.eagerly(phase, perform, Counting())

    def planned(self, known: Known, phase: Phase, perform: Callable[[], Any]) -> Any:
        """Perform an update on fake tensors.

        The second one allocates like graphs. Under a scale that may overflow it is the first that does, in addition,
        for one that runs operator by operator has to fit alongside the graphs.
        """
        known.seen += 1
        may_overflow = has_dynamic_scale(self.run.precision, phase)
        with NOTHING if known.seen == 1 or may_overflow else self.private_pool():
            made = self.eagerly(phase, perform, Questions())
        if known.seen > 1 or not may_overflow:
            return made
        del made
        release_gradients(self.run, phase)
        with self.private_pool():
            return self.eagerly(phase, perform, Questions())

    def put_in(self, batch: Batch) -> Batch | None:
        """Return a batch in the memory that graphs read; None if it has another shape than the first one."""
        if not self.inputs:
            self.inputs = {name: value.clone() for name, value in batch.items()}
        elif forms_of(batch) != forms_of(self.inputs):
            self.say_once(
                "a batch of another shape than the recorded ones runs operator by operator"
            )
            return None
        else:
            for name, value in batch.items():
                self.inputs[name].copy_(value, non_blocking=True)
        return dict(self.inputs)

    def forget_what_has_changed(self) -> None:
        """Discard the recordings of a run whose state, arithmetic or micro-batches have changed since."""
        run = self.run
        refuse_adaptation(run)
        classes = self.classes
        if self.is_in_doubt:
            classes = tuple(
                type(module) for root in run.task.modules.values() for module in root.modules()
            )
        scalers = tuple(run.precision.scalers.values())
        found = (
            run.precision.numerics.dtype,
            scalers,
            run.adaptation.micro_batch_size,
            len(run.tricks),
        )
        is_stale = any(rates.is_stale for rates in self.rates.values())
        if is_stale or (found, classes) != (self.arithmetic, self.classes):
            if any(update.recording for update in self.updates.values()):
                what = (
                    "the optimizer's state was put back"
                    if is_stale
                    else "arithmetic or micro-batches have changed"
                )
                self.news.append(f"memory.cuda_graphs: {what}; updates are recorded anew")
            self.updates, self.rates = {}, {}
        self.arithmetic, self.classes, self.is_in_doubt = found, classes, False

    def say_once(self, what: str, about: str = "") -> None:
        """Add a note to the next line of the log, unless it was logged before."""
        if (about or what) not in self.said:
            self.said.add(about or what)
            self.news.append(f"memory.cuda_graphs: {what}")


def forms_of(batch: Batch) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the shapes and dtypes of a batch's fields."""
    return {name: (value.shape, value.dtype) for name, value in batch.items()}


def release_gradients(run: Run, phase: Phase) -> None:
    """Release an update's leftovers: no other update of this phase begins by doing so."""
    if not run.keeps_gradients:
        for weight in run.weights[phase.name]:
            weight.grad = None


def refuse(run: Run) -> None:
    """Raise ConfigError for a run whose updates are not the same each time, or not the host's alone to launch."""
    refuse_adaptation(run)
    if run.world.size > 1:
        raise ConfigError(
            "memory.cuda_graphs: several processes agree on each update by way of the host, which a graph cannot; "
            "leave it out"
        )
    for optimizer in run.optimizers.values():
        if reason := why_not(optimizer):
            raise ConfigError(
                f"memory.cuda_graphs: {reason}, which a graph would repeat; use adam, adamw or sgd"
            )


def refuse_adaptation(run: Run) -> None:
    """Raise ConfigError for a run that adapts its micro-batches."""
    if run.adaptation.is_allowed:
        raise ConfigError(
            "memory.cuda_graphs: memory.on_oom=adapt and micro_batch=auto change an update while it is repeated; set "
            "memory.on_oom=stop and micro_batch to a number"
        )


def build(settings: Settings) -> CudaGraphs:
    """Build the trick."""
    return CudaGraphs(settings)
