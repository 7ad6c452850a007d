"""Evaluation, previews and inference: the same samples every time, without disturbing the training.

A task only computes (`Task.evaluate_batch`, `preview`, `infer`). The modes around it are entered here: networks in
evaluation mode, no gradients, the precision mode's forward, random numbers of their own. A task that forgets one of
these cannot change BatchNorm's statistics or the training's random numbers.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from mpt import accelerator
from mpt.data.loading.fingerprint import Fingerprint
from mpt.data.loading.groups import cut
from mpt.data.loading.loader import Loader, to_device
from mpt.data.pictures.images import write_grid
from mpt.data.pictures.seeds import mix
from mpt.engine.state.averages import averaged
from mpt.engine.state.moving_averages import averages_in_place
from mpt.engine.step.built_parts import check_evidence, check_figures, require
from mpt.metrics.shared.choice import measure_all, metrics_of, refuse_taken
from mpt.run.records.layout import RunDirectory
from mpt.seams import Batch, BetweenSteps, Dataset, Evidence, Inference, Legend, Run, Samples
from mpt.seams.phase_losses import arithmetic_of
from mpt.seams.task_kinds import evaluation_samples


@contextlib.contextmanager
def apart_from_training(run: Run) -> Iterator[None]:
    """Put the networks in evaluation mode, with the weights to evaluate, and switch gradients off.

    Training weights, training modes and random generators come back.
    """
    roots = [*run.task.modules.values(), *run.task.trainable.values()]
    modes = {module: module.training for root in roots for module in root.modules()}
    random_state = accelerator.random_state(run.device)
    try:
        for root in roots:
            root.eval()
        with contextlib.ExitStack() as stack, torch.no_grad(), torch.random.fork_rng(devices=[]):
            stack.enter_context(averaged(run))
            stack.enter_context(averages_in_place(run))
            for trick in run.tricks:
                if isinstance(trick, BetweenSteps):
                    stack.enter_context(trick.beside_steps())
            seed_for(run, run.config.seed)
            yield
    finally:
        if random_state is not None:
            accelerator.set_random_state(run.device, random_state)
        for module, training in modes.items():
            module.training = training


def seed_for(run: Run, seed: int) -> None:
    """Seed the generators on the run's device.

    `torch.manual_seed` also keeps a formatted stack for each kind of device that is not in use: a twentieth of the time
    that a small network's evaluation takes.
    """
    if run.device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


@contextlib.contextmanager
def inferring(run: Run) -> Iterator[None]:
    """Enter all that a task's `preview` and `infer` may rely on."""
    with apart_from_training(run), arithmetic_of(run):
        yield


def infer(run: Run, batch: Batch | None, count: int) -> Inference:
    """Return the task's inference for a batch on the run's device, or for `count` samples; the same each time."""
    with inferring(run):
        made = run.task.infer(batch, count, run.config.seed)
    return require(f"task {run.config.task.name}: its infer", made, Inference)


def preview(run: Run, batch: Batch) -> torch.Tensor | None:
    """Return the tiles of the task's preview of a batch on the run's device."""
    with inferring(run):
        return run.task.preview(batch)


def test_batches(
    run: Run, data: Dataset, batch_size: int, fingerprint: Fingerprint | None
) -> Iterator[Batch]:
    """Yield this rank's batches of the test set in order, on the run's device: alone, all of them.

    Without the samples that were found to be bad, but for a batch of nothing else, which is not counted. With sharded
    networks a forward needs all ranks, so all have as many: the last batch is repeated if necessary.
    """
    workers = run.config.dataset.settings.workers
    size = min(batch_size, len(data))
    loader = Loader(data, size, run.config.seed, workers, drop_last=False, shuffle=False)
    world = run.world
    batches, last = (
        loader.evaluation_batches(world.rank, world.size, is_even=world.is_sharded),
        len(loader.cuts) - 1,
    )
    for number, batch in zip(itertools.count(world.rank, world.size), batches):
        # beyond them the last one comes again
        if fingerprint is not None and number < loader.steps_per_epoch:
            fingerprint.add(loader.cuts[number].start, batch)
        yield to_device(
            without_bad(batch, data, loader.cuts[min(number, last)]), run.device, run.data
        )


def without_bad(batch: Batch, data: Dataset, samples: Sequence[int]) -> Batch:
    """Return a batch without the samples in whose place another one was given, the whole if there are no others."""
    kept = [place for place, index in enumerate(samples) if not data.is_left_out(index)]
    if not 0 < len(kept) < len(samples):
        return batch
    return {name: values[kept] for name, values in batch.items()}


def evaluate(
    run: Run, data: Dataset, batch_size: int, fingerprint: Fingerprint | None = None
) -> dict[str, float]:
    """Return the task's figures on the test set, whose samples are added to the fingerprint, if one is given."""
    size = min(batch_size, len(data))
    batches = test_batches(run, data, size, fingerprint)
    return evaluate_batches(run, batches, size, counted_batches(data, size))


