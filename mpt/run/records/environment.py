"""A run's environment: versions, devices, threads, processor features, the commit, the command line.

Results differ between one and two threads and between versions, so both are kept alongside them.
Only environment variables that change the numbers or the devices are kept: the rest may hold secrets.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mpt import accelerator
from mpt.run.process.launch import SIDE_BY_SIDE
from mpt.version import VERSION

VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "KMP_AFFINITY",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    SIDE_BY_SIDE,
)
PROCESSOR_FEATURES = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_fp16",
    "bf16",
)
PACKAGES = ("torchvision", "numpy", "timm", "bitsandbytes", "torchao")


def describe_environment() -> dict[str, Any]:
    """Return this process's environment, as JSON can hold it."""
    return {
        "mpt": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: found for name in PACKAGES if (found := package_version(name))},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor_name(),
        "processor_features": processor_features(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "devices": describe_devices(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,  # type: ignore[no-untyped-call]
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "commit": current_commit(Path.cwd()),
        "uncommitted_files": uncommitted_files(Path.cwd()),
        "command": sys.argv,
    }


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def describe_devices() -> list[dict[str, Any]]:
    """Return name and memory of each card, and a CUDA card's compute capability."""
    kind, found = accelerator.available(), []
    for index in range(torch.accelerator.device_count()) if kind not in (None, "mps") else ():
        properties = torch.get_device_module(kind).get_device_properties(index)
        capability = (
            {"capability": f"{properties.major}.{properties.minor}"} if kind == "cuda" else {}
        )
        found.append(
            {"name": properties.name, **capability, "memory_bytes": properties.total_memory}
        )
    return found


def read_processor_lines() -> dict[str, str]:
    """Return the first processor's entries in /proc/cpuinfo; empty on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def processor_name() -> str:
    return read_processor_lines().get("model name") or platform.processor() or platform.machine()


def processor_features() -> list[str]:
    """Return the features that decide how fast half precision is on this processor."""
    lines = read_processor_lines()
    flags = set((lines.get("flags") or lines.get("Features") or "").split())
    return [name for name in PROCESSOR_FEATURES if name in flags]


def current_commit(folder: Path) -> str | None:
    """Return the commit that is checked out in a folder, None if there is none or no git."""
    answer = ask_git(folder, "rev-parse", "--verify", "--quiet", "HEAD")
    return None if answer is None else answer.strip() or None


def uncommitted_files(folder: Path) -> int | None:
    """Return how many tracked files differ from the commit, None without git. A file that was only touched counts."""
    # by their times: no filter of the repository runs
    answer = ask_git(folder, "diff-index", "--name-only", "HEAD")
    return None if answer is None else len(answer.splitlines())


def ask_git(folder: Path, *words: str) -> str | None:
    """Return git's output, None if it fails or is not there."""
    # A file system monitor is a program that the repository's own settings name; it is not to be started.
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *words]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout if answer.returncode == 0 else None
