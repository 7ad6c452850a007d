"""Run a command on a machine with pretend CUDA cards.

    python -m tests.cuda_rehearsal --card rtx2060 -- mpt train configs/dcgan_amp.yaml --smoke 3
    python -m tests.cuda_rehearsal --card h100 --card h100 -- python -m pytest -m gpu
    python -m tests.cuda_rehearsal --card rtx3060 --memory 6GiB -- python scripts/gpu_check.py build/check

Tensors say `cuda:0` and compute on the CPU; what that shows, and what it cannot, is in docs/explanation/rehearsal.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from mpt.config.sizes import parse_budget
from mpt.errors import MptError
from tests.cuda_rehearsal import build
from tests.cuda_rehearsal.cards import VARIABLE, Machine

ROOT = Path(__file__).resolve().parents[2]
STARTUP = Path(__file__).parent / "startup"


def environment(machine: Machine) -> dict[str, str]:
    """Return the variables of a process that shall have the machine's cards."""
    found = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    paths = [str(STARTUP), str(ROOT), *filter(None, [found.get("PYTHONPATH")])]
    return found | {
        VARIABLE: machine.to_text(),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--card", action="append", help="gtx1660, rtx2060, rtx3060, rtx4090, h100, ...; repeatable"
    )
    parser.add_argument("--memory", help="cut the cards' memory to this, such as 6GiB")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    try:
        memory = parse_budget(options.memory) if options.memory else None
        machine = Machine(tuple(options.card or ["rtx3060"]), memory)
        machine.properties()  # an unknown card is refused here
    except MptError as error:
        parser.error(str(error).replace("--vram", "--memory").replace("--gpu", "--card"))
    try:
        build.check()
    except build.CannotBuild as error:
        parser.error(str(error))
    sys.stdout.flush()
    os.execvpe(options.command[0], options.command, environment(machine))


if __name__ == "__main__":
    main()
