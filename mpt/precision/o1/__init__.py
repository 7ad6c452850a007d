"""O1, Apex's automatic casts, as a library: `with casts(): ...`. The precision mode of that name is `apex_o1`.

The casts themselves live in `o1_mode` (the modes in force and their extent), `o1_rules` (how one call is cast) and
`o1_tables` (which function gets which rule).
"""

from __future__ import annotations

from mpt.precision.o1.o1_mode import (
    active_dtype,
    casts,
    checkpoint_contexts,
    clear_cache,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
    suspended,
    unregister_function,
)
from mpt.precision.o1.o1_rules import HalfPrecisionError

__all__ = [
    "HalfPrecisionError",
    "active_dtype",
    "casts",
    "checkpoint_contexts",
    "clear_cache",
    "float_function",
    "half_function",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "suspended",
    "unregister_function",
]
