"""A kind of training as the engine sees it: phases, evaluation, previews, inference and saved state.

Named in `mpt.seams` too, which is the module for a part to import from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpt.errors import ConfigError, PartError
from mpt.seams.phases import Phase
from mpt.seams.samples import Batch


@dataclass
class Inference:
    """Results of a task's inference: pictures to write, rows of a table, or both."""

    tiles: Tensor | None = None
    """Images in [0, 1], NCHW."""
    columns: int | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    outputs: Tensor | None = None
    """Raw float32 outputs, by which two precisions are compared."""
    scores: Tensor | None = None
    """Probabilities of all classes (b, classes), in the order of `DataSpec.classes`."""
    figures: dict[str, Tensor] = field(default_factory=dict)
    """Further pictures by file stem."""
    figure_columns: dict[str, int] = field(default_factory=dict)
    """Columns of their grids, as square as can be if none are named."""


Evidence = dict[str, Tensor]
"""An evaluation's outputs for one batch: named tensors whose dimension 0 is the samples of that batch."""


def gather(evidence: Iterable[Evidence], name: str) -> Tensor:
    """Return one field of the evidence, of all batches that have it. Raises PartError if none has."""
    evidence = list(evidence)
    if not any(name in one for one in evidence):
        known = ", ".join(map(repr, dict.fromkeys(key for one in evidence for key in one)))
        raise PartError(
            f"{name!r} was gathered of an evaluation, but evaluate_batch returned {known or 'nothing'}"
        )
    return torch.cat([one[name] for one in evidence if name in one])


class Task:
    """A kind of training. Built on one device; knows nothing of memory tricks, files or the loop.

    The engine enters the modes: `evaluate_batch`, `preview` and `infer` are called with all networks in evaluation
    mode, without gradients, inside the precision mode's forward context, and with random numbers that are seeded for
    the call and taken back after it. `conclude` is called so too, but in float32. Hooks of few tasks have a class of
    their own each (`mpt.seams.task_kinds`): samples from noise, a game, exports, tiles.

    An update that fails may be undone: a task's notes on itself during one are numbers, tensors (replaced, not
    changed in place) and containers of them.
    """

    modules: Mapping[str, nn.Module]
    """All saved state. The engine adds moving averages (`NAME_ema`, see `train.ema`)."""
    trainable: Mapping[str, nn.Module]
    """Optimizer name -> the module it trains."""
    averaged: tuple[str, ...] = ()
    """Names of the `modules` that `train.ema` averages; () for all that are trained.

    While a task evaluates, its attributes that are such a network are the average.
    """
    metric: str
    """Name of the evaluation figure that chooses the best checkpoint."""
    higher_is_better: bool
    inputs: tuple[str, ...] = ()
    """Batch fields that inference can be given; () for a task that makes samples from noise."""
    details: Mapping[str, Any] | None = None
    """Findings of the last `conclude` in addition to its figures, for the report, as plain data.

    `worst` names samples; `objects` counts those of each class, if `metric` is a mean over classes; `section` is shown
    on the run's page (see `mpt.report.run_page.evaluation_section`).
    """

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Return the networks in which memory tricks look for units to wrap."""
        return list(self.trainable.values())

    def phases(self, optimizers: Mapping[str, Optimizer]) -> Sequence[Phase]:
        """Return the updates of one step, in order."""
        raise NotImplementedError(f"{type(self).__name__} does not train")

    def draw(self, batch: Batch, phase: Phase) -> Batch:
        """Return the batch with this update's random inputs. Called on the whole batch, before any split."""
        return batch

    @property
    def draws_by_shape(self) -> bool:
        """Return whether `draw` looks at the shapes, dtypes and device of the batch's fields alone, never into them.

        It then adds fields, or leaves some out, and passes on the others as they are. Several processes each have their
        own samples only if that is so; else each gathers the whole batch. For a class with a `draw` of its own it is
        taken to be False unless that class says otherwise. The answer is the same for the whole training.
        """
        return True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "draw" in vars(cls) and "draws_by_shape" not in vars(cls):
            cls.draws_by_shape = False  # type: ignore[assignment,method-assign]

    def after_step(self, step: int, samples_seen: int) -> None:
        """Follow a finished step (a controller, clipped weights), without waiting for the device."""

    def evaluate_batch(self, batch: Batch) -> Evidence:
        """Return the outputs of a test batch for `conclude`. Batches may be smaller, and on several processes."""
        return {}

    def conclude(self, evidence: Sequence[Evidence]) -> dict[str, float]:
        """Return the figures of an evaluation, `metric` among them, from the evidence of all batches, on the CPU."""
        raise NotImplementedError(f"{type(self).__name__} does not evaluate")

    def preview(self, batch: Batch) -> Tensor | None:
        """Return an image grid's tiles in [0, 1], NCHW, which show the same samples over the whole run."""
        return None

    def infer(self, batch: Batch | None, count: int, seed: int) -> Inference:
        """Return the results of inputs, or without them `count` samples."""
        raise ConfigError(
            f"{type(self).__name__} does not infer: `mpt evaluate` measures it, and `mpt convert` writes its networks; "
            "give the task an `infer` (CONTRIBUTING.md, A task)"
        )

    def advise(self, figures: Mapping[str, float]) -> Iterable[str]:
        """Return warnings about logged losses or figures of an evaluation."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return state outside the modules: running averages, controllers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
