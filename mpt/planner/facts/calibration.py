"""Lessons of one real run about a card: its context, cuDNN's appetite, and how fast it truly is.

Everything that tensors do not show is a guess until a step has run. A run on CUDA records its measured peak;
`mpt plan calibrate RUN` turns its difference from the plan into the numbers of `mpt.planner.trace.unseen` and
`mpt.planner.trace.time_model` and keeps them per GPU. Only the unseen parts are ever adjusted: tensors are counted, not
fitted.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict

from mpt.errors import ConfigError, InputOutputError
from mpt.planner.answers.plan import READ
from mpt.planner.facts.gpus import Gpu, find_gpu, installed_gpu, plain

CONTEXT_BYTES = 450 * 2**20
"""300 to 500 MiB with CUDA 12 and lazily loaded kernels, depending on the card; of CUDA 13 no figure is known yet."""
LARGEST_CONTEXT = 2 * 2**30
LEAST_BUSY = 0.7
"""A card that was busy for less of the time has waited for data or the host."""
ALLOWED = {"context_bytes": (0, 4 * 2**30), "cudnn_share": (0.0, 4.0), "time_factor": (0.05, 20.0)}


@dataclass(frozen=True)
class Calibration:
    """The unseen parts of one card. The defaults are those of an uncalibrated one."""

    __pydantic_config__: ClassVar[ConfigDict] = READ

    context_bytes: int = CONTEXT_BYTES
    cudnn_share: float = 0.0
    """Workspace as a share of a dense convolution's input and output."""
    time_factor: float = 1.0
    """Measured over predicted seconds of a step."""
    source: str = ""
    """The run it was learnt from; empty when uncalibrated."""
    time_from: str = ""
    """The other card that `time_factor` was measured on (`--times-from`); empty if none was named."""
    cuda: str = ""
    """The CUDA release whose context was measured ("13.0"); empty if the run's records have none."""


def calibration_path(gpu_name: str) -> Path:
    """Return the file that holds a GPU's calibration: under $XDG_CACHE_HOME, else ~/.cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "mpt" / f"calibration-{plain(gpu_name)}.json"


def load_calibration(gpu_name: str, times_from: str | None = None) -> Calibration:
    """Read a GPU's calibration; the defaults if there is none. Raises ConfigError for a damaged file.

    `times_from` names another card whose measured factor over the roofline is taken; context and scratch stay each
    card's own. Only on request: on published throughputs it brought no improvement (docs/benchmarks/plan_transfer.md).
    Raises ConfigError for a card that is unknown or has not been calibrated.
    """
    path = calibration_path(gpu_name)
    found = _read(path) if path.is_file() else Calibration()
    if found.cuda and installed_cuda() not in ("", found.cuda.partition(".")[0]):
        found = replace(found, context_bytes=CONTEXT_BYTES)  # another CUDA has another context
    if times_from is None:
        return found
    other = find_gpu(times_from, "--times-from")
    if not calibration_path(other.name).is_file():
        known = sorted(
            one.stem.removeprefix("calibration-") for one in path.parent.glob("calibration-*.json")
        )
        listed = f"calibrated are {', '.join(known)}" if known else "no card has been calibrated"
        raise ConfigError(
            f"--times-from: {other.name} has no calibration; {listed} (mpt plan calibrate RUN)"
        )
    return replace(
        found, time_factor=_read(calibration_path(other.name)).time_factor, time_from=other.name
    )


def installed_cuda() -> str:
    """Return the major release of CUDA that the installed torch is built for ("13"), "" for a build without."""
    try:
        found = re.search(r"\+cu(\d\d)", version("torch"))
    except PackageNotFoundError:
        return ""
    return found.group(1) if found else ""


def _read(path: Path) -> Calibration:
    try:
        values = json.loads(path.read_text("utf-8"))
        found = Calibration(**values)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}: not a calibration ({error}); delete it or calibrate again"
        ) from error
    for name, (low, high) in ALLOWED.items():
        value = getattr(found, name)
        if not isinstance(value, int | float) or not low <= value <= high:
            raise ConfigError(
                f"{path}: {name} is {value!r}, allowed is {low} to {high}; delete it or calibrate again"
            )
    return found


def save_calibration(gpu_name: str, calibration: Calibration) -> Path:
    """Write a GPU's calibration and return its path. Raises InputOutputError."""
    path = calibration_path(gpu_name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".tmp")
        part.write_text(json.dumps(asdict(calibration), indent=2) + "\n", "utf-8")
        part.replace(path)
    except OSError as error:
        raise InputOutputError(f"{path}: cannot be written: {error}") from error
    return path


