"""What to know before the first step: frozen random numbers, images scaled otherwise than a library's weights were
trained with, classes that the test set lacks.
"""

from __future__ import annotations

from mpt.config.options import setting_of
from mpt.config.schema import Config
from mpt.engine.initial_weights import Start, never_learnt
from mpt.samples import DataSpec
from mpt.task import Task

RGB = 3
MOST_NAMED = 3


def start_notes(config: Config, task: Task, start: Start) -> list[str]:
    """Return the warnings."""
    return [*never_learnt(task.trainable, start.newly_made), *other_scaling(config, start)]


def other_scaling(config: Config, start: Start) -> list[str]:
    """Return a warning where a library's weights were trained on images of other mean and deviation than the default.

    What the file of the configuration says itself is taken as meant, and a file that mpt wrote may be of a run with
    any figures.
    """
    settings = config.task.settings
    given = {"mean", "std"} & settings.model_fields_set
    published = config.model.plugin.optional("published_scaling")
    is_rgb = setting_of(config.model.settings, "channels") == RGB
    if (
        given
        or published is None
        or start.is_own
        or not is_rgb
        or not {"mean", "std"} <= set(type(settings).model_fields)
    ):
        return []
    found = published(config.model.name)
    if found is None or found == tuple(RGB * setting_of(settings, name) for name in ("mean", "std")):
        return []
    mean, std = (f"[{', '.join(f'{one:g}' for one in numbers)}]" for numbers in found)
    return [
        f"images are standardised with task.mean .5 and task.std .5, and {config.model.name} was published for others: "
        f"set task.mean='{mean}' task.std='{std}', unless these weights were trained otherwise"
    ]


def untested_classes(test: DataSpec) -> list[str]:
    """Return a warning where the test set has no sample of some classes, as a small folder that was split may."""
    counts = test.extra.get("class_counts", ())
    without = [name for name, count in zip(test.classes, counts, strict=False) if count == 0]
    if not without or not sum(counts):
        return []
    named = ", ".join(without[:MOST_NAMED]) + (f" and {len(without) - MOST_NAMED} more" if without[MOST_NAMED:] else "")
    return [
        f"none of the {sum(counts)} test samples is of {named}: nothing is measured for {len(without)} of "
        f"{len(counts)} classes. Use a test folder, or a larger dataset.test_fraction"
    ]
