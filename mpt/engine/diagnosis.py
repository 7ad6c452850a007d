"""Name the first module and operator that turned finite numbers into NaN or infinity.

Repeats one update on the same batch and random inputs, with a dispatch mode that checks every result. Slow, so it runs
only when training stops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpt.engine.step import back_propagate, drop_gradients
from mpt.seams import Batch, Phase, Run

aten = torch.ops.aten
WITHOUT_VALUES = frozenset((aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided))
"""What they return is not computed: it may be the memory of a NaN that was freed just now."""


class FirstNonFinite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the first operator whose inputs are finite and whose output is not, and the module it ran in."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules: list[str] = []
        self.finding: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_computed = func._overloadpacket not in WITHOUT_VALUES
        if self.finding is None and is_computed and _has_non_finite(result) and not _has_non_finite((args, kwargs)):
            where = self.modules[-1] if self.modules else "the loss"
            dtypes = {str(t.dtype).removeprefix("torch.") for t in tree_leaves(result) if isinstance(t, Tensor)}
            self.finding = f"{where}: {func._schema.name} in {', '.join(sorted(dtypes))}"
        return result


def _has_non_finite(values: Any) -> bool:
    return any(
        isinstance(t, Tensor) and t.is_floating_point() and t.numel() > 0 and not bool(torch.isfinite(t).all())
        for t in tree_leaves(values)
    )


def find_first_non_finite(run: Run, phase: Phase, batch: Batch) -> str:
    """Return "module: operator in dtype", or what else was found; runs forward and backward, never the optimizer.

    `batch` is the whole batch with its random inputs, as the update drew it (`Update.batch`).
    """
    for name, module in run.task.modules.items():
        for key, value in module.state_dict().items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                return f"{name}.{key}: the stored values are already non-finite"
    if _has_non_finite(list(batch.values())):
        return "the batch itself holds non-finite values"
    watch = FirstNonFinite()
    handles = []
    for name, module in run.task.modules.items():
        for path, child in module.named_modules():
            handles += _hooks(watch, f"{name}.{path}".rstrip("."), child)
    notes = run.task.snapshot()
    try:
        with watch:
            back_propagate(run, phase, batch)
    finally:
        for handle in handles:
            handle.remove()
        drop_gradients(run, phase)
        run.task.restore(notes)
    return watch.finding or "no operator in a repeat of the step: it does not happen every time"


def _hooks(watch: FirstNonFinite, name: str, module: nn.Module) -> list[Any]:
    def enter(*_: Any) -> None:
        watch.modules.append(name)

    def leave(*_: Any) -> None:
        if watch.modules:
            watch.modules.pop()

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
