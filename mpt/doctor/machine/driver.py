"""Why torch sees no card: the wheel's CUDA, the NVIDIA driver, and settings that hide cards from a process."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import torch

from mpt.doctor.findings import Section

VERSION_FILE = Path("/proc/driver/nvidia/version")
"""The kernel module's own version file on Linux, in containers too."""
NOTHING_VISIBLE = "No CUDA GPUs are available"
"""torch's error if the driver works and no card is left."""
TABLE = "docs/how-to/gpu.md has a table of wheels and drivers"


def driver_version() -> str:
    """Return the NVIDIA driver's version ("580.95.05"), "" if none is loaded or it does not say."""
    try:
        first = VERSION_FILE.read_text("utf-8", "replace").partition("\n")[0]
    except OSError:
        return ""
    found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", first)
    return found.group(1) if found else ""


def examine_visibility(section: Section) -> None:
    """Note why torch sees no card, if it sees none: a wheel for CPUs, an old driver, no driver, hidden cards."""
    if torch.cuda.is_available() or torch.version.hip:
        return
    driver = driver_version()
    if not torch.version.cuda:
        if driver or shutil.which("nvidia-smi"):
            text = f"this machine has an NVIDIA driver{driver and ' ' + driver}, but this torch is built for CPUs"
            section.add(
                "warning", "cuda", text, f"install a CUDA wheel of PyTorch to use the card; {TABLE}"
            )
        return
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = NOTHING_VISIBLE
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
    # torch's words: "The NVIDIA driver on your system is too old (found version 12020)."
    if "too old" in reason:
        served = re.search(r"found version (\d+)", reason)
        number = int(served.group(1)) if served else 0
        serves = f", which serves CUDA {number // 1000}.{number % 1000 // 10}," if number else ""
        text = (
            f"the NVIDIA driver {driver}".rstrip()
            + f"{serves} is too old for this torch's CUDA {torch.version.cuda}"
        )
        section.add(
            "fault",
            "cuda",
            text,
            f"update the driver, or install a wheel for an older CUDA; {TABLE}",
        )
    elif "no NVIDIA driver" in reason:
        advice = f"where there is a card, install NVIDIA's driver; {TABLE}"
        section.add(
            "warning",
            "cuda",
            f"torch is built for CUDA {torch.version.cuda}, and no driver is loaded",
            advice,
        )
    elif hidden is not None and NOTHING_VISIBLE in reason:
        text = f"CUDA_VISIBLE_DEVICES={hidden!r} leaves no card to be seen"
        section.add(
            "warning", "cuda", text, "unset it, or name a card that nvidia-smi lists, such as 0"
        )
    else:
        text = f"a driver {driver}".rstrip() + f" is loaded, but torch sees no card: {reason}"
        section.add("fault", "cuda", text, f"see whether nvidia-smi lists the card; {TABLE}")
