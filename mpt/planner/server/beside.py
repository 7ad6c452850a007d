"""A plan made during a run: its predicted memory, in the same folder as the measured one.

While a run trains, a process of its own plans the same configuration, at the lowest priority and without the GPU, and
writes `plan.json` into the run's directory. The report puts it alongside the measured peak. A plan that fails or takes
too long is a note there and costs the run nothing else.

For a GPU the allocator's figures are planned; on a CPU the live tensor bytes that the loop tracks there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch

from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.errors import MptError
from mpt.parallel.world import ALONE, World
from mpt.planner.client import processes
from mpt.planner.facts.calibration import Calibration, load_calibration
from mpt.planner.facts.gpus import DEFAULT, Gpu, find_gpu, installed_gpu
from mpt.planner.facts.placement import Placement
from mpt.planner.trace.cannot_plan import CannotPlan
from mpt.run.process.files import write_atomically
from mpt.seams import DataSpec

LIFE_SECONDS = 600
"""A planning process ends itself after this, also if its run was killed."""
WAIT_SECONDS = 30.0
"""How long a finished run waits for a plan that is not there yet."""


class PlanBeside:
    """A plan under way, or none; a context manager that leaves no process behind."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes] | None = None) -> None:
        self.path, self.process = path, process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def wait(self, seconds: float = WAIT_SECONDS) -> None:
        """Wait for the plan; if there will be none, write down why."""
        if self.process is None:
            return
        try:
            code = self.process.wait(seconds)
            problem = f"the planning process ended with {code}"
        except subprocess.TimeoutExpired:
            problem = f"the plan was not done {seconds:.0f} s after the training"
        self.stop()
        if not self.path.is_file():
            note(self.path, problem)


def plan_beside(
    config: Config,
    data: DataSpec,
    device: torch.device,
    path: Path,
    allow: Sequence[str] = (),
    world: World = ALONE,
) -> PlanBeside:
    """Start planning the first rank's memory if `train.plan_memory` wants it, to be written to `path`."""
    wanted = config.train.plan_memory
    if device.type not in ("cuda", "cpu") or not (
        device.type == "cuda" if wanted is None else wanted
    ):
        return PlanBeside(path)
    try:
        path.unlink(missing_ok=True)  # of the run before it was resumed
        return PlanBeside(path, launch(request(config, data, device, path, allow, world)))
    except (MptError, OSError, TypeError, ValueError) as error:
        note(path, str(error))
        return PlanBeside(path)


def request(
    config: Config,
    data: DataSpec,
    device: torch.device,
    path: Path,
    allow: Sequence[str] = (),
    world: World = ALONE,
) -> dict[str, Any]:
    """Return the request to the process, as plain data. Raises CannotPlan for several processes on CPUs."""
    gpu, calibration = find_gpu(DEFAULT), Calibration()
    if world.size > 1 and device.type == "cpu":
        raise CannotPlan("one of several processes is planned on CUDA devices alone")
    ranks = Placement(world.size, config.parallel.strategy, per_machine=world.on_machine)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = installed_gpu(
            properties.name, properties.total_memory, (properties.major, properties.minor)
        )
        calibration = load_calibration(gpu.name)
    return {
        "config": config.to_yaml(),
        "allow": list(allow),
        "data": data.to_record(),
        "kind": device.type,
        "gpu": asdict(gpu),
        "calibration": asdict(calibration),
        "placement": ranks.as_data() if world.size > 1 else {},
        "path": str(path.absolute()),
    }


def launch(wish: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the process. It shares neither the GPU nor the terminal's signals with the run."""
    own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as words:
        json.dump(wish, words)
        words.seek(0)
        return subprocess.Popen(
            [sys.executable, "-m", "mpt.planner.server.beside"],
            stdin=words,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**processes.environment(), **own},
            start_new_session=True,
        )


def note(path: Path, problem: str) -> None:
    """Write down why there is no plan."""
    # a disk that takes no note takes no report either, which says so
    with contextlib.suppress(MptError):
        write_atomically(path, json.dumps({"error": problem}) + "\n")


def main() -> None:
    """Plan the request of standard input and write the answer to the file that it names."""
    if hasattr(os, "nice"):
        os.nice(19)
    if hasattr(signal, "alarm"):
        signal.alarm(LIFE_SECONDS)
    wish = json.load(sys.stdin)
    path = Path(wish["path"])
    try:
        answer = predict(wish)
    except MptError as error:
        note(path, str(error))
    except Exception as error:
        note(path, f"{type(error).__name__}: {error}".splitlines()[0])
    else:
        write_atomically(path, json.dumps(answer, indent=1) + "\n")


def understand(wish: dict[str, Any]) -> tuple[Config, DataSpec, Gpu]:
    """Return the configuration, the layout of its data and the card of a request. Raises the configuration's errors."""
    gpu = Gpu(**{**wish["gpu"], "capability": tuple(wish["gpu"]["capability"])})
    return load_config(wish["config"], allow=wish["allow"]), DataSpec.from_record(wish["data"]), gpu


def predict(wish: dict[str, Any]) -> dict[str, Any]:
    """Return the plan's figures. Raises CannotPlan, or the configuration's own errors."""
    from mpt.planner.plans.plan import Wish, plan_config
    from mpt.planner.step.run_fake import trace_config
    from mpt.planner.trace.trace import live_peak

    started = time.perf_counter()
    config, data, gpu = understand(wish)
    if wish["kind"] == "cpu":
        fake = trace_config(
            config, data, config.train.batch_size, gpu, None, torch.device("cpu"), batch_ahead=False
        )
        found: dict[str, Any] = {
            "kind": "live tensors",
            "peak_bytes": live_peak(fake.trace),
            "notes": fake.notes,
        }
    else:
        calibration = Calibration(**wish["calibration"])
        plan = plan_config(config, data, gpu, calibration, Wish(placement=wish["placement"]))
        found = {
            "kind": "cuda",
            "gpu": gpu.name,
            "calibrated_by": calibration.source,
            "peak_bytes": plan.allocated,
            "reserved_bytes": plan.reserved,
            "context_bytes": plan.context_bytes,
            "by_category": plan.by_category,
            "moment": plan.moment,
            "step_seconds": plan.step_seconds,
            "notes": plan.notes,
        }
    return {**found, "planning_seconds": round(time.perf_counter() - started, 2)}


if __name__ == "__main__":
    main()
