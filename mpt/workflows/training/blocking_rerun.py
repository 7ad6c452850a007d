"""The sample on which a kernel asserts, found by taking its batch once more, one sample at a time.

A device-side assert (a label or an index out of range) is reported at a later line than its own, and no tensor of that
process can be computed or copied afterwards. So the samples of the last batches go through forward and backward in a
process of its own, with blocking launches, after which CUDA names the line. The networks are made anew: the assert of a
label does not depend on weights; one that does is not found, and the message says so.

`python -m mpt.workflows.training.blocking_rerun` is that process. It reads a JSON object (`config`, `allow`, `device`,
`samples`: pairs of index and epoch) and writes a line for the first sample that fails.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mpt import accelerator
from mpt.config.load import load_config
from mpt.data.loading.checks import fetch
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.building.torch_settings import prepare_torch
from mpt.engine.loop.training import Training
from mpt.engine.step.step import back_propagate, drop_gradients
from mpt.errors import DataError
from mpt.nn.shared.module_places import SKIPPED_FOLDERS
from mpt.planner.client.processes import environment
from mpt.seams.phase_losses import draw_batch

ASSERT = "device-side assert triggered"
ASSERTION = re.compile(r"Assertion `.*` failed")
LATE_BATCHES = 2
"""An assert is noticed within its own step or the next one."""
SECONDS = 180.0


def explain_assert(training: Training) -> DataError:
    """Return a device-side assert in words, with the sample that causes it if a repeat shows it."""
    step = training.progress.step
    steps = range(step, max(-1, step - LATE_BATCHES), -1)
    samples = [
        (index, epoch)
        for indices, epoch in map(training.loader.indices, steps)
        for index in indices
    ]
    began = (
        f"device-side assert at step {step}: a kernel met a value that it does not allow, "
        "mostly a label or an index"
    )
    found = repeat(training, samples)
    if found is None:
        return DataError(
            f"{began} out of range. None of the {len(samples)} last samples causes it with new weights; run the same "
            "command with CUDA_LAUNCH_BLOCKING=1 in the environment, which names the line"
        )
    name = training.loader.dataset.name_of(int(found["sample"]))
    return DataError(
        f"{began}. It is {name}: {found['error']}. Mend the sample, or the code that reads it"
    )


def repeat(training: Training, samples: Sequence[tuple[int, int]]) -> Mapping[str, Any] | None:
    """Return the first of the samples that fails in a process with blocking launches, and how; None if none does."""
    config = training.run.config
    asked = {
        "config": config.to_data(),
        "allow": list(config.granted),
        "device": str(training.run.device),
        "samples": samples,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            env={**environment(), "CUDA_LAUNCH_BLOCKING": "1"},
        )
        found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    assertion = ASSERTION.search(done.stderr)  # printed by the kernel itself
    return {**found, "error": f"{found['error']}: {assertion[0]}"} if assertion else found


def first_failing(asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """Take each sample through every phase's forward and backward; return the first that fails, with its error.

    A sample comes twice in its batch, so that BatchNorm has something to average.
    """
    config = load_config(asked["config"], allow=asked["allow"])
    prepare_torch(config)
    device = torch.device(asked["device"])
    data, _ = build_datasets(config)
    run = build_run(config, device, data.spec)
    for index, epoch in asked["samples"]:
        try:
            stored = fetch(data, [index, index], epoch, False)
            batch = run.data.as_floats({name: value.to(device) for name, value in stored.items()})
            for phase in run.phases:
                back_propagate(run, phase, draw_batch(run, phase, batch))
                drop_gradients(run, phase)
            accelerator.synchronize(device)
        except (IndexError, RuntimeError, ValueError) as error:
            return {"sample": index, "error": describe(error)}
    return None


def describe(error: BaseException) -> str:
    """Return an exception's first line and the innermost line outside torch at which it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(SKIPPED_FOLDERS)]
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return str(error).strip().split("\n")[0] + place


def main() -> None:
    """Answer one request."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the output of a data set or a model is no answer
    found = first_failing(json.load(sys.stdin))
    if found is not None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
