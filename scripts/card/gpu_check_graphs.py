"""What recording updates as CUDA graphs gains on this card, for networks that the host's launches hold back.

Part of `gpu_check.py` (a row of its features). Each network takes steps as it is, and recorded; losses are held against
those of the same updates operator by operator.
"""

from __future__ import annotations

import time
from typing import Any

from mpt.doctor.card.runner import Skipped

NETWORKS = ("dcgan_amp", "classify_digits", "saehd_demo")
STEPS, SMALL_STEPS = 100, 2
WARM = 5
"""Steps before time is taken: those that are compared and recorded."""
APART = 0.05
"""Of a loss: how far it may be from that of the same updates operator by operator, on kernels of another choice."""


def try_graphs(rehearsal: str) -> dict[str, Any]:
    """Return the times of a step as it is and recorded, and how far the losses are from those without graphs."""
    if rehearsal == "cpu":
        raise Skipped("a CPU has no CUDA graphs")
    said, wrong = [], []
    for name in NETWORKS[1:2] if rehearsal else NETWORKS:
        count = SMALL_STEPS if rehearsal else STEPS
        seconds, _ = take(name, {}, count)
        recorded, losses = take(name, {"cuda_graphs": True}, count)
        _, expected = take(name, {"cuda_graphs": {"warmup": WARM + count}}, count)
        apart = max(
            abs(one - two) / max(abs(two), 1e-3) for one, two in zip(losses, expected, strict=True)
        )
        said.append(
            f"{name} {1000 * seconds:.2f} ms a step, recorded {1000 * recorded:.2f} ms "
            f"({seconds / recorded:.2f} times as fast), losses {apart:.1e} apart"
        )
        wrong += [f"{name}: recorded losses are {apart:.1%} apart"] if not apart <= APART else []
    return {"said": "; ".join(said), **({"wrong": "; ".join(wrong)} if wrong else {})}


def take(name: str, memory: dict[str, Any], count: int) -> tuple[float, list[float]]:
    """Return the seconds of a step, over `count` of them without waiting in between, and the last losses."""
    import torch

    import mpt
    from mpt.config.finding.shipped import shipped_configs
    from mpt.config.load import load_config

    words = [
        "train.device=cuda",
        *(f"memory.{key}={setting(value)}" for key, value in memory.items()),
    ]
    built = mpt.build(load_config(shipped_configs()[name], words))
    batches = built.batches()
    done: Any = {}
    started = 0.0
    for step in range(WARM + count):
        if step == WARM:
            torch.cuda.synchronize()
            started = time.perf_counter()
        done = mpt.update(built, next(batches), step)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / count
    return seconds, [float(value) for one in done.values() for value in one.losses.values()]


def setting(value: Any) -> str:
    """Return a trick's value as an override writes it."""
    return f"{{warmup: {value['warmup']}}}" if isinstance(value, dict) else str(value).lower()
