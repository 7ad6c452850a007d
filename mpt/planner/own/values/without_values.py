"""A step without values: all that answers in their place, together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch._subclasses import fake_tensor

from mpt.planner.device.zero_values import values_by
from mpt.planner.own.stand_ins.draws import drawn_from
from mpt.planner.own.stand_ins.exchange import tensors_exchanged
from mpt.planner.own.stand_ins.extensions import nothing_compiled
from mpt.planner.own.stand_ins.files import without_files
from mpt.planner.own.stand_ins.jit_traces import nothing_traced
from mpt.planner.own.stand_ins.lazy import lazy_modules
from mpt.planner.own.stand_ins.loaders import loaded_here, true_batches
from mpt.planner.own.stand_ins.quasi_newton import quasi_newton
from mpt.planner.own.values.attempts import AS_BOUNDS, Answers
from mpt.planner.own.values.bounds import KNOWN_VALUES, BoundedShapes
from mpt.planner.own.values.without_memory import without_memory


@contextmanager
def without_values(answers: Answers = AS_BOUNDS) -> Iterator[BoundedShapes]:
    """Let a step inside the block do without values, but for those that it loads and draws if these are trusted."""
    trusts_data = answers.trusts_data
    asked = BoundedShapes(
        trusts_data, answers.finds, answers.shares, answers.computes_for, answers.waits
    )
    known = mock.patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", KNOWN_VALUES)
    with (
        known,
        loaded_here(),
        true_batches(asked.become_fake, asked.drawn, is_known=trusts_data),
        lazy_modules(),
        nothing_traced(),
        nothing_compiled(answers.has_compiler) as kernels,
        quasi_newton() as steps,
        tensors_exchanged(),
        without_files(),
        values_by(asked) as values,
        without_memory(values.packed),
        drawn_from(answers.seed, with_torch=trusts_data),
    ):
        values.steps, values.kernels = steps, kernels
        yield values
