"""Names of parts inside another part's settings, checked with the configuration: `task.metrics`, `task.loss`."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from mpt.config.options import CROSS_ENTROPY
from mpt.config.text.messages import unknown_name


def known_as(kind: str, *built_in: str) -> AfterValidator:
    """Return a check that a name is one of the parts of a kind (`FUNCTIONS` of the registry), or built in."""

    def check(name: str) -> str:
        # which reads settings, and so this module
        from mpt.config.finding.registry import INSTALLED

        # a built-in name too: a file that has it must not be passed over
        known = INSTALLED.functions(kind)
        if name not in built_in and name not in known:
            why = INSTALLED.why_no_function(kind, name)
            if why:
                raise ValueError(f"allowed: {why}")
            # The sentence's first part, that the name is unknown, is added by the one who prints it.
            raise ValueError(unknown_name(name, [*built_in, *known]).partition("; ")[2])
        return name

    return AfterValidator(check)


MetricName = Annotated[str, known_as("metrics")]
"""A file in `metrics/` with `measure(...)`, whose parameters are named after the task's evaluation outputs."""
LossName = Annotated[str, known_as("losses", CROSS_ENTROPY)]
"""`cross_entropy`, or a file in `losses/` with `loss(logits, labels)`."""
