"""A run directory written by hand: the report package reads files only, so its tests need no training."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from mpt.report.run_page.page import plain

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    return lambda name="run", **changes: write_run(tmp_path / name, **changes)


def write_run(
    path: Path,
    *,
    mode: str = "amp",
    seed: int = 0,
    final: float = 0.95,
    steps: int = 100,
    peak_bytes: int = 50 << 20,
    step_seconds: float = 0.01,
    model: str = "dcgan",
    metric: str = "accuracy",
    higher_is_better: bool = True,
    reason: str = "amp was asked for; this CPU has bfloat16 instructions",
    finished: bool = True,
) -> Path:
    """Write a run whose numbers are drawn from its seed."""
    (path / "samples").mkdir(parents=True)
    generator = random.Random(seed)
    (path / "config.yaml").write_text(
        f"name: {path.name!r}\nmodel:\n  name: {model}\ndataset:\n  name: shapes\nprecision:\n  mode: {mode}\n"
        f"train:\n  steps: {steps}\n  batch_size: 32\nseed: {seed}\n"
    )
    (path / "env.json").write_text(
        json.dumps({"torch": "2.13.0", "processor": "a processor", "threads": 1, "devices": []})
    )
    lines, events, skipped, scale = [], [], 0, 65536.0
    for step in range(0, steps, max(1, steps // 100)):
        if generator.random() < 0.06 and mode == "amp":
            skipped, scale = skipped + 1, scale / 2
            events.append(
                {
                    "step": step,
                    "kind": "overflow",
                    "phase": "disc",
                    "message": f"skipped; scale is now {scale:g}",
                }
            )
        decay = math.exp(-3 * step / steps)
        lines.append(
            {
                "step": step,
                "kind": "train",
                "seconds": step * step_seconds,
                "losses": {
                    "disc/real": 0.7 * decay + 0.05 * generator.random(),
                    "disc/fake": 0.6 * decay + 0.05 * generator.random(),
                    "gen/fool": 1.5 - 0.5 * decay + 0.1 * generator.random(),
                },
                "lr": {"disc": 2e-4 * decay, "gen": 1e-4},
                "scale": {"disc": scale, "gen": 65536.0},
                "skipped": {"disc": skipped, "gen": 0},
                "samples_per_second": 32 / step_seconds * (0.95 + 0.1 * generator.random()),
                "step_seconds": step_seconds * (0.95 + 0.1 * generator.random()),
                "memory": {"peak_bytes": peak_bytes},
            }
        )
        if step % max(1, steps // 10) == 0:
            value = final - 0.3 * decay + 0.02 * generator.random()
            lines.append(
                {"step": step, "kind": "evaluate", "metrics": {metric: value, "loss": decay}}
            )
            shade = tuple(generator.randrange(256) for _ in range(3))
            Image.new("RGB", (64, 64), shade).save(path / "samples" / f"step-{step:08d}.png")
    lines.append({"step": steps, "kind": "evaluate", "metrics": {metric: final, "loss": 0.05}})
    (path / "metrics.jsonl").write_text("".join(json.dumps(plain(line)) + "\n" for line in lines))
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if finished:
        part = peak_bytes // 10
        summary = {
            "metric": metric,
            "higher_is_better": higher_is_better,
            "final": final,
            "best": final,
            "best_step": steps,
            "steps": steps,
            "median_step_seconds": step_seconds,
            "samples_per_second": 32 / step_seconds,
            "peak_memory": {
                "kind": "tracked",
                "peak_bytes": peak_bytes,
                "parameters": 2 * part,
                "gradients": 2 * part,
                "optimizer_state": 4 * part,
                "activations": part,
                "rest": peak_bytes - 9 * part,
            },
            "skipped": {"disc": skipped, "gen": 0},
            "precision": {
                "mode": mode,
                "dtype": "float32" if mode == "fp32" else "bfloat16",
                "reason": reason,
            },
            "wall_seconds": steps * step_seconds,
            "parameters": 1_234_567,
        }
        (path / "summary.json").write_text(json.dumps(plain(summary)))
    return path
