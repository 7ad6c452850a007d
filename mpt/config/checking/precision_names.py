"""Lightning's and Keras' names for precision modes. Each means one of ours, perhaps with a fixed dtype.

Lightning: `Trainer(precision=...)`. Keras: `keras.mixed_precision.set_global_policy(...)`.
"""

from __future__ import annotations

from collections.abc import Iterable

FLOAT32 = "fp32"
"""The mode that others are compared with, and that computes references."""
AUTOCAST = "amp"
"""The mode that computes in a half dtype of one's choice, whatever dtype the weights are stored in."""

ALIASES: dict[str, tuple[str, dict[str, str]]] = {
    "32-true": ("fp32", {}),
    "16-mixed": ("amp", {"dtype": "float16"}),
    "bf16-mixed": ("bf16", {}),
    "16-true": ("fp16-pure", {}),
    "bf16-true": ("bf16-pure", {}),
    "mixed_float16": ("amp", {"dtype": "float16"}),
    "mixed_bfloat16": ("bf16", {}),
}


def resolve_precision_name(name: str, known: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Return our name for a mode and the settings that the given name fixes. Case is ignored; unknown names stay."""
    if name.casefold() in ALIASES:
        return ALIASES[name.casefold()]
    ours = {candidate.casefold(): candidate for candidate in known}
    return ours.get(name.casefold(), name), {}


MEANT = {
    **dict.fromkeys(
        ("fp16", "float16", "half", "16", "mixed"), "amp (mixed) or fp16-pure (weights in half too)"
    ),
    **dict.fromkeys(
        ("bfloat16", "mixed_bf16"), "bf16 (mixed) or bf16-pure (weights in bfloat16 too)"
    ),
    **dict.fromkeys(("float32", "full", "32", "single"), "fp32"),
    **dict.fromkeys(("apex", "autocast"), "O1 (Apex's rules) or amp (torch's)"),
}
"""The probable meaning of other programs' words that may mean several modes here."""


def meant_by(name: str) -> str | None:
    """Return the probable meaning of an unknown name."""
    return MEANT.get(name.casefold())
