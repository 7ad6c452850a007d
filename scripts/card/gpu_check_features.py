"""What only a card can show of single features: saves beside the training, shards, Triton operators, streamed weights.

Part of `gpu_check.py`. Each is tried in a process of its own and judged where there is something to be right or wrong:
checkpoints that are the same, gradients and weights that agree. What cannot be tried on a machine says why.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mpt.doctor.card import runner  # noqa: E402
from mpt.doctor.card.runner import Skipped  # noqa: E402
from scripts.card.gpu_check_graphs import try_graphs  # noqa: E402

VIT = {"name": "torchvision:vit_b_16", "image_size": 224}
SMALL_VIT = {
    "name": "tests.planner.models:TinyViT",
    "image_size": 32,
    "channels": 3,
    "options": {"width": 32, "depth": 4, "channels": 3},
}
STEPS, SMALL_STEPS = 10, 2
OPERATOR_SIZE, SMALL_OPERATOR_SIZE = (2, 64, 128, 192), (1, 2, 4, 5)
"""Samples, channels, height and width of the maps that DAIN's operators are compared on."""
AGREE = 1e-4
"""Of the largest number: how far sums of float32 in another order may be apart."""
SHARDED_CONFIG = ROOT / "configs" / "classify_digits.yaml"


def try_all(seconds: float, rehearsal: str, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Try every feature that `before` does not settle, each in a process of its own, within some seconds."""
    rest = [f"--rehearsal={rehearsal}"] if rehearsal else []
    tried = {
        name: [sys.executable, str(Path(__file__).resolve()), name, *rest] for name in FEATURES
    }
    return {"rows": runner.run_checks(tried, seconds, (before or {}).get("rows", ()))}


def train_config(rehearsal: str, **sections: Any) -> Any:
    """Return the configuration of a vision transformer in half weights on drawn pictures."""
    from mpt.config.load import load_config
    from scripts.card.gpu_check_workloads import ALLOW, has_bfloat16

    data = {
        "model": SMALL_VIT if rehearsal else VIT,
        "dataset": {"name": "shapes", "size": 64},
        "optimizer": "adam",
        "precision": "bf16-pure",
        "train": {
            "batch_size": 4 if rehearsal else 32,
            "steps": 1000,
            "device": rehearsal or "cuda",
        },
    }
    if not has_bfloat16():
        data |= {"precision": "fp16-pure", "optimizer": {"name": "adam", "eps": 1e-4}}
    return load_config({**data, **sections}, allow=ALLOW)


def try_saves(rehearsal: str) -> dict[str, Any]:
    """Save beside the training and in it: how long the training stands still, and whether both files are the same."""
    import torch

    import mpt
    from mpt.engine.state.state import capture
    from mpt.run.checkpoints import checkpoint
    from mpt.run.checkpoints.background_save import BackgroundSave
    from mpt.run.records.layout import create_run

    built = mpt.build(train_config(rehearsal))
    batches = built.batches()
    device = built.run.device

    def take(steps: int) -> float:
        """Return the seconds of a step, as the median of some."""
        seconds = []
        for step in range(steps):
            batch = next(batches)
            wait(device)
            started = time.perf_counter()
            mpt.update(built, batch, step)
            wait(device)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)

    def stand_still(saver: BackgroundSave, directory: Any, step: int) -> float:
        """Return for how many seconds a save keeps the training waiting."""
        wait(device)
        started = time.perf_counter()
        state = checkpoint.encode(capture(built.run))
        saver.start(
            step, state, lambda encoded: checkpoint.write(directory, step, encoded, keep_last=9)
        )
        return time.perf_counter() - started

    count = SMALL_STEPS if rehearsal else STEPS
    take(2)
    alone = take(count)
    with tempfile.TemporaryDirectory() as folder:
        directory = create_run(Path(folder), "saves")
        beside, waiting = BackgroundSave(True), BackgroundSave(False)
        in_line = stand_still(waiting, directory, 1)
        first = stand_still(beside, directory, 2)  # maps the memory of the copy
        beside.finish()
        second = stand_still(beside, directory, 3)
        crowded = take(count)
        beside.finish()
        saved = [
            checkpoint.read_checkpoint(directory.checkpoint_path(step)).state["modules"]
            for step in (1, 2, 3)
        ]
        size = sum(path.stat().st_size for path in directory.checkpoint_path(1).iterdir())
    # nothing was trained between the saves
    alike = [same(saved[0], saved[1]), same(saved[0], saved[2])]
    said = (
        f"{size / 2**20:,.0f} MiB: the training stands still for {1000 * in_line:,.0f} ms where it writes itself, for "
        f"{1000 * first:,.0f} ms with the first copy and {1000 * second:,.0f} ms with the next "
        f"({size / second / 2**30:.1f} GiB/s); a step beside the writing takes {crowded / alone:.2f} times as long"
    )
    torch.cuda.empty_cache()
    return {
        "said": said,
        **({} if all(alike) else {"wrong": "a checkpoint written beside the training is another"}),
    }


def same(one: Any, other: Any) -> bool:
    """Are two states, nested as they are in checkpoints, the same to the bit?"""
    import torch

    if isinstance(one, torch.Tensor):
        return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            same(value, other[key]) for key, value in one.items()
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def try_shards(rehearsal: str) -> dict[str, Any]:
    """Train sharded over two cards, in one go and resumed: are the checkpoints the same, and can one card read one?"""
    import torch
    import torch.distributed

    if rehearsal != "cpu":
        if torch.cuda.device_count() < 2:
            raise Skipped(f"needs 2 cards, and torch sees {torch.cuda.device_count()}")
        if not torch.distributed.is_nccl_available():
            raise Skipped("needs NCCL, which this torch does not have")
    device = rehearsal or "cuda"
    words = [
        "parallel.strategy=fsdp",
        "train.steps=4",
        "train.epochs=null",
        "train.checkpoint_every=2",
    ]
    words += [
        "train.evaluate_every=0",
        "train.plan_memory=false",
        "precision=fp32",
        "train.keep_last=9",
    ]
    with tempfile.TemporaryDirectory() as folder:

        def mpt(*command: str) -> float:
            """Run a command; return its seconds. Raises SystemExit with its last line."""
            whole = [sys.executable, "-m", "mpt", *command, "--runs", folder, "--device", device]
            started = time.perf_counter()
            done = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(
                    f"{command[0]} {command[-1]}: {(done.stdout + done.stderr).strip().splitlines()[-1]}"
                )
            return time.perf_counter() - started

        train = ("train", str(SHARDED_CONFIG), *words, "--nproc", "2", "--quiet")
        runs = [Path(folder) / name for name in ("whole", "stopped")]
        seconds = mpt(*train, "--name", "whole")
        shutil.copytree(runs[0], runs[1])
        found = [path / "checkpoints" / "step-00000004" for path in runs]
        shutil.rmtree(found[1])  # as a kill after the checkpoint of step 2 leaves it
        mpt(*train, "--resume", str(runs[1]))
        mpt("train", str(SHARDED_CONFIG), *words[1:], "train.steps=5", "--resume", str(runs[1]))
        files = sorted(path.name for path in found[0].glob("*.safetensors"))
        alike = all(
            (found[0] / name).read_bytes() == (found[1] / name).read_bytes() for name in files
        )
    wrong = "" if alike else "a training that was stopped and resumed ends with other weights"
    wrong = wrong or ("" if len(files) == 3 else f"found the files {', '.join(files)}")
    said = f"two ranks wrote {len(files) - 1} shards, resumed from them to the bit, and one process read them"
    return {
        "said": f"{said}; 4 steps took {seconds:.0f} s with their start",
        **({"wrong": wrong} if wrong else {}),
    }


def try_triton(rehearsal: str) -> dict[str, Any]:
    """Compare DAIN's Triton operators with torch's, forward and gradients, and take their times."""
    if rehearsal:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    try:
        import triton  # noqa: F401
    except ImportError:
        raise Skipped("Triton is not installed") from None
    import torch

    from mpt.systems.dain.nn.operators import (
        correlation,
        filter_interpolation,
        projection,
        triton_operators,
    )

    # the interpreter takes memory by its address
    device = torch.device("cpu" if rehearsal else "cuda")
    batch, channels, height, width = SMALL_OPERATOR_SIZE if rehearsal else OPERATOR_SIZE
    radius = 1 if rehearsal else correlation.RADIUS
    numbers = torch.Generator().manual_seed(0)

    def drawn(count: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(batch, count, height, width, generator=numbers)).to(device)

    image, other, flow, kernel = drawn(channels), drawn(channels), drawn(2, 3.0), drawn(16, 0.25)
    weight = drawn(1).abs() + 0.1
    cases: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
        "correlation": (
            functools.partial(triton_operators.correlate, radius=radius),
            functools.partial(correlation.correlate, radius=radius),
            (image, other),
        ),
        "projection": (triton_operators.project_flow, projection.project_flow, (flow, weight)),
        "interpolation": (
            triton_operators.interpolate_filtered,
            filter_interpolation.interpolate_filtered,
            (image, flow, kernel),
        ),
    }
    said, wrong = [], []
    for name, (ours, theirs, leaves) in cases.items():
        results = [outcome(function, leaves) for function in (ours, theirs)]
        error = max(
            float((one - two).abs().max() / two.abs().max().clamp_min(1e-30))
            for one, two in zip(*results, strict=True)
        )
        again = outcome(ours, leaves)
        repeats = all(torch.equal(one, two) for one, two in zip(results[0], again, strict=True))
        times = [
            time_of(function, leaves, 1 if rehearsal else STEPS) for function in (ours, theirs)
        ]
        said.append(
            f"{name} {1000 * times[0]:.2f} ms, torch's {1000 * times[1]:.2f} ms, largest difference {error:.1e}"
        )
        wrong += [f"{name} differs by {error:.1e}"] if not error <= AGREE else []
        wrong += [] if repeats else [f"{name} is another one each time"]
    return {"said": "; ".join(said), **({"wrong": ", ".join(wrong)} if wrong else {})}


def outcome(function: Callable[..., Any], leaves: tuple[Any, ...]) -> list[Any]:
    """Return a function's output and its gradients at the leaves, from a gradient that is the same for all."""
    import torch

    leaves = tuple(leaf.clone().requires_grad_() for leaf in leaves)
    out = function(*leaves)
    grad = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def time_of(function: Callable[..., Any], leaves: tuple[Any, ...], count: int) -> float:
    """Return the seconds of a function's forward and backward, the median of some."""
    seconds = []
    for _ in range(count):
        wait(leaves[0].device)
        started = time.perf_counter()
        outcome(function, leaves)
        wait(leaves[0].device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def try_streaming(rehearsal: str) -> dict[str, Any]:
    """Train with weights that wait on the host and without: losses, memory and time of a step."""
    import torch

    import mpt

    count = SMALL_STEPS if rehearsal else STEPS
    memory: tuple[dict[str, Any], ...] = ({}, {"stream_weights": {"min_kibibytes": 0}})
    losses: list[list[float]] = []
    seconds: list[float] = []
    peaks: list[int] = []
    for tricks in memory:
        torch.manual_seed(0)
        built = mpt.build(train_config(rehearsal, memory=tricks))
        batches, device = built.batches(), built.run.device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        taken, values = [], []
        for step in range(count + 2):
            batch = next(batches)
            wait(device)
            started = time.perf_counter()
            done = mpt.update(built, batch, step)
            wait(device)
            taken.append(time.perf_counter() - started)
            values.append(
                sum(float(value) for one in done.values() for value in one.losses.values())
            )
        seconds.append(statistics.median(taken[2:]))
        losses.append(values)
        peaks.append(torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0)
        del built, batches, batch, done
    first = losses[0][0] == losses[1][0]
    apart = max(abs(one - two) / max(abs(one), 1e-6) for one, two in zip(*losses, strict=True))
    wrong = [] if first else ["the first loss is another"]
    wrong += [f"losses are {apart:.1%} apart after {count + 2} steps"] if not apart <= 0.05 else []
    wrong += ["the peak is no lower"] if peaks[0] and not peaks[1] < peaks[0] else []
    said = (
        f"peak {peaks[1] / 2**20:,.0f} MiB, without {peaks[0] / 2**20:,.0f} MiB; a step takes "
        f"{seconds[1] / seconds[0]:.2f} times as long; losses {apart:.1e} apart after {count + 2} steps"
    )
    return {"said": said, **({"wrong": ", ".join(wrong)} if wrong else {})}


def try_kernels(rehearsal: str) -> dict[str, Any]:
    """Measure the optimizer's kernels and channels last, as `mpt plan tune` does, for two networks."""
    from mpt.workflows.training import tuning

    if rehearsal:
        tuning.ROUNDS, tuning.ROUND_SECONDS = 3, 0.0
    said, wrong = [], []
    others = {} if rehearsal else {"resnet50": {"name": "torchvision:resnet50", "image_size": 224}}
    for name, model in {"ViT": None, **others}.items():
        changes = {} if model is None else {"model": model, "precision": "amp"}
        found = tuning.tune(train_config(rehearsal, **changes))
        for trial in found.trials:
            what = f"{name} {' '.join(f'{key}={value}' for key, value in trial.settings.items())}"
            if trial.reason:
                wrong.append(f"{what}: {trial.reason}")
            else:
                said.append(
                    f"{what} {trial.ratio:.2f} ({trial.low:.2f} to {trial.high:.2f}) of the time of a step"
                )
    return {"said": "; ".join(said), **({"wrong": "; ".join(wrong)} if wrong else {})}


def wait(device: Any) -> None:
    """Wait for the device."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


FEATURES: dict[str, Callable[[str], dict[str, Any]]] = {
    "checkpoints beside the training": try_saves,
    "weights streamed from the host": try_streaming,
    "kernels chosen by measurement": try_kernels,
    "updates recorded as CUDA graphs": try_graphs,
    "DAIN's Triton operators": try_triton,
    "sharded checkpoints of two cards": try_shards,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=FEATURES)
    parser.add_argument("--rehearsal", choices=("cpu", "cuda"), default="")
    chosen = parser.parse_args()
    try:
        row = FEATURES[chosen.name](chosen.rehearsal)
    except Skipped as reason:
        row = {"skipped": str(reason)}
    print(json.dumps(row))


if __name__ == "__main__":
    main()
