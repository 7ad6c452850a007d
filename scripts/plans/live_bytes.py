"""Live bytes at the peak of training steps outside of mpt on a CPU: planned on fake tensors and measured on real ones.

Steps are executed in a process of their own: a step may leave its libraries changed, and a script ends with it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARK = "live bytes "


def live_bytes(
    *calls: tuple[Mapping[str, Any], Mapping[str, Any]],
    folder: Path | None = None,
    timeout: float = 120,
) -> list[tuple[int, int]]:
    """Return the peaks of steps, planned and measured, by one process that is started in `folder`.

    A call is the fields of a `Source` and the arguments of its factory. Raises RuntimeError with the last lines of the
    process if it fails.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, json.dumps(calls)],
        cwd=folder, capture_output=True, text=True, check=False, timeout=timeout,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or "no output")
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    found = [json.loads(line.removeprefix(MARK)) for line in lines]
    assert len(found) == len(calls), done.stdout
    return [(planned, measured) for planned, measured in found]


def measure(calls: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
    """Print the peaks of steps, in this process."""
    from mpt.planner.own.execution.source import Source
    from mpt.planner.own.trace import trace_on_cpu
    from mpt.planner.trace.trace import live_peak

    for fields, arguments in calls:
        source = Source(**{**fields, "words": tuple(fields.get("words", ()))})
        peaks = [live_peak(trace_on_cpu(source, arguments, is_fake)) for is_fake in (True, False)]
        print(MARK, json.dumps(peaks), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    measure(json.loads(sys.argv[1]))
