"""What a script that is planned has for its own between its steps: variables of the environment, the current folder,
and the function `print`, which scripts for several processes replace.

A script is executed several times in one process, each time from the same ones.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

PROCESSES = "WORLD_SIZE"
LAUNCHED = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "0",
    "LOCAL_WORLD_SIZE": "{count}",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
"""Variables that torchrun sets beside the number of processes."""
QUIET = {"WANDB_MODE": "disabled", "MPLBACKEND": "Agg"}
"""Variables by which a script reports to nobody and opens no window."""


class Surroundings:
    """Those that a script has left behind, which it finds again."""

    def __init__(self) -> None:
        count = os.environ.get(PROCESSES)
        launched = {key: one.format(count=count) for key, one in LAUNCHED.items() if count}
        self.variables = {**QUIET, **launched, **os.environ}
        self.folder = os.getcwd()
        self.print = print

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let the script have them inside the block."""
        before = os.getcwd()
        os.chdir(self.folder)
        with (
            mock.patch.dict(os.environ, self.variables, clear=True),
            mock.patch.object(builtins, "print", self.print),
        ):
            try:
                yield
            finally:
                self.variables, self.folder = dict(os.environ), os.getcwd()
                self.print = builtins.print
                os.chdir(before)
