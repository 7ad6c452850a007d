"""New places of modules and members of mpt, for parts from outside that use the old ones.

A module keeps its name when it is moved, into a room of its package or, if none there is called so, elsewhere, so its
place is found by that name. Members of the base classes at the seams are listed. Only asked when such a part cannot be
imported, is built or fails: nothing answers to an old name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
KINDS_OF_TASKS = {
    "Samples": ("optional_inputs", "evaluation_samples", "evaluate_samples", "samples", "walk"),
    "Game": ("opponents", "bounded_losses", "limits", "collapse"),
    "SecondOrder": ("differentiates_twice",),
    "Exports": ("export_terms", "export_texts", "whole", "from_whole"),
    "Tiles": ("tiles_of",),
    "Plateau": ("rate_factor", "after_evaluation"),
    "Legend": ("metric_note", "inputs_note", "preview_columns"),
}
"""Class of its own -> its members that every task had."""
KINDS_OF_TRICKS = {
    "HoldsWeights": ("pack_weights", "host", "begin", "fold"),
    "TakesUpdates": ("private_pool", "news", "update"),
    "BetweenSteps": ("beside_steps",),
}
"""Class of its own -> its members that every memory trick had."""
SET_ON_OBJECTS = (
    *(
        "metric_note",
        "inputs_note",
        "preview_columns",
        "optional_inputs",
        "evaluation_samples",
        "opponents",
    ),
    *(
        "bounded_losses",
        "differentiates_twice",
        "product_unit",
        "uses_tf32",
        "rounds_weights",
        "replaces_step",
    ),
    *("takes_updates", "news", "keeps_gradients", "releases_gradients"),
)
"""Those that parts set in their `__init__`."""


def of_kinds(kinds: Mapping[str, Sequence[str]], what: str) -> dict[str, str]:
    """Return member -> the class that has it now, in words."""
    return {
        name: f"{kind}.{name} of mpt.seams, from which such a {what} derives"
        for kind, names in kinds.items()
        for name in names
    }


MEMBERS: dict[str, dict[str, str]] = {
    "Precision": {
        **{
            name: f"numerics.{name}"
            for name in ("dtype", "reason", "notes", "product_unit", "uses_tf32")
        },
        "rounds_weights": "numerics.rounds_weights",
        "changes_calls": "numerics.casts_calls",
        "replaces_step": "numerics.lifts_state",
        "is_sharded": "the argument is_sharded of prepare",
        "gathered_in_half": "a weight that is its own in masters",
        "steps_in_backward": "gone: a trick takes what has stepped out of the optimizer's groups in its `step`",
        "keep_more": "keep_float32",
        "keeping": "mpt.precision.shared.float32_modules.keeping(precision, modules)",
        "scales": "mpt.seams.loss_scales(precision)",
        "skips_overflow": "mpt.seams.has_dynamic_scale(precision, phase)",
        "module_state": "mpt.precision.shared.module_state.module_state(precision, module), which follows from masters",
        "load_module_state": (
            "mpt.precision.shared.module_state.load_module_state(precision, module, state), which follows from masters"
        ),
    },
    "MemoryTrick": {
        **of_kinds(KINDS_OF_TRICKS, "trick"),
        "replaces_optimizers": "replace_optimizer(optimizer, precision), which returns the new one",
        "takes_updates": "gone: each update of a trick that derives from TakesUpdates of mpt.seams is its own",
        "keeps_gradients": 'gradients = "zeroed"',
        "releases_gradients": 'gradients = "consumed"',
    },
    "Run": {
        "micro_batch_size": "adaptation.micro_batch_size",
        "micro_batch_auto": "adaptation.is_allowed",
        "adapted": "adaptation.changes",
        "trained": "weights",
    },
    "Task": {
        **of_kinds(KINDS_OF_TASKS, "task"),
        "snapshot": "mpt.seams.undo.notes_of(task)",
        "restore": "mpt.seams.undo.take_back(task, notes)",
    },
}
"""Base class -> its earlier members -> their replacements."""


def moved_to(module: str) -> str | None:
    """Return the present name of a module of mpt that was moved, None for any other."""
    if not module.startswith(f"{PACKAGE.name}."):
        return None
    first, *folders, name = module.split(".")
    if PACKAGE.joinpath(name, "__init__.py").is_file():  # a room that is a package now
        return f"{first}.{name}"
    folder = PACKAGE.joinpath(*folders)
    found = (
        sorted(folder.glob(f"{name}/{name}.py"))  # its package is a room of it now
        or sorted(folder.glob(f"*/{name}.py"))
        or sorted(PACKAGE.rglob(f"{name}.py"))
    )
    return (
        ".".join((first, *found[0].relative_to(PACKAGE).with_suffix("").parts))
        if len(found) == 1
        else None
    )


def explain_import(error: BaseException) -> str | None:
    """Return one sentence on an import error that a moved module caused, None for any other exception."""
    old = error.name if isinstance(error, ImportError) else None
    new = moved_to(old) if old else None
    return f"{old} is {new} now: change the import" if new else None


def moved_member(owner: type, name: str, on_object: bool = False) -> str | None:
    """Return one sentence on a member that a base class at the seams had, None for any other.

    `on_object`: it is an attribute of an object, on which the name of a method of before may be the part's own.
    """
    if on_object and name not in SET_ON_OBJECTS:
        return None
    for base in owner.__mro__:
        new = (
            MEMBERS.get(base.__name__, {}).get(name)
            if base.__module__.startswith("mpt.seams")
            else None
        )
        if new is not None:
            return f"{base.__name__}.{name} is now {new}"
    return None


def explain_attribute(error: BaseException) -> str | None:
    """Return one sentence on an attribute error that a moved member caused, None for any other exception."""
    return (
        moved_member(type(error.obj), error.name)
        if isinstance(error, AttributeError) and error.name
        else None
    )
