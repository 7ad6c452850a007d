"""The training loop: step, log, evaluate, sample, save, stop; every side job is a visible line.

Position in the data, learning rate and sample order are pure functions of the step, so resuming is restoring tensors
and counting on. Losses leave the device only when a line is logged.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpt.data.loader import Loader, prefetch
from mpt.engine import recovery
from mpt.engine.build import parameter_count
from mpt.engine.evaluation import evaluate, write_preview
from mpt.engine.ladder import move_again
from mpt.engine.memory import TRACKED_STEP, CudaPeaks, known_tensors, outside_bytes
from mpt.engine.scale_watch import ScaleWatch
from mpt.engine.state import capture, restore
from mpt.engine.step import Update
from mpt.optim.schedules import learning_rate
from mpt.run import checkpoint
from mpt.run.console import Console
from mpt.run.layout import RunDirectory
from mpt.run.memory_meter import MemoryMeter, MemorySplit
from mpt.run.recorder import Recorder, tidy
from mpt.run.signals import StopRequest
from mpt.run.state_checks import first_non_finite
from mpt.run.tensorboard import TensorBoardWriter
from mpt.seams import Batch, Dataset, Run


@dataclass
class Training:
    """One training run in progress: the built run, its directory, and what is counted along the way."""

    run: Run
    directory: RunDirectory
    recorder: Recorder
    console: Console
    loader: Loader
    test_data: Dataset
    total_steps: int
    board: TensorBoardWriter | None = None
    step: int = 0
    seconds_before: float = 0.0
    started: float = field(default_factory=time.perf_counter)
    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    skipped: dict[str, int] = field(default_factory=dict)
    rollbacks: int = 0
    best: float | None = None
    best_step: int = 0
    last_metrics: dict[str, float] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    """On a CPU, the largest peak of the tracked steps and its split."""
    unmeasured: set[str] = field(default_factory=set)
    """Phases of which no step was tracked yet."""
    peaks: CudaPeaks = field(default_factory=CudaPeaks)
    watches: dict[str, ScaleWatch] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)
    window_seconds: list[float] = field(default_factory=list)
    """Seconds per step of each logged window. Reading its losses waits for the device: on a GPU these are the truth."""
    scales_seen: dict[str, float] = field(default_factory=dict)
    non_finite_in_a_row: int = 0
    whole_steps: int = 0
    """Steps in this process in which no phase was skipped."""
    steps_begun: dict[Optimizer, list[int]] = field(default_factory=dict)
    """What `recovery.noted_steps` keeps."""

    def __post_init__(self) -> None:
        self.train = self.run.config.train
        for phase in self.run.phases:
            self.skipped.setdefault(phase.name, 0)
            self.watches[phase.name] = ScaleWatch(phase.name)
            if self.run.device.type == "cpu":
                self.unmeasured.add(phase.name)

    def go(self, stop: StopRequest, stop_after: int | None = None) -> None:
        """Train until `total_steps`, or until `stop_after` or a signal, saving before either.

        Raises Interrupted after saving when a signal arrived, NonFiniteError and MemoryBudgetError when recovery
        failed.
        """
        if self.step == 0 and self.train.on_non_finite == "rollback":
            self.save()
            self.peaks = CudaPeaks()  # what this save reserved is the steps' to use
        end = min(self.total_steps, stop_after or self.total_steps)
        if self.step == 0 and self.train.sample_every:
            self.write_preview()  # what all later ones are to be compared with
        stream = self.stream()
        window_started, window_steps = time.perf_counter(), 0
        while self.step < end:
            step_started = time.perf_counter()
            batch = next(stream)
            if not self.advance(batch):  # rolled back: go on from the restored step
                stream = self.stream()
                window_started, window_steps = time.perf_counter(), 0
                continue
            self.step += 1
            window_steps += 1
            self.step_seconds.append(time.perf_counter() - step_started)
            if self.step % self.train.log_every == 0 or self.step == end:
                self.log(window_started, window_steps)
                window_started, window_steps = time.perf_counter(), 0
            else:
                self.console.advance(self.step)
            side_jobs_started = time.perf_counter()
            last = self.step == self.total_steps
            if last or (self.train.evaluate_every and self.step % self.train.evaluate_every == 0):
                self.evaluate()
            if last or (self.train.sample_every and self.step % self.train.sample_every == 0):
                self.write_preview()
            due = self.train.checkpoint_every and self.step % self.train.checkpoint_every == 0
            if (due or self.step == end or stop.requested) and not self.save():
                stream = self.stream()  # the state was poisoned and the run rolled back
                continue
            if stop.requested and self.step < end:
                self.write_summary()
                stop.raise_if_requested(f"Step {self.step} is saved; go on with --resume.")
            window_started += time.perf_counter() - side_jobs_started  # throughput is that of training alone
        if self.step_seconds:
            self.write_summary()
        if self.board:
            self.board.close()

    def stream(self) -> Iterator[Batch]:
        """Return the batches from the current step on."""
        return prefetch(self.loader.batches(self.step), self.run.device, self.run.data)

    def advance(self, batch: Batch) -> bool:
        """Perform one step of every phase that is due. Return False when the run was rolled back instead."""
        self.set_learning_rates()
        updates: dict[str, Update] = {}

        due = [phase for phase in self.run.phases if phase.is_due(self.step)]

        def perform() -> bool:
            for phase in due:
                done = recovery.update_with_memory_ladder(self, phase, batch)
                if not done.finite and recovery.handle_non_finite(self, phase, done):
                    return False
                updates[phase.name] = done
            self.run.task.after_step(self.step, self.step * self.train.batch_size)
            return True

        split: MemorySplit | None = None
        if self.whole_steps >= TRACKED_STEP and not self.unmeasured.isdisjoint(phase.name for phase in due):
            with MemoryMeter(lambda: known_tensors(self.run), self.run.device) as meter:
                went_on = perform()
            split = meter.split
        else:
            went_on = perform()
        if not went_on:
            return False
        if all(done.finite for done in updates.values()):
            self.non_finite_in_a_row = 0
        if not any(done.stats.skipped for done in updates.values()):
            self.whole_steps += 1
            if split is not None:
                self.unmeasured.difference_update(phase.name for phase in due)
                if split.peak_bytes > self.memory.get("peak_bytes", 0):
                    self.memory = {"kind": "tracked", **split.to_record()}
        for name, done in updates.items():
            self.count(name, done)
        recovery.check_floor(self, updates)
        return True

    def count(self, phase: str, done: Update) -> None:
        """Add up losses, count skipped steps and record changes of the loss scale."""
        for name, value in done.losses.items():
            key = f"{phase}/{name}"
            self.sums[key] = self.sums[key] + value if key in self.sums else value
            self.counts[key] += 1
        scale = done.stats.scale
        if done.stats.skipped:
            self.skipped[phase] += 1
            kind = "overflow" if scale is not None else "skipped"
            self.event(kind, f"step {self.step} of {phase} was skipped", phase=phase, scale=scale)
        if scale is None:
            return
        previous = self.scales_seen.get(phase)
        if previous is not None and scale != previous:
            self.event("scale", f"{phase}: loss scale {previous:.10g} -> {scale:.10g}", phase=phase, scale=scale)
        self.scales_seen[phase] = scale
        warning = self.watches[phase].observe(self.step, scale, previous is not None and scale < previous)
        if warning:
            self.warn(warning)

    def set_learning_rates(self) -> None:
        """Set this step's rate in every parameter group."""
        for name, optimizer in self.run.optimizers.items():
            settings = self.run.optimizer_settings[name]
            rate = learning_rate(settings, self.step, self.total_steps, settings.lr) * self.run.task.rate_factor
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("lr_scale", 1.0)

    def log(self, window_started: float, window_steps: int) -> None:
        """Write and show one line: mean losses since the last, rates, scales, memory."""
        losses = {name: float(value) / self.counts[name] for name, value in self.sums.items()}
        self.sums, self.counts = {}, defaultdict(int)
        seconds = (time.perf_counter() - window_started) / max(window_steps, 1)
        self.window_seconds.append(seconds)
        row = {
            "seconds": self.seconds,
            "losses": losses,
            "lr": {name: optimizer.param_groups[0]["lr"] for name, optimizer in self.run.optimizers.items()},
            "scale": self.run.precision.scales(),
            "skipped": dict(self.skipped),
            "step_seconds": seconds,
            "samples_per_second": self.train.batch_size / seconds,
            "memory": self.measured_memory(),
        }
        self.console.row(self.recorder.write_metrics(self.step, row))
        if self.board:
            self.board.write(self.step, row)
        self.advise(losses)

    def measured_memory(self) -> dict[str, Any]:
        """Return the peak so far as a row for the log: the allocator's on CUDA, elsewhere what was tracked."""
        if self.run.device.type != "cuda":
            return dict(self.memory)
        self.peaks.count_steps(self.run.device)
        return self.peaks.to_record()

    def advise(self, figures: dict[str, float]) -> None:
        """Show what the task has to say about these losses or metrics, where it has an opinion."""
        for message in self.run.task.advise(figures):
            self.warn(message)

    def evaluate(self) -> None:
        """Evaluate on the test set and remember the best."""
        with self.peaks.beside_steps(self.run.device):
            self.last_metrics = evaluate(self.run, self.test_data, self.train.batch_size)
        figure = self.last_metrics[self.run.task.metric]
        better = self.best is None or (figure > self.best if self.run.task.higher_is_better else figure < self.best)
        if better:
            self.best, self.best_step = figure, self.step
        self.console.row(self.recorder.write_evaluation(self.step, self.last_metrics, {"seconds": self.seconds}))
        if self.board:
            self.board.write(self.step, {"evaluate": self.last_metrics})
        self.run.task.after_evaluation(self.last_metrics)
        self.advise(self.last_metrics)

    def write_preview(self) -> None:
        """Write the samples of this step, where the task makes any."""
        with self.peaks.beside_steps(self.run.device):
            write_preview(self.run, self.test_data, self.directory, self.step)

    def save(self) -> bool:
        """Write a checkpoint and return True; where something in it is not finite, roll back instead and return
        False.
        """
        with self.peaks.beside_steps(self.run.device):
            state = capture(self.run)
            bad = first_non_finite({"modules": state["modules"]})
        if bad is not None:
            recovery.refuse_poisoned_state(self, bad)
            return False
        state["loop"] = {
            "step": self.step,
            "seconds": self.seconds,
            "skipped": dict(self.skipped),
            "sums": self.sums,
            "counts": dict(self.counts),
            "best": self.best,
            "best_step": self.best_step,
            "last_metrics": self.last_metrics,
            "scales_seen": dict(self.scales_seen),
            "memory": self.memory,
            "unmeasured": sorted(self.unmeasured),
            "adapted": dict(self.run.adapted),
        }
        checkpoint.save(
            self.directory,
            self.step,
            state,
            keep_last=self.train.keep_last,
            metric=self.last_metrics.get(self.run.task.metric),
            higher_is_better=self.run.task.higher_is_better,
            extra_manifest={"conditions": conditions(self.run)},
        )
        self.recorder.sync()
        return True

    def load(self, loaded: checkpoint.LoadedCheckpoint) -> None:
        """Put a loaded checkpoint into the run and the counters."""
        restore(self.run, loaded.state)
        loop = loaded.state["loop"]
        self.step, self.seconds_before = loop["step"], loop["seconds"]
        self.started = time.perf_counter()
        self.skipped = {**self.skipped, **loop["skipped"]}
        self.sums = {name: value.to(self.run.device) for name, value in loop["sums"].items()}
        self.counts = defaultdict(int, loop["counts"])
        self.best, self.best_step = loop["best"], loop["best_step"]
        self.last_metrics = dict(loop["last_metrics"])
        self.scales_seen = dict(loop["scales_seen"])
        self.memory, self.unmeasured = dict(loop["memory"]), set(loop.get("unmeasured", ()))
        again = move_again(self.run, loop.get("adapted", {}))
        if again:
            settings = ", ".join(f"memory.{name}={value}" for name, value in again.items())
            self.event("adapted", f"as before the checkpoint, out of memory: {settings}", **again)
            self.console.message(f"memory ran out before, so as then: {settings}")

    @property
    def seconds(self) -> float:
        """Wall seconds of training so far, over all resumes."""
        return self.seconds_before + time.perf_counter() - self.started

    def event(self, kind: str, message: str, **details: Any) -> None:
        """Record something that happened."""
        self.recorder.write_event(self.step, kind, {"message": message, **details})

    def warn(self, message: str) -> None:
        """Record and show a warning."""
        self.event("warning", message)
        self.console.warning(message)

    def write_summary(self) -> None:
        """Write summary.json: what comparisons and reports read first."""
        run = self.run
        times = self.step_seconds if run.device.type == "cpu" else self.window_seconds
        median = statistics.median(times) if times else None
        summary = {
            "metric": run.task.metric,
            "higher_is_better": run.task.higher_is_better,
            "final": self.last_metrics.get(run.task.metric),
            "best": self.best,
            "best_step": self.best_step,
            "steps": self.step,
            "total_steps": self.total_steps,
            "median_step_seconds": median,
            "samples_per_second": self.train.batch_size / median if median else None,
            "peak_memory": {**self.measured_memory(), **outside_bytes(run.device)},
            "skipped": dict(self.skipped),
            "precision": {
                "mode": run.precision.name,
                "dtype": str(run.precision.dtype).removeprefix("torch."),
                "reason": run.precision.reason,
            },
            "wall_seconds": self.seconds,
            "parameters": parameter_count(list(run.task.trainable.values())),
        }
        text = json.dumps(tidy(summary), indent=1, allow_nan=False)
        self.directory.summary_path.write_text(text + "\n", "utf-8")


def conditions(run: Run) -> dict[str, Any]:
    """Return what must not change if a resume is to be bit-exact."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "workers": run.config.dataset.settings.workers,
        "precision": run.config.precision.mode,
        "dtype": str(run.precision.dtype).removeprefix("torch."),
        "device": run.device.type,
        **({"gpu": torch.cuda.get_device_name(run.device)} if run.device.type == "cuda" else {}),
        "batch_size": run.config.train.batch_size,
        "seed": run.config.seed,
    }
