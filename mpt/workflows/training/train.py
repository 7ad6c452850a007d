"""A training from a configuration to a finished run directory: the work of `mpt train` and `mpt.train`.

Everything a user can get wrong is met before the first step: the configuration, the device, the data, the checkpoint
to continue from. After that the loop saves before it stops, whatever stops it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpt.boards.console import Console, Style
from mpt.config.schema import Config
from mpt.engine.building.torch_settings import prepare_torch
from mpt.errors import ConfigError, DataError, MemoryBudgetError, MptError
from mpt.planner.recipes.patch_origin import find_other_cards
from mpt.run.process.collector import collect_as_usual
from mpt.run.records.ending import has_report_of, has_summary_of
from mpt.run.records.layout import THROWN_AWAY, RunDirectory
from mpt.run.records.temporary import temporary_folder
from mpt.workflows.training.retry import BY_COMMAND, Retry

if TYPE_CHECKING:
    import torch

    from mpt.engine.loop.training import Training
    from mpt.parallel.world import World


def train(
    config: Config,
    *,
    runs: Path = Path("runs"),
    resume_from: str | None = None,
    exact: bool = False,
    style: Style = "quiet",
    reports: bool = True,
    dry_run: bool = False,
    stop_after: int | None = None,
    retry: Retry = BY_COMMAND,
    world: World | None = None,
) -> Path | None:
    """Build, restore if asked, train, report. Return the run's folder, or None after a dry run.

    `resume_from` is "auto", a run or a checkpoint; `retry` gives the proposal if memory runs out. Of several
    processes all train, and the first one writes and speaks.
    """
    prepare_torch(config)
    from mpt import accelerator
    from mpt.engine.building.start_notes import untested_classes
    from mpt.engine.loop.assembly import build_explained, open_training, supply
    from mpt.engine.loop.rank_agreement import check_alike
    from mpt.engine.loop.resume import begin, find_run_to_resume, make_directory
    from mpt.parallel.world import ALONE
    from mpt.run.checkpoints.retention import clean_temporaries
    from mpt.run.records.recorder import Recorder
    from mpt.seams.task_members import require_hook
    from mpt.workflows.training.data_warnings import look_first
    from mpt.workflows.training.memory_ceiling import set_ceiling
    from mpt.workflows.training.start_summary import summarize

    world = world or ALONE
    supplied = supply(config, world)
    device, data = supplied.device, supplied.train_data
    with open_console(style, supplied.total_steps, world) as console:
        ceiling = set_ceiling(config.memory.ceiling, device)
        found, source = world.ask(lambda: find_run_to_resume(config, resume_from, runs, console))
        built = build_explained(config, device, data.spec, restores=source is not None, world=world)
        require_hook(built.task, "conclude", "an evaluation's figures")
        check_alike(built, data, supplied.test_data)
        for line in (*summarize(built, supplied), *([ceiling] if ceiling else [])):
            console.message(line)
        for message in built.messages:
            console.message(message)
        untested = untested_classes(supplied.test_data.spec)
        is_own = config.dataset.plugin.package.outside
        strange = look_first(data, supplied.test_data) if is_own else []
        for note in (*built.notes, *untested, *strange, *strange_cards(retry.patches, device)):
            console.warning(note)
        if dry_run:
            from mpt.engine.step.shared_graphs import check_graphs

            if (untried := check_graphs(built)) is not None:
                console.warning(untried)
            console.message("dry run: everything builds; nothing was written")
            return None
        directory = found or world.ask(lambda: make_directory(config, runs, console))
        with (
            removed_unbegun(directory, is_new=found is None and world.size == 1),
            written_by(world, directory) as (taken_over, records),
            Recorder(records) as recorder,
        ):
            for note in ([taken_over] if taken_over else []) + (
                clean_temporaries(directory) if world.is_first else []
            ):
                console.message(note)
            training = open_training(built, supplied, directory, recorder, console)
            if source is not None:
                if not go_on_from(training, source, exact):
                    world.ask(lambda: finish_again(training, reports))
                    return Path(directory.path)
                if directory.report_path("json").exists():
                    world.ask(lambda: renew_report(training))
            else:
                world.ask(lambda: begin(training))
            accelerator.reset_peaks(device)
            if not world.is_first:
                go(training, retry, stop_after)
                return Path(directory.path)
            draw_for_boards(training)
            from mpt.planner.server.beside import plan_beside
            from mpt.workflows.training.on_end import end_told

            planning = plan_beside(
                config, data.spec, device, directory.plan_path, config.granted, world
            )
            with end_told(training), planning as plan:
                go(training, retry, stop_after)
                tell_skipped_files(training)
                if training.is_over:
                    plan.wait()
                finish(training, reports)
    return Path(directory.path)


def draw_for_boards(training: Training) -> None:
    """Let the boards of a training have drawings too. Without boards matplotlib is not imported."""
    if training.journal.boards.open:
        from mpt.report.run_page import board_pictures

        training.journal.boards.artist = board_pictures


def strange_cards(patches: Sequence[Path], device: torch.device) -> list[str]:
    """Return a sentence for each patch that was planned for another card than this one."""
    if not patches or device.type != "cuda":
        return []
    import torch

    from mpt.planner.facts.gpus import installed_gpu

    card = torch.cuda.get_device_properties(device)
    gpu = installed_gpu(card.name, card.total_memory, (card.major, card.minor))
    return find_other_cards(patches, gpu.name, gpu.usable_bytes)


def go_on_from(training: Training, source: RunDirectory | Path, exact: bool) -> bool:
    """Load a checkpoint into the training of every rank; return False if it is of a run that is complete."""
    from mpt.engine.loop.resume import resume
    from mpt.run.checkpoints import checkpoint

    world = training.run.world
    loaded = checkpoint.load(source, world)
    goes_on = world.ask(lambda: resume(training, loaded, exact))
    if not world.is_first:
        training.load(loaded)
    return goes_on


@contextlib.contextmanager
def open_console(style: Style, total_steps: int, world: World) -> Iterator[Console]:
    """Give the console; that of a process that is not the first says nothing."""
    if world.is_first:
        with Console(style, total_steps) as console:
            yield console
        return
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        Console("quiet", total_steps, nowhere) as console,
    ):
        yield console


@contextlib.contextmanager
def removed_unbegun(directory: RunDirectory, *, is_new: bool) -> Iterator[None]:
    """Remove a new run's folder if its data could not be read before its first step was taken: it holds nothing."""
    from mpt.run.checkpoints.retention import list_steps

    try:
        yield
    except DataError:
        lines = directory.metrics_path
        has_lines = lines.is_file() and lines.stat().st_size > 0
        if is_new and not has_lines and not any(list_steps(directory)):
            shutil.rmtree(directory.path, ignore_errors=True)
        raise


