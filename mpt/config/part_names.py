"""Names of parts inside another part's settings, checked with the configuration: `task.metrics`, `task.loss`."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from mpt.config.messages import unknown_name


def known_as(kind: str, *built_in: str) -> AfterValidator:
    """Return a check that a name is one of the parts of a kind (`mpt.config.registry.FUNCTIONS`), or built in."""

    def check(name: str) -> str:
        # which reads settings, and so this module
        from mpt.config.registry import FUNCTIONS, INSTALLED

        if name not in built_in and name not in (known := INSTALLED.functions(kind)):
            folder, function, parameters = FUNCTIONS[kind]
            for path in (
                path for one in INSTALLED.packages if one.outside for path in one.paths(folder)
            ):
                if path.stem == name:
                    declared = f"{function}({', '.join(parameters) or '...'})"
                    raise ValueError(
                        f"allowed: a file that declares `{declared}`, which {path} does not"
                    )
            # The sentence's first part, that the name is unknown, is added by the one who prints it.
            raise ValueError(unknown_name(name, [*built_in, *known]).partition("; ")[2])
        return name

    return AfterValidator(check)


MetricName = Annotated[str, known_as("metrics")]
"""A file in `metrics/` with `measure(...)`, whose parameters are named after the task's evaluation outputs."""
LossName = Annotated[str, known_as("losses", "cross_entropy")]
"""`cross_entropy`, or a file in `losses/` with `loss(logits, labels)`."""