def counted_batches(data: Dataset, size: int) -> Callable[[int], bool]:
    """Return whether a batch of that number, once it was read, is one of the test set's with a sample that is not
    bad.
    """
    cuts = cut(len(data), data.groups(), size)
    return lambda number: number < len(cuts) and not all(map(data.is_left_out, cuts[number]))


def counted_samples(data: Dataset) -> list[int]:
    """Return the samples that an evaluation counted: those that it did not find to be bad."""
    return [index for index in range(len(data)) if not (data.bad_files and data.is_left_out(index))]


def evaluate_batches(
    run: Run,
    batches: Iterable[Batch],
    chunk: int,
    counts: Callable[[int], bool] = lambda number: True,
) -> dict[str, float]:
    """Return the task's figures on batches that are on the run's device; it makes samples `chunk` at a time.

    Ranks share out the batches, of which `batches` are this one's, and the samples; the first one concludes. Batches
    that do not count were only computed so that no rank waits.
    """
    with apart_from_training(run), first_buffers(run), casts_kept(run):
        own, failure = [], None
        try:
            for at, found in gather_evidence(run, batches, chunk):
                if is_counted(run, at, counts):
                    own.append((at, found))
        except (Exception, SystemExit) as error:
            failure = error
        run.world.share_failure(failure)
        evidence = sorted(itertools.chain(*run.world.gather(own)), key=lambda one: one[0])
        return run.world.ask(lambda: conclude(run, [found for _, found in evidence]))


def conclude(run: Run, evidence: Sequence[Evidence]) -> dict[str, float]:
    """Return the task's figures and those of the metrics that its settings name."""
    figures = check_figures(run.task, run.task.conclude(evidence))
    metrics = metrics_of(run.config.task.settings)
    refuse_taken(metrics, figures)
    return figures | measure_all(metrics, evidence)


def is_counted(run: Run, at: tuple[int, int], counts: Callable[[int], bool]) -> bool:
    """Return whether evidence is of a batch that counts, or of one of the samples that the task makes."""
    kind, number = at
    return number < evaluation_samples(run.task) if kind else counts(number)


def casts_kept(run: Run) -> AbstractContextManager[None]:
    """Let autocast cast each weight once for all batches: it forgets them when its outermost block ends.

    This one is disabled, so that code between the blocks of the precision mode stays unchanged.
    Of sharded networks nothing is kept: whole weights are there for their own forward only.
    """
    if not run.world.is_sharded and torch.amp.is_autocast_available(run.device.type):
        return torch.autocast(run.device.type, enabled=False)
    return contextlib.nullcontext()


@contextlib.contextmanager
def first_buffers(run: Run) -> Iterator[None]:
    """Let all ranks evaluate with the first one's buffers, which are those that are saved."""
    if run.world.size == 1:
        yield
        return
    buffers = list(
        dict.fromkeys(buffer for module in run.task.modules.values() for buffer in module.buffers())
    )
    own = [buffer.clone() for buffer in buffers]
    run.world.spread(buffers)
    try:
        yield
    finally:
        for buffer, value in zip(buffers, own, strict=True):
            buffer.copy_(value)


def gather_evidence(
    run: Run, batches: Iterable[Batch], chunk: int
) -> Iterator[tuple[tuple[int, int], Evidence]]:
    """Yield the task's outputs for each batch and for its own samples, on the CPU, each with its place in the order.

    Random numbers depend on the seed and the batch's number alone, so that batches can be shared out.
    """
    rank, size = run.world.rank, run.world.size
    for number, batch in zip(itertools.count(rank, size), batches):
        seed_for(run, mix(run.config.seed, number))
        with arithmetic_of(run):
            evidence = check_evidence(run.task, run.task.evaluate_batch(batch), "evaluate_batch")
        yield (0, number), {name: value.cpu() for name, value in evidence.items()}
    if not isinstance(run.task, Samples):
        return
    count = run.task.evaluation_samples
    rounds = -(-count // (size * chunk)) * size * chunk if run.world.is_sharded else count
    for first in range(rank * chunk, rounds, size * chunk):
        seed_for(run, mix(run.config.seed, first))
        begin = min(first, count - 1)  # beyond the last one it is made again, for the other ranks
        with arithmetic_of(run):
            made = run.task.evaluate_samples(begin, min(chunk, count - begin))
            evidence = check_evidence(run.task, made, "evaluate_samples")
        yield (1, first), {name: value.cpu() for name, value in evidence.items()}


def write_preview(run: Run, data: Dataset, directory: RunDirectory, step: int) -> Path | None:
    """Write the task's preview grid for this step as a PNG, if the task has one; return the file."""
    count = min(len(data), run.config.train.batch_size)
    tiles = preview(run, to_device(data.fetch(list(range(count)), 0), run.device, run.data))
    if tiles is None or not run.world.is_first:
        return None
    directory.refuse_link()
    path = directory.samples / f"step-{step:08d}.png"
    # The folder was there at the start; a link planted in its place since then is not followed.
    columns = run.task.preview_columns if isinstance(run.task, Legend) else None
    write_grid(tiles, path, columns, follow_folder=False)
    return path
