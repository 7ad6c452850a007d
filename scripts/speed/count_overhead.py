"""Count what Python does in a step of mpt's loop and of the hand-written one: bytecodes, calls, calls into C.

Usage: OMP_NUM_THREADS=1 python scripts/speed/count_overhead.py [--mode fp32|bf16] [--most 30]

The counts are the same on a busy machine, where times are not; what they cost is for `scripts/speed/bench_overhead.py`
to measure. Both loops are its own, with a small network, since the size changes no count. Needs greenlet, as that does.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.speed.bench_overhead import BASELINE, make_contestants

FIRST, LAST = 20, 50
"""The steps that are counted, a whole number of log lines."""


class Counts:
    """Counts from step `FIRST` to `LAST`; `where` by function."""

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self.where: Counter[str] = Counter()
        self.step = 0

    def turn(self) -> None:
        """End a step."""
        self.step += 1
        if self.step == FIRST:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                frame.f_trace, frame.f_trace_opcodes = self.trace, True
                frame = frame.f_back
            sys.settrace(self.trace)
            sys.setprofile(self.profile)
        elif self.step == LAST:
            sys.settrace(None)
            sys.setprofile(None)

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Count calls and bytecodes."""
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "call":
            self.total["calls"] += 1
        elif event == "opcode":
            self.total["bytecodes"] += 1
            self.where[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1
        return self.trace

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Count calls into C."""
        if event == "c_call":
            self.total["calls into C"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument(
        "--most", type=int, default=0, help="also mpt's functions with so many bytecodes"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    contestants = make_contestants(
        argparse.Namespace(mode=options.mode, steps=LAST + 10, batch_size=4, features=2)
    )
    print("| loop | bytecodes | calls | calls into C |\n|---|---:|---:|---:|")
    for name in (BASELINE, "mpt"):
        counts = Counts()
        contestants[name](LAST + 10, counts.turn)
        figures = [
            counts.total[what] / (LAST - FIRST) for what in ("bytecodes", "calls", "calls into C")
        ]
        print(
            f"| {name}, {options.mode} | "
            + " | ".join(f"{figure:,.0f}" for figure in figures)
            + " |"
        )
    for place, count in counts.where.most_common(options.most):
        print(f"{count / (LAST - FIRST):8.1f}  {place}")


if __name__ == "__main__":
    main()
