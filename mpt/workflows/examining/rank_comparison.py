"""`mpt diff CONFIG --nproc N`: take some steps with one process and with N, and compare them tensor by tensor.

One process goes first and keeps the state before each step; the group then takes each step from that state. So a step
is judged for itself, and an optimizer that makes much of rounding (Adam) does not spread it over the steps.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mpt.config.schema import Config
from mpt.doctor.partings.parting import Parting
from mpt.doctor.partings.rank_difference import PhaseJudge
from mpt.doctor.partings.rank_steps import CONFIG, STATE, TOLD, Looked, Stepper, all_weights
from mpt.engine.state.state import capture
from mpt.errors import ConfigError, MptError
from mpt.parallel.world import ALONE
from mpt.workflows.processes.training_process import last_words

SECONDS = 1800
"""Processes that have not ended by then are stopped."""


@dataclass
class RankComparison:
    """Findings of a comparison."""

    processes: int
    steps: int = 0
    beyond: Parting | None = None
    notes: list[str] = field(default_factory=list)


def compare_with_ranks(
    config: Config, nproc: int, steps: int, allow: Sequence[str]
) -> RankComparison:
    """Compare one process with several. Raises MptError if one of them fails."""
    if config.train.batch_size < nproc:
        raise ConfigError(
            f"--nproc: found {nproc} for train.batch_size={config.train.batch_size}: one sample each at least"
        )
    found = RankComparison(nproc)
    with tempfile.TemporaryDirectory(prefix="mpt-diff-") as name:
        folder = Path(name)
        stepper = Stepper(config, ALONE)
        if stepper.still:
            found.notes.append(
                f"{len(stepper.still)} layers of BatchNorm or dropout are in evaluation mode here: in training their "
                "results depend on the process's own samples (parallel.sync_batchnorm=true compares BatchNorm too)"
            )
        alone, moved, begun = take_alone(stepper, folder, steps)
        described = {"config": config.to_data(), "allow": list(allow), "steps": steps}
        (folder / CONFIG).write_text(json.dumps(described))
        run_group(folder, nproc)
        ranks = [read_told(folder / TOLD.format(rank)) for rank in range(nproc)]
    numerics = stepper.run.precision.numerics
    unit = numerics.product_unit or torch.finfo(numerics.dtype).eps
    for step in range(steps):
        found.steps += 1
        for index, one in enumerate(alone[step]):
            own = [rank[step][index] for rank in ranks]
            found.beyond = PhaseJudge(step, one, moved[step][index], own, unit).first_difference(
                begun[step]
            )
            if found.beyond is not None:
                return found
    return found


def take_alone(
    stepper: Stepper, folder: Path, steps: int
) -> tuple[list[list[Looked]], list[list[Looked]], list[dict[str, torch.Tensor]]]:
    """Take the steps in this process; return their results, those of moved ones, and the weights before each."""
    run = stepper.run
    unit = run.precision.numerics.product_unit or torch.finfo(run.precision.numerics.dtype).eps
    alone, moved, begun = [], [], []
    state: dict[str, Any] = copy.deepcopy(capture(run))
    for step in range(steps):
        torch.save(state, folder / STATE.format(step))
        moved.append(stepper.take_moved(step, copy.deepcopy(state), unit / 2))
        begun.append(all_weights(run))
        alone.append(stepper.take(step, copy.deepcopy(state)))
        state = copy.deepcopy(capture(run))
    return alone, moved, begun


def read_told(path: Path) -> list[list[Looked]]:
    """Read a process's results."""
    return [[Looked(**one) for one in step] for step in torch.load(path, weights_only=True)]


def run_group(folder: Path, nproc: int) -> None:
    """Run the processes of the group. Raises MptError with the first one's last words that fails."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    processes = []
    for rank in range(nproc):
        group = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": nproc,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        own = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **{key: str(value) for key, value in group.items()},
        }
        words = [sys.executable, "-m", "mpt.doctor.partings.rank_steps", str(folder)]
        with (folder / f"said-{rank}.txt").open("w") as said:
            processes.append(
                subprocess.Popen(words, env=own, stdout=subprocess.DEVNULL, stderr=said)
            )
    try:
        codes = [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, code in enumerate(codes):
        if code:
            words_said = last_words((folder / f"said-{rank}.txt").read_text(errors="replace"))
            failure = MptError(f"mpt diff: rank {rank} of {nproc} failed: {words_said}")
            failure.exit_code = code if code > 0 else 1
            raise failure
