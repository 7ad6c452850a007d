"""How many faces fit into a card's memory at once, by the planner's fake tensors: nothing is allocated to find out."""

from __future__ import annotations

import torch

from mpt.config.checking.precision_names import AUTOCAST, FLOAT32
from mpt.config.load import change_precision
from mpt.config.sizes import describe_bytes
from mpt.engine.building.build import build_run
from mpt.engine.state.evaluation import inferring
from mpt.errors import MemoryBudgetError
from mpt.inference.half import halve, in_dtype
from mpt.inference.trained import Trained
from mpt.planner.device.fake_mode import LeanFakeMode
from mpt.planner.trace.recorder import Recorder
from mpt.precision.shared.choice import DTYPES

MOST = 64
"""More faces at once gain nothing."""
CONTEXT_BYTES = 512 * 2**20
"""Memory of a CUDA context and the libraries' workspaces alongside the tensors."""


def largest_batch(trained: Trained, dtype: str | None, budget_bytes: int) -> tuple[int, int]:
    """Return how many faces can be drawn at once within a budget, and the bytes that this takes.

    Raises MemoryBudgetError if a single one does not fit.
    """
    one, two = (peak_bytes(trained, dtype, count) + CONTEXT_BYTES for count in (1, 2))
    if one > budget_bytes:
        raise MemoryBudgetError(
            f"--vram: drawing one face takes {describe_bytes(one)}, more than {describe_bytes(budget_bytes)}; "
            "use --half or --device cpu"
        )
    each = max(two - one, 1)
    count = min(MOST, 1 + (budget_bytes - one) // each)
    return int(count), int(one + (count - 1) * each)


def peak_bytes(trained: Trained, dtype: str | None, count: int) -> int:
    """Return the most bytes of weights and activations while `count` faces are redrawn."""
    config = in_dtype(change_precision(trained.config, AUTOCAST if dtype else FLOAT32), dtype)
    size = config.model.settings.image_size
    device = torch.device("cpu")
    recorder = Recorder(device.type)
    with LeanFakeMode(allow_non_fake_inputs=True), recorder.recording():
        run = build_run(config, device, trained.train_data.spec, fake=True, trains=False)
        if dtype:
            for module in run.task.modules.values():
                halve(module, DTYPES[dtype])
        with inferring(run):
            run.task.redraw({"dst_warped": torch.zeros(count, 3, size, size)})  # type: ignore[attr-defined]
    live = peak = 0
    for event in recorder.trace.events:
        if event >= 0:
            live += recorder.trace.storages[event].size
            peak = max(peak, live)
        else:
            live -= recorder.trace.storages[~event].size
    return peak
