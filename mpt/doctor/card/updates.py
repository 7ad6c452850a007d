"""Updates on a card that must come out in one way: equal with and without side streams, no waits, no NaN lost.

The expected figures follow from the step alone, so that no figures of another card are needed.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mpt.config.schema import Config
from mpt.config.sizes import describe_bytes
from mpt.data.loading.loader import pin, prefetch, to_device
from mpt.doctor.card.processes import reason, run
from mpt.doctor.card.runner import Skipped
from mpt.doctor.card.subjects import MODES, first_batch, mode_config, on_device, small_config
from mpt.engine.building.build import build_datasets, build_run, seed_everything
from mpt.engine.building.torch_settings import prepare_torch
from mpt.engine.state.moving_averages import follow_step
from mpt.engine.step.step import update
from mpt.errors import MptError
from mpt.seams import Batch, Run

STEPS = 3
WAYS: dict[str, dict[str, Any]] = {
    "prefetched": {},
    "activations offloaded": {"offload_activations": 0.0},
    "recomputed": {"recompute": "all"},
}
"""Ways of training that are equal to the plain one bit for bit."""
EXPECTED_WAITS = ("loss_watch.py", "questions.py")
"""Intended waits of a step: for its losses, or for whether its gradients are finite."""
SAID_OF_A_WAIT = "called a synchronizing"
"""By torch; it also warns that its mode of synchronization is a prototype."""
OFFLOAD_STEPS, SETTLED_STEP = 20, 5
GROWTH = 0.05


def require_card(device: torch.device) -> None:
    """Raise Skipped without a card."""
    if device.type != "cuda":
        raise Skipped("needs a CUDA device")


def stream_config(memory: dict[str, Any]) -> Config:
    """Return the training whose ways are compared."""
    model = {"name": "small_cnn", "features": 32, "image_size": 32}
    return mode_config("fp32", model=model, memory=memory, optimizer="adam")


def hash_after_steps(config: Config, device: torch.device, plainly: bool) -> str:
    """Return a hash of the weights after some steps on batches from pinned memory, or on batches copied plainly."""
    prepare_torch(config)
    seed_everything(config.seed)
    data, _ = build_datasets(config)
    built = build_run(config, device, data.spec)

    def batches() -> Iterator[Batch]:
        count = config.train.batch_size
        for step in range(STEPS):
            batch = data.fetch([(step * count + number) % len(data) for number in range(count)], 0)
            yield batch if plainly or device.type != "cuda" else pin(batch)

    stream = (
        (to_device(one, device, data.spec) for one in batches())
        if plainly
        else prefetch(batches(), device, data.spec)
    )
    for step, batch in enumerate(stream):
        take_step(built, batch, step)
        if plainly and device.type == "cuda":
            torch.cuda.synchronize(device)
    digest = hashlib.sha256()
    for module in built.task.modules.values():
        for value in module.state_dict().values():
            digest.update(
                value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
    return digest.hexdigest()


def take_step(built: Run, batch: Batch, step: int) -> list[Any]:
    """Perform every phase's update of a step."""
    done = [update(built, phase, batch) for phase in built.phases]
    follow_step(built, step)
    return done


def compare_streams(device: torch.device) -> dict[str, Any]:
    """Train plainly, with side streams, and with blocking launches: all must end with the same bits."""
    require_card(device)
    plain = hash_after_steps(stream_config({}), device, plainly=True)
    wrong = [
        way
        for way, memory in WAYS.items()
        if hash_after_steps(stream_config(memory), device, False) != plain
    ]
    if "CUDA_LAUNCH_BLOCKING" in os.environ:
        return {"said": plain, **({"wrong": ", ".join(wrong)} if wrong else {})}
    command = [sys.executable, "-m", "mpt.doctor.card.checks", "streams", "--device", str(device)]
    done = run(command, 3600, env={**os.environ, "CUDA_LAUNCH_BLOCKING": "1"})
    if done.returncode:
        raise RuntimeError(f"with blocking launches: {reason(done)}")
    found = [f"{way}: other weights than plainly" for way in wrong]
    found += [] if plain in done.stdout else ["blocking launches end with other weights"]
    said = f"weights after {STEPS} steps, compared with plain ones to the bit: {', '.join(WAYS)}, blocking launches"
    return {"said": said, **({"wrong": "; ".join(found)} if found else {})}


