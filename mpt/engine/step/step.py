"""The one training step. `mpt train` runs it on real tensors, `mpt plan` on fake ones.

A step is one `update` per phase. An update draws the random inputs for the whole batch, splits it into micro-batches,
and back-propagates each loss before the next is computed. Nothing here looks at a tensor's values but the finite
check (`mpt.engine.step.loss_watch`), which fake tensors skip.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from mpt.accelerator import has_allocator
from mpt.engine.step.built_parts import check_graph, check_losses
from mpt.engine.step.faults import fault_kind
from mpt.engine.step.loss_watch import LossWatch, all_finite
from mpt.engine.step.micro_batches import Normaliser, size_of, split, weigh
from mpt.engine.step.rank_inputs import draw_own, gathers_inputs
from mpt.engine.step.rank_random import RankRandom
from mpt.errors import ConfigError
from mpt.parallel.exchange import Exchange
from mpt.parallel.local import local
from mpt.parallel.world import Outcome, PeerFaultError, share
from mpt.seams import Batch, Phase, Run, StepStats, TakesUpdates, has_dynamic_scale
from mpt.seams.logged import Figures
from mpt.seams.phase_losses import draw_batch, entered, losses_of
from mpt.seams.questions import Questions


@dataclass
class Update:
    """The result of one phase's update: `stats` of the optimizer step, `losses` by name, still on the device."""

    stats: StepStats
    losses: dict[str, Tensor] = field(default_factory=dict)
    finite: bool = True
    """False when a loss was NaN or infinite and no scaler stood by: the optimizer did not step."""
    batch: Batch | None = None
    """Of an update whose step was skipped: the batch with its random inputs, for `whole_batch`."""
    samples: int = 0
    """The number of samples of all ranks' parts together, if `batch` is one of them."""
    figures: Figures = field(default_factory=Figures)
    """Values that the task and its networks logged, still on the device."""


def update(run: Run, phase: Phase, batch: Batch, *, is_logged: bool = False) -> Update:
    """Perform one phase's update on a batch, on ranks as `rank_inputs.inputs_of` gives it.

    The gradients' norm is measured if `is_logged`, and if they are clipped.
    """
    for trick in run.tricks:
        if isinstance(trick, TakesUpdates):
            done: Update = trick.update(
                phase, batch, is_logged, lambda *given: perform(run, phase, *given)
            )
            return done
    return perform(run, phase, batch, is_logged)


def perform(run: Run, phase: Phase, batch: Batch, is_logged: bool) -> Update:
    """Perform an update now, operator by operator."""
    drop_gradients(run, phase)
    # first: an update that fails may be repeated, see mpt.engine.recovery.out_of_memory
    run.buffers.remember()
    may_overflow = bool(run.precision.scalers) and has_dynamic_scale(run.precision, phase)
    watch = (
        LossWatch(run.device)
        if has_allocator(run.device) and not may_overflow and not Questions.open
        else None
    )
    samples, figures = 0, Figures()
    if run.world.size > 1:
        batch, samples, losses, is_finite = back_propagate_on_ranks(
            run, phase, batch, watch, figures
        )
    else:
        batch = draw_batch(run, phase, batch)
        losses = back_propagate(run, phase, batch, watch, figures=figures)
        is_finite = may_overflow or all_finite(losses, watch)
    if not is_finite:
        drop_gradients(run, phase)
        run.buffers.restore()
        return Update(StepStats(skipped=True), losses, finite=False, batch=batch, samples=samples)
    clip_norm = run.clip_norms[phase.name]
    if (
        is_logged
        and clip_norm is None
        and not any(trick.gradients == "consumed" for trick in run.tricks)
    ):
        clip_norm = math.inf
    if run.tricks:
        with entered([trick.step(phase) for trick in run.tricks]):
            stats = run.precision.step(phase, clip_norm)
    else:
        stats = run.precision.step(phase, clip_norm)
    if not stats.skipped:
        return Update(stats, losses, figures=figures)
    run.buffers.restore()
    return Update(stats, losses, batch=batch, samples=samples, figures=figures)


def whole_batch(run: Run, done: Update) -> Batch:
    """Return the whole batch of an update that was skipped, which ranks gather; all of them must ask."""
    assert done.batch is not None
    return run.world.whole(done.batch, done.samples) if done.samples else done.batch


