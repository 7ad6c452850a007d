"""Lightning's and Keras' names for precision modes. Each means one of ours, perhaps with a fixed dtype.

Lightning: `Trainer(precision=...)`. Keras: `keras.mixed_precision.set_global_policy(...)`.
"""

from __future__ import annotations

from collections.abc import Iterable

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
