"""Split `train.batch_size` inside the step: activations of a few samples at a time, gradients of all.

Exact for mean and sum losses, a smaller last part included, up to the rounding of a sum in another order; BatchNorm
is the exception, since it sees the smaller batches. The split itself is in `mpt.engine.step.step`; random inputs are
drawn for the whole batch before it. `auto` starts with the whole batch and halves when memory runs out.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch.nn.modules.batchnorm import _BatchNorm

from mpt.config.options import Options
from mpt.seams import MemoryTrick, Run

RELIEVES = "batch"
SHARDED = True


class Settings(Options):
    """How many samples are in a micro-batch."""

    shorthand: ClassVar[str | None] = "size"

    size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Samples per micro-batch, or `auto`: the whole batch, halved whenever memory runs out."""


class MicroBatch(MemoryTrick):
    """Sets the size; the step splits."""

    name, exact = "micro_batch", False

    def __init__(self, settings: Settings) -> None:
        self.size = settings.size

    def attach(self, run: Run) -> None:
        """Set the step's size, and warn if BatchNorm will see smaller batches."""
        batch_size = run.config.train.batch_size
        if self.size == "auto":
            run.adaptation.is_allowed = True
            return
        run.adaptation.micro_batch_size = self.size
        if self.size >= batch_size:
            return
        if any(
            isinstance(m, _BatchNorm)
            for root in run.task.trainable.values()
            for m in root.modules()
        ):
            run.notes.append(
                f"memory.micro_batch: BatchNorm sees {self.size} samples at a time instead of {batch_size}; "
                "its statistics, and so the result, differ from the whole batch's"
            )


def build(settings: Settings) -> MicroBatch:
    """Build the trick."""
    return MicroBatch(settings)
