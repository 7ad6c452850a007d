"""One process against several: the first tensor of a step that differs by more than the order of sums.

In the order in which they are computed: the modules' outputs of the samples, losses, gradients from the last layer to
the first, weights and buffers after the update. The effect of rounding is seen in a step of one process with weights
and inputs moved by half a unit in the last place. To hold each tensor of a distributed step against a single process's,
and against the effect of rounding on it, is the idea of TTrace (arXiv 2506.09280), which does so for Megatron-LM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mpt.doctor.measuring.culprits import BEYOND_ROUNDING
from mpt.doctor.measuring.instrument import error_of
from mpt.doctor.numerics.numerics import SMALLEST_SHARE
from mpt.doctor.partings.difference import FLOOR_UNITS, NOISE, moves_apart, same
from mpt.doctor.partings.parting import Kind, Parting
from mpt.doctor.partings.rank_steps import Looked

UPDATE = 1e-3
"""Share of a weight's move that an optimizer may make of gradients that are equal but for rounding."""
ALIKE = 0.999
"""Cosine from which on a gradient is a multiple of another."""
OWN_DIVISOR = (
    "a process divides by a number of its own samples, such as a count of labels; a phase with `normalised=True` whose "
    "Loss is a sum with its weight divides by that of all"
)
NOT_SUMMED = "the processes hold different ones: not summed over them"


class PhaseJudge:
    """Compares one phase of a step; `ranks` are the processes' looks in order."""

    def __init__(
        self, step: int, alone: Looked, moved: Looked, ranks: Sequence[Looked], unit: float
    ) -> None:
        self.step, self.alone, self.moved, self.ranks, self.unit = step, alone, moved, ranks, unit
        self.floor = FLOOR_UNITS * unit

    def first_difference(self, begun: Mapping[str, Tensor]) -> Parting | None:
        """Return the first difference beyond rounding; `begun` are the weights before the step."""
        return (
            self.of_outputs() or self.of_losses() or self.of_gradients() or self.of_weights(begun)
        )

    def parting(
        self, kind: Kind, where: str, reason: str, error: float, rounding: float, *said: str
    ) -> Parting:
        """Return a difference between one process and all of the others."""
        first, second = said or ("", "")
        return Parting(
            self.step, self.alone.phase, kind, where, first, second, reason, error, rounding
        )

    def is_beyond(self, error: float, rounding: float) -> bool:
        """Return whether an error is more than rounding and the order of sums explain."""
        return not error <= max(self.floor, BEYOND_ROUNDING * rounding)

    def of_outputs(self) -> Parting | None:
        """Compare the modules' outputs for the samples."""
        for name, value in self.alone.outputs.items():
            parts = [rank.outputs[name] for rank in self.ranks if name in rank.outputs]
            together = (
                torch.cat(parts)
                if parts and {part.shape[1] for part in parts} == {value.shape[1]}
                else None
            )
            if together is None or together.shape != value.shape:
                continue  # of no samples, such as a penalty's
            near = self.moved.outputs.get(name, value)
            error, rounding = error_of(together, value), error_of(near, value)
            if self.is_beyond(error, rounding):
                rows = (together - value).norm(dim=1) > self.floor * value.norm(dim=1)
                count = int(rows.sum())
                reason = f"{count} of {len(value)} samples are computed otherwise, from other samples or other weights"
                return self.parting("operator", f"output of {name}", reason, error, rounding)
        return None

    def of_losses(self) -> Parting | None:
        """Compare the losses: a process has its share of them."""
        for name, value in self.alone.losses.items():
            together = sum(rank.losses.get(name, 0.0) for rank in self.ranks)
            scale = abs(value) or 1.0
            error, rounding = (
                abs(together - value) / scale,
                abs(self.moved.losses.get(name, value) - value) / scale,
            )
            if self.is_beyond(error, rounding):
                factor = together / value if value else math.nan
                reason = scaled_by(factor, len(self.ranks)) or OWN_DIVISOR
                said = f"{value:.6g}", f"{together:.6g}"
                return self.parting("loss", f"loss {name}", reason, error, rounding, *said)
        return None

    def of_gradients(self) -> Parting | None:
        """Compare the gradients, those of the last weights first, as backward computes them."""
        gradients = self.alone.gradients
        whole = math.sqrt(sum(float(value.norm()) ** 2 for value in gradients.values()))
        for name, value in reversed(gradients.items()):
            near = error_of(self.moved.gradients.get(name, value), value)
            rounding = 0.0 if math.isnan(near) else near
            is_noise = rounding > NOISE or float(value.norm()) <= SMALLEST_SHARE * whole
            found = [rank.gradients.get(name, torch.zeros_like(value)) for rank in self.ranks]
            for own in found:
                error = error_of(own, value)
                if is_noise and float((own - value).norm()) <= self.floor * whole:
                    continue
                if self.is_beyond(error, rounding):
                    is_shared = all(same(other, found[0]) for other in found)
                    reason = reason_of(own, value, len(self.ranks)) if is_shared else NOT_SUMMED
                    return self.parting("gradient", f"gradient of {name}", reason, error, rounding)
        return None

    def of_weights(self, begun: Mapping[str, Tensor]) -> Parting | None:
        """Compare parameters and buffers after the update, among the processes too."""
        weights, first = self.alone.weights, self.ranks[0].weights
        for rank, own in enumerate(self.ranks[1:], start=1):
            for name, value in first.items():
                if not same(own.weights[name], value):
                    error = error_of(own.weights[name].float(), value.float())
                    reason = (
                        f"{NOT_SUMMED}, as rank 0 and rank {rank}" if name in begun else NOT_SUMMED
                    )
                    return self.parting("update", name, reason, error, 0.0)
        moves = moves_apart(weights, first, begun)
        moved = math.sqrt(sum(move.moved**2 for move in moves.values()))
        for name, move in moves.items():
            is_trained = name in self.alone.gradients
            if move.apart <= self.floor * moved or (is_trained and self.is_noise(name)):
                continue
            if not move.typical <= UPDATE:
                reason = (
                    "the update, of gradients that are equal"
                    if is_trained
                    else "a buffer of its own samples alone"
                )
                return self.parting("update", name, reason, move.share, 0.0)
        return None

    def is_noise(self, name: str) -> bool:
        """Return whether rounding moves a gradient by much of itself."""
        value = self.alone.gradients[name]
        return not error_of(self.moved.gradients.get(name, value), value) <= NOISE


def scaled_by(factor: float, size: int) -> str:
    """Explain a number that is `factor` times the expected one; "" if that is no power of the processes' number."""
    for power in (-2, -1, 1, 2):
        if math.isclose(factor, float(size) ** power, rel_tol=0.01):
            if power < 0:
                return (
                    f"{size}{'²' if power == -2 else ''} times too small: divided by the "
                    "number of processes once more"
                )
            return f"{size}{'²' if power == 2 else ''} times too large: not divided by the number of processes"
    return ""


def reason_of(value: Tensor, true: Tensor, size: int) -> str:
    """Explain a wrong gradient that all processes have alike."""
    norms = float(value.norm()) * float(true.norm())
    cosine = float(value.flatten() @ true.flatten()) / norms if norms else 0.0
    factor = float(value.norm()) / float(true.norm()) if norms else math.nan
    if cosine > ALIKE:
        return scaled_by(factor, size) or f"{factor:.3g} times what it should be"
    return OWN_DIVISOR
