"""One training in progress: the built run, its folder, its counters and its journal, and operations on them.

The order of operations is the loop's affair (`mpt.engine.loop.loop`); here are its side jobs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from mpt import accelerator
from mpt.boards.boards import Boards
from mpt.boards.console import Console
from mpt.data.loading.fingerprint import Fingerprint, combine
from mpt.data.loading.loader import Loader, prefetch
from mpt.engine.loop.plan_notice import PlanNotice
from mpt.engine.loop.rank_times import RankTimes
from mpt.engine.loop.saving import CheckpointSaver
from mpt.engine.recovery.collapse import ADVICE, CollapseWatch
from mpt.engine.recovery.ladder import move_again
from mpt.engine.recovery.out_of_memory import MemoryLadder
from mpt.engine.recovery.recent_states import RecentStates
from mpt.engine.recovery.remedies import Remedies
from mpt.engine.recovery.scale_watch import ScaleWatch
from mpt.engine.recovery.standstill import Standstill
from mpt.engine.state.details import write_details
from mpt.engine.state.device_use import DeviceUse
from mpt.engine.state.early_stopping import Rule
from mpt.engine.state.evaluation import counted_samples, evaluate, write_preview
from mpt.engine.state.journal import Journal
from mpt.engine.state.memory import AllocatorPeaks
from mpt.engine.state.progress import Periods, Progress, due, next_due
from mpt.engine.state.spill_watch import SpillWatch
from mpt.engine.state.state import capture, restore
from mpt.engine.step.rank_inputs import gathers_inputs, inputs_of
from mpt.engine.step.step import Update
from mpt.optim.shared.carry_over import Carried
from mpt.optim.shared.schedules import set_learning_rates
from mpt.parallel.world import ALONE, World
from mpt.run.checkpoints import checkpoint
from mpt.run.checkpoints.state_checks import first_non_finite_on_ranks
from mpt.run.records.layout import RunDirectory
from mpt.run.records.recorder import Recorder, last_test_set
from mpt.run.records.samples import thin
from mpt.run.records.skipped_files import write_skipped_files
from mpt.seams import Batch, Dataset, DataSpec, Game, Plateau, Run, TakesUpdates, loss_scales


class Training:
    """Everything that the loop works on. Attributes that are not in `progress` begin anew at a resume."""

    def __init__(
        self,
        run: Run,
        directory: RunDirectory,
        recorder: Recorder,
        console: Console,
        loader: Loader,
        test_data: Dataset,
        total_steps: int,
        boards: Boards,
    ) -> None:
        self.run, self.directory, self.loader, self.test_data = run, directory, loader, test_data
        self.total_steps, self.train = total_steps, run.config.train
        self.periods = Periods.of(self.train, total_steps, loader.steps_per_epoch)
        self.progress = Progress(skipped={phase.name: 0 for phase in run.phases})
        # the meter cannot look into shards
        if run.device.type == "cpu" and not run.world.is_sharded:
            self.progress.unmeasured.update(phase.name for phase in run.phases)
        self.early_stopping = (
            Rule(self.train.early_stopping, run.task) if self.train.early_stopping else None
        )
        self.plateau = run.task if isinstance(run.task, Plateau) else None
        self.plan_notice = PlanNotice(run.config, run.device.type, directory.plan_path)
        self.journal = Journal(recorder, console, self.progress, boards)
        self.ladder = MemoryLadder(run, self.journal)
        self.watches = {phase.name: ScaleWatch(phase.name) for phase in run.phases}
        self.standstill = Standstill(run, self.train.log_every)
        self.peaks = AllocatorPeaks()
        self.test_set: str | None = None
        """A hash of the test set's samples; None before the first evaluation in this process."""
        self.evaluated_step: int | None = None
        """The step of the last evaluation in this process."""
        self.rollbacks = 0
        self.remedies = Remedies()
        self.recent = RecentStates(self.train.recent_states, self.train.recent_every, run.world)
        self.collapse_watch = CollapseWatch.of(run)
        self.collapse: str | None = None
        """How the training has collapsed, as it was seen at this step."""
        self.sound_step: int | None = None
        """The last step at which it was looked for and had not, or that a resume began from."""
        self.skipped_files = 0
        """Bad files of the data set that were skipped."""
        self.non_finite_in_a_row = 0
        self.saver = CheckpointSaver(run, directory, self.journal)
        self.whole_steps = 0
        """Steps in this process in which no phase was skipped, counted while there are phases to be tracked."""
        self.grad_norms: dict[str, Tensor] = {}
        """The norms of the last measured gradients by phase, on the device until they are logged."""
        self.last_losses: dict[str, float] = {}
        self.rank_times = RankTimes(run.world, self.journal)
        self.spill_watch = SpillWatch(run.device)
        self.device_use = DeviceUse(run.device)
        self.step_seconds: list[float] = []
        self.window_seconds: list[float] = []
        """Seconds per step of each logged window. Reading its losses waits for the device: on a GPU these are true."""

    @property
    def is_over(self) -> bool:
        """Is nothing left to train: the last step is done, or evaluations have got no better for long enough?"""
        return self.progress.step >= self.total_steps or self.stops_early

    @property
    def stops_early(self) -> bool:
        """Have evaluations got no better for long enough?"""
        return self.early_stopping is not None and self.early_stopping.is_over(
            self.progress.waiting
        )

    @property
    def is_logged(self) -> bool:
        """Does the step under way end with a line in the log?"""
        done = self.progress.step + 1
        return done % self.train.log_every == 0 or done == self.total_steps

    def next_side_job(self) -> int:
        """Return the next step after which there is something to do but the following step."""
        periods = self.periods
        jobs = (self.train.log_every, periods.evaluate, periods.sample, periods.checkpoint)
        return next_due(
            self.progress.step,
            (*jobs, self.recent.every, self.collapse_watch.every),
            self.total_steps,
        )

    def stream(self) -> Iterator[Batch]:
        """Return the batches from the current step on."""
        run, batches = self.run, self.loader.batches(self.progress.step)
        if run.config.dataset.settings.workers:
            self.saver.finish()  # the workers are forked at the first batch
        if not gathers_inputs(run):
            return prefetch(batches, run.device, run.data)
        # as they are stored, a quarter of the bytes to send
        parts = prefetch(batches, run.device, DataSpec({}, 0))
        return (inputs_of(run, part, self.train.batch_size) for part in parts)

    def set_learning_rates(self) -> None:
        """Set this step's rate in every parameter group."""
        run = self.run
        factor = 1.0 if self.plateau is None else self.plateau.rate_factor
        if self.remedies.rate != 1.0:
            factor *= self.remedies.rate_at(self.progress.step)
        set_learning_rates(
            run.optimizers, run.optimizer_settings, self.progress.step, self.total_steps, factor
        )

    def count(self, phase: str, done: Update) -> None:
        """Add up losses, count a skipped step and record changes of the loss scale."""
        progress, stats, scale = self.progress, done.stats, done.stats.scale
        progress.add_losses(phase, done)
        if done.figures.sums:
            progress.add_figures(phase, done)
        if stats.grad_norm is not None:
            self.grad_norms[phase] = stats.grad_norm
        if stats.skipped:
            progress.skipped[phase] += 1
            kind = "overflow" if scale is not None else "skipped"
            self.journal.event(
                kind, f"step {progress.step} of {phase} was skipped", phase=phase, scale=scale
            )
        if scale is None:
            return
        previous = progress.scales_seen.get(phase)
        if previous is not None and scale != previous:
            message = f"{phase}: loss scale {previous:.10g} -> {scale:.10g}"
            self.journal.event("scale", message, phase=phase, scale=scale)
        progress.scales_seen[phase] = scale
        warning = self.watches[phase].observe(
            progress.step, scale, previous is not None and scale < previous
        )
        if warning:
            self.journal.warn(warning)

    def log(self, window_started: float, window_steps: int) -> None:
        """Write and show one line: mean losses since the last, rates, scales, memory."""
        self.last_losses = self.progress.take_means(self.run.world)
        logged = self.progress.take_figures(self.run.world)
        seconds = (time.perf_counter() - window_started) / max(window_steps, 1)
        self.window_seconds.append(seconds)
        norms = {phase: float(norm) for phase, norm in self.grad_norms.items()}
        self.grad_norms, memory = {}, self.measured_memory()
        self.journal.row(
            {
                "seconds": self.progress.seconds,
                "losses": self.last_losses,
                **({"logged": logged} if logged else {}),
                "lr": {
                    name: optimizer.param_groups[0]["lr"]
                    for name, optimizer in self.run.optimizers.items()
                },
                "scale": loss_scales(self.run.precision),
                **({"grad_norm": norms} if norms else {}),
                **self.collapse_watch.to_record(),
                "skipped": dict(self.progress.skipped),
                "step_seconds": seconds,
                "samples_per_second": self.train.batch_size / seconds,
                "memory": memory,
                **self.device_use.look(),
                **self.rank_times.take(seconds, window_steps, memory.get("peak_bytes", 0)),
            }
        )
        for message in self.standstill.take():
            self.journal.warn(message, "standstill")
        for trick in self.run.tricks:
            while isinstance(trick, TakesUpdates) and trick.news:
                self.journal.event(trick.name, trick.news[0])
                self.journal.say(trick.news.pop(0))
        self.advise(self.last_losses)
        signs = self.collapse_watch.look_at_line(
            self.progress.step, self.last_losses, loss_scales(self.run.precision)
        )
        self.note_collapse(signs)
        if (spill := self.spill_watch.look(seconds)) is not None:
            self.journal.warn(spill[0], "spill", **spill[1])
        if (plan := self.plan_notice.take()) is not None:
            self.journal.say(plan)

    def measured_memory(self) -> dict[str, Any]:
        """Return the peak so far as a row for the log: the allocator's on a GPU, elsewhere the tracked one."""
        if not accelerator.has_allocator(self.run.device):
            return dict(self.progress.memory)
        self.peaks.count_steps(self.run.device)
        return self.peaks.to_record(self.run.device)

    def advise(self, figures: dict[str, float], *, is_evaluation: bool = False) -> None:
        """Show the task's remarks on these losses or metrics, and note whether they show a collapse."""
        for message in self.run.task.advise(figures):
            self.journal.warn(message)
        task = self.run.task
        found = (
            task.collapse(figures)
            if isinstance(task, Game) and self.train.on_collapse == "rollback"
            else None
        )
        if found is not None:
            self.collapse = found
        elif (is_evaluation or not self.periods.evaluate) and self.collapse_watch.is_quiet:
            self.sound_step = self.progress.step

    def look_at_samples(self) -> None:
        """Look, now and then, whether the samples of a game between networks are all alike."""
        step = self.progress.step
        if due(step, self.collapse_watch.every):
            with self.peaks.beside_steps(self.run.device):
                self.note_collapse(
                    self.collapse_watch.look_at_samples(self.run, step, self.test_data)
                )

    def note_collapse(self, signs: Mapping[str, str]) -> None:
        """Record signs of a collapse that have lasted, each once until the run has been rolled back."""
        for kind, text in signs.items():
            if self.train.on_collapse == "rollback":
                self.collapse = text
            if self.collapse_watch.is_new(kind):
                self.journal.warn(
                    f"{text}: {ADVICE[kind]}",
                    "collapse",
                    sign=kind,
                    **self.collapse_watch.to_record(),
                )

    def evaluate(self) -> None:
        """Evaluate on the test set and remember the best."""
        task = self.run.task
        self.progress.owed_step = self.progress.step
        with self.peaks.beside_steps(self.run.device):
            fingerprint = Fingerprint() if self.test_set is None else None
            figures = evaluate(self.run, self.test_data, self.train.batch_size, fingerprint)
        for files in filter(None, self.run.world.gather(dict(self.test_data.bad_files))):
            self.test_data.pass_over(files)
        if fingerprint is not None:
            self.note_test_set(fingerprint)
        self.progress.last_metrics = figures
        self.progress.note_figure(figures[task.metric], task.higher_is_better)
        self.evaluated_step, self.progress.owed_step = self.progress.step, None
        assert self.test_set is not None
        about = {"test_samples": self.tested, "test_set": self.test_set, "metric": task.metric}
        self.journal.evaluation(figures, {**about, "higher_is_better": task.higher_is_better})
        if self.plateau is not None:
            self.plateau.after_evaluation(figures)
        if self.early_stopping is not None:
            self.early_stopping.observe(self.progress.waiting, figures, self.progress.step)
        self.advise(figures, is_evaluation=True)
        if (
            self.train.on_collapse == "rollback"
            and self.collapse is None
            and self.collapse_watch.is_quiet
        ):
            self.recent.keep_sound(self.progress.step, self.state_in_memory())
        if task.details is not None and self.run.world.is_first:
            file = self.directory.path / "evaluation.json"
            details = write_details(file, task.details, self.progress.step, self.test_data)
            self.journal.boards.evaluation(self.progress.step, details)

    @property
    def tested(self) -> int:
        """The number of test samples that an evaluation counts."""
        return len(counted_samples(self.test_data))

    def note_test_set(self, fingerprint: Fingerprint) -> None:
        """Keep the hash of the test set; warn if an evaluation before a resume had another one."""
        self.test_set = combine(self.run.world.collect(fingerprint.value))
        before = last_test_set(self.directory) if self.run.world.is_first else None
        if before is not None and before != self.test_set:
            self.journal.warn(
                "the test set holds other samples than at the last evaluation, so their figures cannot be compared",
                "test_set",
            )

    def write_preview(self) -> None:
        """Write the samples of this step, if the task makes any."""
        if not self.run.world.is_first and not self.run.world.is_sharded:
            return
        with self.peaks.beside_steps(self.run.device):
            picture = write_preview(self.run, self.test_data, self.directory, self.progress.step)
        if picture is not None:
            keep, step = self.train.keep_samples, self.progress.step
            stays = keep is None or thin(self.directory, step, self.periods.sample, keep)
            if stays or self.is_over:
                self.journal.picture(picture)

    def save(self) -> str | None:
        """Write a checkpoint, or begin to if that happens during the training (`saver.finish` waits for it).

        If something in it is not finite, write nothing and return its name.
        """
        self.saver.finish()
        self.progress.add_over_ranks(self.run.world)
        if self.run.world.size > 1:
            self.progress.add_figures_over_ranks(self.run.world)
        with self.peaks.beside_steps(self.run.device):
            state = capture(self.run)
            bad = first_non_finite_on_ranks({"modules": state["modules"]}, self.run.world)
        if bad is None:
            state["loop"] = self.loop_record()
            is_of_this_step = self.evaluated_step == self.progress.step
            metric = (
                self.progress.last_metrics.get(self.run.task.metric) if is_of_this_step else None
            )
            self.saver.start(self.progress.step, state, metric)
        return bad

    def loop_record(self) -> dict[str, Any]:
        """Return a state's entries in addition to the run's."""
        adapted = dict(self.run.adaptation.changes)
        return {
            **self.progress.to_record(),
            "adapted": adapted,
            "remedies": self.remedies.to_record(),
        }

    def keep_recent(self) -> None:
        """Keep a copy of the state to roll back to, if it is finite."""
        self.recent.keep(self.progress.step, self.state_in_memory())

    def state_in_memory(self) -> dict[str, Any]:
        """Return this process's own state; tensors are not copied."""
        return {**capture(self.run), "loop": self.loop_record()}

    def load(self, loaded: checkpoint.LoadedCheckpoint) -> dict[str, Carried]:
        """Put a loaded checkpoint into the run and the counters, and return which optimizers have changed since."""
        self.saver.newest = loaded.step
        return self.put_back(loaded.state, self.run.world)

    def put_back(self, state: Mapping[str, Any], world: World = ALONE) -> dict[str, Carried]:
        """Put a state into the run and the counters: this process's own, or that of all in a `world`."""
        changed = restore(self.run, state)
        loop = state["loop"]
        self.progress.restore(loop, self.run.device, world)
        self.grad_norms = {}
        self.sound_step = min(
            self.progress.step, self.progress.step if self.sound_step is None else self.sound_step
        )
        self.collapse, self.collapse_watch = None, CollapseWatch.of(self.run)
        self.remedies = Remedies.from_record(loop.get("remedies", {}))
        self.remedies.apply_again(self.run)
        again = move_again(self.run, loop.get("adapted", {}))
        if again:
            settings = ", ".join(f"memory.{name}={value}" for name, value in again.items())
            self.journal.event(
                "adapted", f"as before the checkpoint, out of memory: {settings}", **again
            )
            self.journal.say(f"memory ran out before, so as then: {settings}")
        return changed

    def list_skipped_files(self) -> None:
        """Write the bad files that were skipped so far, by any rank and before a resume, to a file of the run."""
        datasets = (self.loader.dataset, self.test_data)
        own = {path: reason for data in datasets for path, reason in data.bad_files.items()}
        of_ranks = self.run.world.gather(own)
        if self.run.world.is_first:
            found = {path: reason for one in of_ranks for path, reason in one.items()}
            self.skipped_files = write_skipped_files(self.directory, found)

    def early_end(self) -> dict[str, str]:
        """Return why the training ended before its last step, for the summary; nothing if it did not."""
        if (
            self.early_stopping is None
            or not self.stops_early
            or self.progress.step >= self.total_steps
        ):
            return {}
        return {"stopped_early": self.early_stopping.explain(self.progress.waiting)}

    def tell_early_end(self) -> None:
        """Say that the training ended before its last step, and why."""
        for why in self.early_end().values():
            self.journal.event("stopped_early", why)
            self.journal.say(
                f"stopped early at step {self.progress.step} of {self.total_steps}: {why}"
            )