@contextlib.contextmanager
def written_by(world: World, directory: RunDirectory) -> Iterator[tuple[str | None, RunDirectory]]:
    """Hold the run's folder on the first process; on the others give a folder for records that nobody reads."""
    if world.is_first:
        with directory.hold() as taken_over:
            yield taken_over, directory
        return
    with temporary_folder("mpt-rank-") as folder:
        yield None, RunDirectory(folder)


def go(training: Training, retry: Retry, stop_after: int | None) -> None:
    """Train until the end. Raises MemoryBudgetError with a report when memory runs out for good."""
    from mpt.engine.loop.loop import fit
    from mpt.engine.step.faults import (
        describe_out_of_memory,
        is_out_of_memory,
        out_of_memory_reason,
    )
    from mpt.run.process.signals import StopRequest

    collect_as_usual()
    world = training.run.world
    world.watch_over(lambda text: record_lost(training, text))
    try:
        with StopRequest() as stop:
            try:
                fit(training, stop, stop_after)
                training.journal.boards.plots(training.progress.step, training.directory.path)
            except BaseException as error:
                world.ending(error)
                raise
            finally:
                training.journal.close(lambda: stop.requested)
        return
    except MemoryBudgetError as error:
        message = str(error)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            explained = explain_device(error, training)
            if explained is None:
                raise
            raise explained from error
        where = f"at step {training.progress.step}, outside the update: while loading, evaluating or saving"
        message = describe_out_of_memory(where, out_of_memory_reason(error))
    if not world.is_first:
        raise MemoryBudgetError(message)
    # Past the except blocks: a traceback would go on holding the tensors that filled the memory.
    from mpt.workflows.training.out_of_memory_report import add_report

    raise MemoryBudgetError(add_report(message, training, retry))