def find_waits(name: str, device: torch.device) -> dict[str, Any]:
    """List the lines of a shipped configuration's step at which the host waits for the card, by torch's own look."""
    require_card(device)
    config = small_config(name)
    data, _ = build_datasets(config)
    built = build_run(config, device, data.spec)
    batch = on_device(first_batch(data), data, device)
    for step in range(2):
        take_step(built, batch, step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            take_step(built, batch, 2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = {
        f"{Path(one.filename).name}:{one.lineno}"
        for one in caught
        if SAID_OF_A_WAIT in str(one.message)
    }
    unexpected = sorted(place for place in places if not place.startswith(EXPECTED_WAITS))
    said = f"waits at {', '.join(sorted(places)) or 'no line'}"
    return {
        "said": said,
        **({"wrong": f"a step waits at {', '.join(unexpected)}"} if unexpected else {}),
    }


def poison(device: torch.device) -> dict[str, Any]:
    """Make one gradient NaN in each mode: the step must be skipped, or the weights must show it."""
    skipped, shown, refused, wrong = [], [], [], []
    for mode in MODES:
        try:
            config = mode_config(mode)
            data, _ = build_datasets(config)
            built = build_run(config, device, data.spec)
        except MptError:
            refused.append(mode)
            continue
        batch = on_device(first_batch(data, 16), data, device)
        take_step(built, batch, 0)
        weight = next(iter(built.phases[0].module.parameters()))
        handle = weight.register_hook(lambda gradient: torch.full_like(gradient, float("nan")))  # type: ignore[no-untyped-call]
        (done,) = take_step(built, batch, 1)
        handle.remove()
        is_finite = bool(torch.isfinite(weight).all())
        if done.stats.skipped or not done.finite:
            skipped.append(mode)
            wrong += [] if is_finite else [f"{mode}: skipped, and the weights are not finite"]
        else:
            shown.append(mode)
            wrong += (
                [f"{mode}: a gradient of NaN left finite weights, and no step was skipped"]
                if is_finite
                else []
            )
    said = (
        f"skipped in {', '.join(skipped) or 'none'}; in the weights in {', '.join(shown) or 'none'}"
    )
    said += f"; refused here: {', '.join(refused)}" if refused else ""
    return {"said": said, **({"wrong": "; ".join(wrong)} if wrong else {})}


def offload_for_long(device: torch.device, small: bool) -> dict[str, Any]:
    """Train 20 steps with and without offloaded activations: memory must not grow, and less must be allocated."""
    require_card(device)
    features, side, batch = (16, 32, 8) if small else (64, 128, 64)
    model = {"name": "small_cnn", "features": features, "image_size": side}
    seconds, peaks, grown = [], [], 0.0
    for memory in ({}, {"offload_activations": 0.001 if small else 1.0}):
        config = mode_config(
            "fp32", model=model, memory=memory, train={"batch_size": batch, "steps": 100}
        )
        data, _ = build_datasets(config)
        built = build_run(config, device, data.spec)
        inputs = on_device(first_batch(data, batch), data, device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        taken, reserved = [], []
        for step in range(OFFLOAD_STEPS):
            started = time.perf_counter()
            take_step(built, inputs, step)
            torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - started)
            reserved.append(torch.cuda.memory_reserved(device))
        seconds.append(statistics.median(taken[SETTLED_STEP:]))
        peaks.append(torch.cuda.max_memory_allocated(device))
        grown = reserved[-1] / reserved[SETTLED_STEP] - 1
        del built, inputs
    wrong = (
        [f"reserved memory grew by {grown:.0%} after step {SETTLED_STEP}"] if grown > GROWTH else []
    )
    wrong += ["the peak is no lower"] if peaks[1] >= peaks[0] else []
    said = (
        f"peak {describe_bytes(peaks[1])}, without {describe_bytes(peaks[0])}; a step takes "
        f"{seconds[1] / seconds[0]:.2f} times as long; reserved memory grew by {grown:.1%} in {OFFLOAD_STEPS} steps"
    )
    return {"said": said, **({"wrong": "; ".join(wrong)} if wrong else {})}
