"""The checks of a card, the most valuable first; `python -m mpt.doctor.card.checks NAME` makes one and prints its row.

Shared by `mpt doctor --only device` and `scripts/gpu_check.py`. A name is that of a kind of check, and behind a space
the shipped configuration that it is made of.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from mpt.doctor.card import agreement, commands, machine, updates
from mpt.doctor.card.runner import Skipped
from mpt.doctor.card.subjects import subject_names

Check = Callable[[str, torch.device, bool], dict[str, Any]]
"""Takes a configuration's name ("" for none), the device and whether to be small; returns a row."""
KINDS: dict[str, Check] = {
    "machine": lambda name, device, small: machine.measure_machine(device),
    "losses": lambda name, device, small: agreement.compare_losses(name, device),
    "streams": lambda name, device, small: updates.compare_streams(device),
    "waits": lambda name, device, small: updates.find_waits(name, device),
    "nan": lambda name, device, small: updates.poison(device),
    "workers": lambda name, device, small: commands.compare_workers(name, device),
    "plan": lambda name, device, small: commands.compare_plan(name, device),
    "offload": lambda name, device, small: updates.offload_for_long(device, small),
    "resume": lambda name, device, small: commands.resume(name, device),
    "nccl": lambda name, device, small: commands.sum_over_nccl(device),
}
OF_EACH_SUBJECT = ("losses", "waits", "plan", "resume")
SMALL_SUBJECTS = ("classify_digits", "vae")
OF_ONE = {"workers": "classify_digits"}
MEANINGS = {
    "machine": "free memory and the bus",
    "losses": "losses and gradients as on the CPU, in each precision mode",
    "streams": "the same bits with side streams and with blocking launches",
    "waits": "a step waits only where it must",
    "nan": "a gradient of NaN is not lost, in each precision mode",
    "workers": "data workers",
    "plan": "memory and time as planned",
    "offload": "20 steps with offloaded activations",
    "resume": "a resumed training is equal to the bit",
    "nccl": "NCCL with one rank",
}


def check_names(small: bool = False) -> list[str]:
    """Return the names of all checks in their order; to be small, of two tasks alone."""
    subjects = [name for name in subject_names() if not small or name in SMALL_SUBJECTS]
    names: list[str] = []
    for kind in KINDS:
        if kind in OF_EACH_SUBJECT:
            names += [f"{kind} {subject}" for subject in subjects]
        else:
            names.append(f"{kind} {OF_ONE[kind]}" if kind in OF_ONE else kind)
    return names


def commands_of(names: list[str], device: str, small: bool) -> dict[str, list[str]]:
    """Return the command of each check."""
    start = [sys.executable, "-m", "mpt.doctor.card.checks"]
    rest = ["--device", device, *(["--small"] if small else [])]
    return {name: [*start, *name.split(), *rest] for name in names}


def make(kind: str, subject: str, device: torch.device, small: bool) -> dict[str, Any]:
    """Make one check; return its row."""
    try:
        return KINDS[kind](subject, device, small)
    except Skipped as reason:
        return {"skipped": str(reason)}


def main() -> None:
    """Make the check that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("subject", nargs="?", default="")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--small", action="store_true", help="as little as shows that the check runs"
    )
    chosen = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a network's own output is no answer
    # read once; deterministic runs want it
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    answers.write(
        json.dumps(make(chosen.kind, chosen.subject, torch.device(chosen.device), chosen.small))
        + "\n"
    )
    answers.flush()


if __name__ == "__main__":
    main()
