"""Warnings about a loss scale in trouble, as the practice has it: below 16, or falling again and again.

A scale that stays under 16 means gradients that overflow at almost any magnification; one that keeps falling means that
overflows come faster than the scale recovers.
"""

from __future__ import annotations

from collections import deque

LOW_SCALE = 16.0
LOW_STEPS = 20
FALLS, FALL_WINDOW = 6, 200

ADVICE = (
    "try a lower optimizer.lr, optimizer.clip_grad_norm, precision.keep_fp32 for the layer that overflows, "
    "or precision=bf16"
)


START_HIGHER = (
    "nothing has overflowed meanwhile: if it was set so low, raise precision.init_scale, or precision.loss_scale where "
    "that is a number"
)


class ScaleWatch:
    """Watches one phase's scale; says each thing once until the scale has recovered."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.low_for = 0
        self.falls: deque[int] = deque(maxlen=FALLS)
        self.said_low = self.said_falling = self.has_fallen = False

    def observe(self, step: int, scale: float, fell: bool) -> str | None:
        """Return a warning to show at this step, or None."""
        self.has_fallen |= fell
        self.low_for = self.low_for + 1 if scale < LOW_SCALE else 0
        if self.low_for == 0:
            self.said_low = False
        if self.low_for >= LOW_STEPS and not self.said_low:
            self.said_low = True
            low = f"below {LOW_SCALE:g} for {LOW_STEPS} steps (now {scale:.10g})"
            return f"{self.phase}: the loss scale has stayed {low}; {ADVICE if self.has_fallen else START_HIGHER}"
        if fell:
            self.falls.append(step)
            recent = len(self.falls) == FALLS and step - self.falls[0] <= FALL_WINDOW
            if recent and not self.said_falling:
                self.said_falling = True
                span = step - self.falls[0] + 1
                return (
                    f"{self.phase}: the loss scale fell {FALLS} times within {span} steps "
                    f"(now {scale:.10g}); {ADVICE}"
                )
        elif self.falls and step - self.falls[-1] > FALL_WINDOW:
            self.said_falling = False
        return None