def back_propagate(
    run: Run,
    phase: Phase,
    batch: Batch,
    watch: LossWatch | None = None,
    whole: int | None = None,
    exchange: Exchange | None = None,
    figures: Figures | None = None,
) -> dict[str, Tensor]:
    """Leave the gradient of a drawn batch's losses in the phase's weights; return them per sample, on the device.

    If the batch is one rank's part, of `whole` samples, `exchange` sums over the ranks. `figures` takes
    values logged meanwhile.
    """
    losses: dict[str, Tensor] = {}
    normaliser = (
        Normaliser(phase.least_weight, whole or size_of(batch), exchange)
        if phase.normalised
        else None
    )
    others = run.frozen[phase.name]
    for parameter in others:  # as `only` does, which would cost a phase without others as much
        parameter.requires_grad_(False)
    try:
        for part, share in split(batch, run.adaptation.micro_batch_size, whole):
            if normaliser is not None:
                normaliser.begin_part(size_of(part))
            done: list[str] = []
            for together in losses_of(run, phase, part, figures):
                try:
                    values = (
                        weigh(together, share)
                        if normaliser is None
                        else [normaliser.scale(loss) for loss in together]
                    )
                    value = sum(values[1:], values[0])
                    if watch is not None:
                        watch.look(value)
                    if exchange is not None:
                        exchange.before_backward()
                    if run.tricks:
                        with entered([trick.backward(phase) for trick in run.tricks]):
                            run.precision.backward(value, phase)
                    else:
                        run.precision.backward(value, phase)
                except (AttributeError, RuntimeError, TypeError) as error:
                    check_losses(together, phase)
                    check_graph(error, together, done, phase)
                    raise
                for loss, own in zip(together, values):  # `strict` takes longer
                    detached = own.detach()
                    if normaliser is None and loss.reduction == "sum":
                        # logged is the mean over samples
                        detached = detached / (whole or size_of(batch))
                    losses[loss.name] = (
                        losses[loss.name] + detached if loss.name in losses else detached
                    )
                    done.append(loss.name)
                # and the graph, before the next losses are computed
                del together, values, loss, own, value
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
    correction = None if normaliser is None else normaliser.correction()
    if correction is not None:
        run.world.settle()  # sharded gradients that are still to be summed
        correct(run.weights[phase.name], correction)
        losses = {name: value * correction for name, value in losses.items()}
    return losses


def correct(weights: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply the gradients of weights by a number on the device."""
    for weight in weights:
        if weight.grad is not None:
            gradient = local(weight.grad)
            # some are on the host (memory.stream_weights)
            gradient.mul_(factor.to(gradient.device))


def back_propagate_on_ranks(
    run: Run, phase: Phase, batch: Batch, watch: LossWatch | None, figures: Figures
) -> tuple[Batch, int, dict[str, Tensor], bool]:
    """Draw a batch, do this rank's part of it and sum the gradients over the ranks.

    Returns the drawn batch, the number of samples of which it is a part (0: it is the whole), this rank's share of the
    losses, and whether the losses of all ranks were finite. A failure on any rank is raised on all of them, after
    everything that others wait for was sent.
    """
    world = run.world
    exchange = world.exchange(
        phase.name, [weight for weight in phase.module.parameters() if weight.requires_grad]
    )
    sums = 0 if not phase.normalised else 1 if run.adaptation.micro_batch_size is None else 2
    exchange.begin(sums)
    world.settle()
    losses: dict[str, Tensor] = {}
    samples = 0
    random: RankRandom | None = None
    error: Exception | None = None
    try:
        if gathers_inputs(run):
            batch = draw_batch(run, phase, batch)
            count = size_of(batch)
        else:
            batch, count = draw_own(run, phase, batch)
            samples = count
        if world.is_sharded:
            refuse_uneven(phase, count, world.size, run.adaptation.micro_batch_size)
        start, stop = world.place(count)
        random = RankRandom(run.device, world.rank)
        if stop > start:  # a lazy phase may draw fewer samples than there are ranks
            exchange.parts = -(-(stop - start) // (run.adaptation.micro_batch_size or count))
            part = batch if samples else {name: value[start:stop] for name, value in batch.items()}
            losses = back_propagate(run, phase, part, watch, count, exchange, figures)
        exchange.refuse_sparse()
        is_finite = has_dynamic_scale(run.precision, phase) or all_finite(losses, watch)
        outcome = Outcome(finite=is_finite, is_random=random.were_used())
    except Exception as failure:
        if not world.can_fail_alone:
            raise
        error = failure
        outcome = Outcome(fault_kind(failure), str(failure))
    exchange.send_rest(failed=error is not None)
    try:
        agreed, with_gradient = world.agree(f"update of {phase.name}", outcome, exchange)
    except PeerFaultError as of_peer:
        raise of_peer from error
    if error is not None:
        raise error
    assert random is not None
    world.settle()
    random.go_on(agreed.is_random)
    exchange.finish(with_gradient)
    return batch, samples, losses, agreed.finite


def refuse_uneven(phase: Phase, count: int, size: int, micro_batch_size: int | None) -> None:
    """Raise ConfigError, on all ranks alike, if some would have more micro-batches than others.

    Of a batch that divides a phase may draw a part, and sharded weights are gathered by all ranks for each.
    """
    most, least = (
        stop - start for start, stop in (share(count, rank, size) for rank in (0, size - 1))
    )
    passes = [-(-samples // (micro_batch_size or count)) for samples in (most, least)]
    if passes[0] != passes[1]:
        raise ConfigError(
            f"parallel.strategy: fsdp: phase {phase.name} has {count} samples for {size} processes, so that some would "
            f"have {passes[0]} micro-batches and others {passes[1]}; change train.batch_size or memory.micro_batch"
        )


def drop_gradients(run: Run, phase: Phase) -> None:
    """Release the gradients of a phase's weights and of their masters.

    `zero_grad` does the same but walks the module tree each time, which a small network's step feels. It is called
    if `memory.set_to_none: false` has changed its effect.
    """
    if run.keeps_gradients:
        phase.optimizer.zero_grad()
        phase.module.zero_grad()
        return
    for parameter in run.weights[phase.name]:
        parameter.grad = None


@contextlib.contextmanager
def only(frozen: list[nn.Parameter]) -> Iterator[None]:
    """Freeze these parameters inside the block and thaw them after it, whatever happens."""
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