@dataclass(frozen=True)
class Measurement:
    """A CUDA run's record of one step."""

    gpu_name: str
    allocated: int
    reserved: int
    step_seconds: float
    context: int | None = None
    """Bytes in use on the device outside the process's allocator, if the driver reports it. More than any context is
    another process, and teaches nothing.
    """
    memory_bytes: int = 0
    """The card's; 0 if the records lack it."""
    capability: tuple[int, int] = (0, 0)
    cuda: str = ""
    busy: float | None = None
    """The mean share of sampled moments in which any kernel ran; None if the driver was not asked."""

    @property
    def waits_for_others(self) -> bool:
        """Whether the card mostly waited for data or the host, so that the step's time says nothing of it."""
        return self.busy is not None and self.busy < LEAST_BUSY

    @property
    def gpu(self) -> Gpu:
        """The card. Raises ConfigError for one that neither the records nor the table describe."""
        if self.memory_bytes:
            return installed_gpu(self.gpu_name, self.memory_bytes, self.capability)
        return find_gpu(self.gpu_name)


def learn(
    measured: Measurement,
    planned: int,
    planned_with_scratch: int,
    planned_seconds: float,
    source: str,
) -> Calibration:
    """Return the calibration that makes the plan agree with the measurement, as far as `ALLOWED` goes.

    A step that took so much longer or shorter than the roofline is one that says nothing of the card (a tiny network, a
    card that others used), and so does one in which the card waited for data: the factor stays 1 then.

    `planned` is the allocated peak without cuDNN's scratch, `planned_with_scratch` the one with a share of 1. A
    measured peak below the planned one teaches nothing about scratch, and the share stays 0.
    """
    reach = planned_with_scratch - planned
    share = min(4.0, max(0.0, (measured.allocated - planned) / reach)) if reach > 0 else 0.0
    context = measured.context
    if context is None or context > LARGEST_CONTEXT:
        context = CONTEXT_BYTES
    factor = measured.step_seconds / planned_seconds if planned_seconds else 1.0
    low, high = ALLOWED["time_factor"]
    is_taken = low <= factor <= high and not measured.waits_for_others
    factor = round(factor, 4) if is_taken else 1.0
    return Calibration(context, round(share, 4), factor, source, cuda=measured.cuda)


def read_measurement(run: Path) -> Measurement:
    """Return a run's measurements of a GPU. Raises ConfigError when there is none, as in runs on a CPU."""
    advice = "calibrate with a finished run that trained on CUDA"
    try:
        summary: dict[str, Any] = json.loads((run / "summary.json").read_text("utf-8"))
        environment: dict[str, Any] = json.loads((run / "env.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"mpt plan calibrate: {run} has no records that can be read ({error}); {advice}"
        ) from error
    memory = summary.get("peak_memory") or {}
    devices = environment.get("devices") or []
    if memory.get("kind") != "cuda" or not devices:
        raise ConfigError(f"mpt plan calibrate: {run} holds no measured peak of a GPU; {advice}")
    outside = memory.get("outside_bytes")
    try:
        name = str(memory.get("device") or devices[0]["name"])
        device: dict[str, Any] = next((one for one in devices if one["name"] == name), {})
        major, _, minor = str(device.get("capability", "0.0")).partition(".")
        return Measurement(
            name,
            int(memory.get("steps_peak_bytes") or memory["peak_bytes"]),
            int(memory.get("steps_reserved_bytes") or memory["reserved_bytes"]),
            float(summary["median_step_seconds"]),
            None if outside is None else int(outside),
            int(device.get("memory_bytes", 0)),
            (int(major), int(minor)),
            str(environment.get("cuda") or ""),
            (summary.get("device_utilization") or {}).get("mean"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"mpt plan calibrate: {run}: a figure is missing ({error}); {advice}"
        ) from error