def explain_device(error: RuntimeError, training: Training) -> MptError | None:
    """Explain a failure of CUDA other than memory, None for an unknown one."""
    from mpt.engine.step.faults import NO_ENGINE
    from mpt.workflows.training.blocking_rerun import ASSERT, explain_assert

    if NO_ENGINE in str(error):
        return ConfigError(
            f"cuDNN has no kernel for a convolution at step {training.progress.step} ({str(error).strip()}), and the "
            "card has memory left, so that smaller batches would not help: its dtype or layout is the reason. Leave "
            "out memory.channels_last, or try another precision, such as fp32"
        )
    return explain_assert(training) if ASSERT in str(error) else None


def record_lost(training: Training, text: str) -> None:
    """Note in the run's events that another process was lost. The recorder may be closed by now, or in use."""
    from mpt.run.records.recorder import LineFile

    line = {
        "kind": "rank_lost",
        "step": training.progress.step,
        "time": time.time(),
        "message": text,
    }
    with contextlib.suppress(MptError, OSError):
        file = LineFile(training.directory.events_path)
        file.append(line)
        file.close()


def tell_skipped_files(training: Training) -> None:
    """Say how many files could not be read and were skipped, if a data set was allowed to."""
    count = training.skipped_files
    if count:
        many = "file was" if count == 1 else "files were"
        training.journal.warn(
            f"{count} bad {many} skipped, see {training.directory.skipped_files_path}"
        )


def finish(training: Training, reports: bool) -> None:
    """Write the report; a report that fails is a warning, never a lost run."""
    directory, console, progress = training.directory, training.journal.console, training.progress
    if not training.is_over:  # a smoke run's first half
        console.message(f"stopped after step {progress.step}, to be resumed")
        return
    tested = training.tested
    if not reports:
        console.message(closing_line(progress.last_metrics, progress.seconds, None, tested))
        return
    from mpt.report.reading.read_run import read_run
    from mpt.report.run_page.page import write_report
    from mpt.report.units import show_bytes

    page = page_to_tell(directory)
    try:
        write_report(Path(directory.path))
    except (MptError, OSError, ValueError) as error:
        console.warning(f"the report could not be written: {error}")
        page = None
    else:
        record = read_run(Path(directory.path))
        if record.plan and record.not_planned:
            console.message(f"memory: the plan is not compared: {record.not_planned}")
        for row in record.planned:
            planned, measured = show_bytes(row.planned), show_bytes(row.measured)
            console.message(
                f"memory {row.name}: planned {planned}, measured {measured} ({row.error:+.1%})"
            )
    console.message(closing_line(progress.last_metrics, progress.seconds, page, tested))


def page_to_tell(directory: RunDirectory) -> Path | None:
    """Return the report's page, None if the run's folder is thrown away (`mpt train --smoke`)."""
    return (
        None
        if directory.path.parent.name.startswith(THROWN_AWAY)
        else directory.path / "report.html"
    )


def closing_line(
    metrics: Mapping[str, float], seconds: float, page: Path | None, tested: int
) -> str:
    """Return the last line of a training, whose figures are of that many test samples.

    A run that was stopped before its first evaluation has no metrics.
    """
    figures = (
        "".join(f" {name} {value:.4g} " for name, value in metrics.items()) or " not evaluated yet "
    )
    on = f" on {tested} test samples" if metrics else ""
    return f"done:{figures}{on} ({seconds:.0f} s)" + (f"  report {page}" if page else "")


def renew_report(training: Training) -> None:
    """Write an earlier end's report anew, so that it says that the run continues; a failure is a warning."""
    from mpt.report.run_page.page import write_report

    try:
        write_report(training.directory.path)
    except (MptError, OSError, ValueError) as error:
        training.journal.console.warning(f"the report of the earlier end is still there: {error}")


def finish_again(training: Training, reports: bool) -> None:
    """Write the files that a run lacks if it was killed between its last checkpoint and its end."""
    from mpt.engine.loop.summary import write_summary

    directory, step = training.directory, training.progress.step
    if step > training.total_steps:  # fewer were asked for now, which is not what this run ends at
        return
    whole = has_summary_of(directory, step)
    if not whole:
        write_summary(training)
    if not whole or (reports and not has_report_of(directory, step)):
        finish(training, reports)
