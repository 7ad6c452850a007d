"""How often something is done in a run: in steps, in epochs, or as often as suits the run's length.

Written periods become steps once the data is known, as a pure function of the settings and the data's size, so that a
resumed run evaluates and saves at the same steps.
"""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import AfterValidator, Field

AUTO = "auto"
WRITTEN = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?(steps?|epochs?)")
TIMES = 10
"""How often a run without epochs does by default the work that one with epochs does once in each."""
MOST_TIMES = 100
"""How often at most a run with epochs does something by default: with more epochs it is done after several."""
LEAST_STEPS = 10
"""A run without epochs does nothing more often than this by default."""


def check_period(written: int | str) -> int | str:
    """Refuse text that is no period."""
    if isinstance(written, str) and written != AUTO and not is_written(written):
        raise ValueError(
            "a period is a number of steps (200), of epochs (1 epoch, 0.5 epochs), or auto"
        )
    return written


def is_written(text: str) -> bool:
    """Return whether text is a number with a unit: steps are whole."""
    found = WRITTEN.fullmatch(text)
    return found is not None and not ("." in found[1] and found[2].startswith("step"))


Period = Annotated[
    Annotated[int, Field(ge=0)]
    | Annotated[str, Field(json_schema_extra={"pattern": f"^({AUTO}|{WRITTEN.pattern})$"})],
    AfterValidator(check_period),
]
"""A number of steps, text such as `1 epoch`, or `auto`; 0 is never but at the end."""


def in_steps(period: int | str, total_steps: int, steps_per_epoch: int, has_epochs: bool) -> int:
    """Return a period in steps; 0 if it is not shorter than the run.

    `has_epochs`: the run's length was given in epochs, so that `auto` is one of them.
    """
    if isinstance(period, int):
        return period
    if period == AUTO:
        steps = automatic(total_steps, steps_per_epoch, has_epochs)
        return steps if steps < total_steps else 0
    found = WRITTEN.fullmatch(period)
    assert found is not None
    number = float(found[1])
    each = steps_per_epoch if found[2].startswith("epoch") else 1
    return max(1, round(number * each)) if number else 0


def automatic(total_steps: int, steps_per_epoch: int, has_epochs: bool) -> int:
    """Return an epoch, or several of a long run; a tenth of a run without epochs."""
    if not has_epochs:
        return max(LEAST_STEPS, math.ceil(total_steps / TIMES))
    epochs = total_steps / steps_per_epoch
    return steps_per_epoch * math.ceil(epochs / MOST_TIMES)
