"""Workloads planned in processes that see no GPU, each one plan after another: what they import, they import once.

Part of `gpu_check.py`. Such a process answers each line of its standard input, a request of
`mpt.planner.server.beside`, with a line: the planned bytes per share of what cuDNN may take beside its tensors.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0)
"""Of a convolution's own tensors, which cuDNN may take beside them."""
PROGRAM = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from scripts.card.gpu_check_planning import main; main()"
"""What a planning process runs."""
PLAN_SECONDS = 120
"""The most that a plan may take."""


class Planners:
    """Planning processes, one for each thread that asks."""

    def __init__(self) -> None:
        self.mine = threading.local()
        self.started: list[subprocess.Popen[str]] = []
        self.errors: list[Any] = []
        """What each of them wrote to its standard error."""
        self.is_closed = False

    def close(self) -> None:
        """End them all; what is being planned ends with an MptError."""
        self.is_closed = True
        for process, errors in zip(self.started, self.errors, strict=True):
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, errors):
                with contextlib.suppress(OSError):  # what was not written yet
                    pipe.close()  # type: ignore[union-attr]

    def plan(self, config: Any, data: Any, device: Any, until: float = math.inf) -> dict[str, Any]:
        """Return the planned bytes per share of cuDNN's scratch.

        Raises MptError with the reason, TimeoutError where it takes too long or beyond `until` on the monotonic clock.
        """
        from mpt.errors import MptError
        from mpt.planner.server.beside import request
        from scripts.card.gpu_check_workloads import ALLOW

        seconds = max(1.0, min(PLAN_SECONDS, until - time.monotonic()))
        process = self.process()
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()
        timer = threading.Timer(seconds, lambda: (late.set(), process.kill()))
        timer.start()
        try:
            process.stdin.write(
                json.dumps(request(config, data, device, Path("unused"), ALLOW)) + "\n"
            )
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # it ended
            line = ""
        finally:
            timer.cancel()
        if late.is_set():
            raise TimeoutError(f"no plan within {seconds:.0f} s")
        if not line:
            process.wait()
            self.mine.errors.seek(0)
            raise MptError(
                f"not planned: {' | '.join(self.mine.errors.read().strip().splitlines()[-2:])}"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise MptError(f"not planned: {answer['error']}")
        return answer

    def process(self) -> subprocess.Popen[str]:
        """Return the process of this thread, a new one where there is none or it ended. Raises MptError when closed."""
        from mpt.errors import MptError

        known: subprocess.Popen[str] | None = getattr(self.mine, "process", None)
        if known is not None and known.poll() is None:
            return known
        if self.is_closed:
            raise MptError("not planned: the check ends")
        self.mine.errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.errors.append(self.mine.errors)
        self.mine.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.mine.errors,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )
        self.started.append(self.mine.process)
        return self.mine.process


def plan_here(wish: dict[str, Any]) -> dict[str, Any]:
    """Trace once with all of cuDNN's scratch, and replay with each share of it."""
    import torch

    from mpt.planner.facts.calibration import Calibration
    from mpt.planner.server.beside import understand
    from mpt.planner.step.run_fake import trace_config
    from mpt.planner.trace.replay import replay
    from mpt.planner.trace.trace import live_peak
    from mpt.planner.trace.unseen import CONVOLUTIONS, unseen_on

    config, data, gpu = understand(wish)
    started = time.perf_counter()
    batch_size = config.train.batch_size
    if wish["kind"] == "cpu":
        trace = trace_config(config, data, batch_size, gpu, None, torch.device("cpu")).trace
        return {
            "planned": {"0": [live_peak(trace), None]},
            "planning_seconds": time.perf_counter() - started,
        }
    # The measuring process takes cuBLAS's deterministic workspaces for every workload, also where it measures kernels.
    unseen = unseen_on(gpu, Calibration(cudnn_share=1.0), deterministic=True)
    fake = trace_config(config, data, batch_size, gpu, unseen)
    scratch = [
        s.category == "workspace" and s.operator in CONVOLUTIONS for s in fake.trace.storages
    ]
    planned = {}
    for share in SHARES:
        sizes = [
            int(share * storage.size) if is_scratch else storage.size
            for storage, is_scratch in zip(fake.trace.storages, scratch, strict=True)
        ]
        found = replay(
            fake.trace, sizes=sizes, expandable="expandable_segments" in config.memory.tricks
        )
        planned[str(share)] = [found.allocated, found.reserved]
    return {
        "planned": planned,
        "planned_step_seconds": fake.work.seconds(gpu),
        "planning_seconds": time.perf_counter() - started,
    }


def main() -> None:
    """Answer requests until the input ends. What models print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    for line in sys.stdin:
        try:
            answer = plan_here(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        gc.collect()
