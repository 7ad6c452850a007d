"""Name the first module and operator that turned finite numbers into NaN or infinity.

Repeats one update on the same batch and random inputs, with a dispatch mode that checks every result. Slow, so it runs
only when training stops.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpt.config.text.messages import few
from mpt.engine.state.state import capture_random, restore_random
from mpt.engine.step.step import back_propagate, drop_gradients
from mpt.nn.shared.module_places import LOSS, ModulePlaces, module_places, source_line
from mpt.seams import Batch, Phase, Run
from mpt.seams.undo import notes_of, take_back

aten = torch.ops.aten
WITHOUT_VALUES = frozenset(
    (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)
)
"""Their results are not computed: it may be the memory of a NaN that was freed just now."""


@dataclass(frozen=True)
class Finding:
    """The finding in words, and the module to blame if it is one."""

    text: str
    module: str | None = None
    repeats: bool = False
    """Whether a repeat of the update was not finite either."""


MOST_SAMPLES = 8
"""That are named of a batch."""


class FirstNonFinite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the first operator whose inputs are finite and whose output is not, and the module it ran in."""

    def __init__(self, places: ModulePlaces, batch_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places, self.batch_size = places, batch_size
        self.finding: str | None = None
        self.module: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_computed = self.finding is None and func._overloadpacket not in WITHOUT_VALUES
        # Before it runs, since it may write over its inputs; the previous content of `out` is none of them.
        read = (args, {key: value for key, value in (kwargs or {}).items() if key != "out"})
        was_finite = is_computed and not _has_non_finite(read)
        result = func(*args, **(kwargs or {}))
        if was_finite and _has_non_finite(result):
            module, is_backward = self.places.current()
            self.module = module if module != LOSS else None
            dtypes = {
                str(t.dtype).removeprefix("torch.")
                for t in tree_leaves(result)
                if isinstance(t, Tensor)
            }
            line = "" if is_backward else source_line()
            way = "backward of " if is_backward else ""
            self.finding = f"{module}: {way}{func._schema.name} in {', '.join(sorted(dtypes))}"
            self.finding += (f" ({line})" if line else "") + samples_of(result, self.batch_size)
        return result


def samples_of(result: Any, batch_size: int) -> str:
    """Say which samples of the batch an operator made non-finite, if its first dimension is the samples."""
    for tensor in tree_leaves(result):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not tensor.dim():
            continue
        if tensor.shape[0] != batch_size:
            continue
        bad = (
            ~torch.isfinite(tensor).flatten(1).all(1)
            if tensor.dim() > 1
            else ~torch.isfinite(tensor)
        ).nonzero()
        places = bad.flatten().tolist()
        if not places or len(places) == batch_size:
            continue
        return f", at samples {few(places, MOST_SAMPLES)} of the batch of {batch_size}"
    return ""


def _has_non_finite(values: Any) -> bool:
    return any(
        isinstance(t, Tensor)
        and t.is_floating_point()
        and t.numel() > 0
        and not bool(torch.isfinite(t).all())
        for t in tree_leaves(values)
    )


def find_first_non_finite(run: Run, phase: Phase, batch: Batch) -> Finding:
    """Find "module: operator in dtype", or report another finding; runs forward and backward, never the optimizer.

    `batch` is the whole batch with its random inputs, as the update drew it (`Update.batch`).
    """
    for name, module in run.task.modules.items():
        for key, value in module.state_dict().items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                return Finding(f"{name}.{key}: the stored values are already non-finite")
    if _has_non_finite(list(batch.values())):
        return Finding("the batch itself holds non-finite values")
    count = len(next(iter(batch.values())))
    with (
        undisturbed(run, phase),
        module_places(run.task.modules) as places,
        FirstNonFinite(places, count) as watch,
    ):
        back_propagate(run, phase, batch)
    if watch.finding is None:
        return Finding("no operator in a repeat of the step: it does not happen every time")
    return Finding(watch.finding, watch.module, repeats=True)


@contextmanager
def undisturbed(run: Run, phase: Phase) -> Iterator[None]:
    """Leave a run as it was before the forwards and backwards inside the block."""
    notes, random = notes_of(run.task), capture_random(run.device)
    drop_gradients(run, phase)
    run.buffers.remember()
    try:
        yield
    finally:
        drop_gradients(run, phase)
        run.buffers.restore()
        take_back(run.task, notes)
        restore_random(random, run.device)
