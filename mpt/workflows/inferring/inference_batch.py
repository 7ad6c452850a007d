"""The batch of an inference that is to fit into some memory: the largest that is planned to (`mpt infer --vram`)."""

from __future__ import annotations

import math
from typing import Any

import torch

from mpt.config.sizes import describe_bytes, parse_budget
from mpt.errors import MemoryBudgetError
from mpt.inference.trained import Trained
from mpt.planner.answers.plan import InferencePlan
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import load_calibration
from mpt.planner.facts.gpus import DEFAULT, find_gpu, installed_gpu

MIB = 2**20


def choose_batch(trained: Trained, vram: str, half: bool, dtype: str | None, count: int) -> int:
    """Return the largest batch, `count` at most, that is planned to fit `vram` on the run's GPU, and print it.

    With `half` float32 comes first, alongside the networks as they were opened, so that is the load that has to fit.
    Raises MemoryBudgetError if one sample is too much.
    """
    budget, device = parse_budget(vram), trained.run.device
    gpu, where = find_gpu(DEFAULT), f", as on an {find_gpu(DEFAULT).name}: no GPU is used here"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu, where = (
            installed_gpu(
                properties.name, properties.total_memory, (properties.major, properties.minor)
            ),
            "",
        )
    wish: dict[str, Any] = {"dtype": dtype, "budget_bytes": budget}
    if half:
        wish |= {
            "dtype": "float32",
            "held_bytes": sum(tensor.nbytes for tensor in weights_of(trained)),
        }
    config, data = trained.config, trained.train_data.spec.to_record()
    batch_size = min(count, config.train.batch_size)
    with Session(gpu, load_calibration(gpu.name), config.granted) as session:
        largest: int = (
            session.infer(config, data, batch_size=batch_size, **wish).get().largest_batch or 0
        )
        if not largest:
            one = session.infer(config, data, batch_size=1, **wish).get()
            lean = session.infer(
                config, data, batch_size=1, dtype="float16", budget_bytes=budget
            ).get()
            raise MemoryBudgetError(describe_want(vram, half, one, lean))
    print(f"at most {largest} samples at once fit in {vram}{where}")
    return min(largest, count)


def describe_want(vram: str, half: bool, one: InferencePlan, lean: InferencePlan) -> str:
    """Say what a single sample needs, by the plan of it, and what asks for less where the plan of that fits."""
    needed = describe_bytes(math.ceil(one.with_room / MIB) * MIB)
    words = f"--vram: not even one sample fits in {vram}; it needs {needed} with the context"
    if lean.fits:
        float32_first = "leave out --half, which begins in float32, and " if half else ""
        words += f": {float32_first}use --dtype float16, or allow more"
    return words


def weights_of(trained: Trained) -> set[torch.Tensor]:
    """Return all parameters and buffers of a run's networks."""
    return {
        one
        for module in trained.run.task.modules.values()
        for one in (*module.parameters(), *module.buffers())
    }
