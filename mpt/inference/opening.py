"""Opening a run or an export together with the inputs that it is to infer from, in the dtype that was asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpt.config.checking.precision_names import AUTOCAST, FLOAT32
from mpt.engine.state.evaluation import infer as infer_batch
from mpt.errors import ConfigError
from mpt.inference.exported import is_export, open_exported
from mpt.inference.half import rebuild
from mpt.inference.inputs import SAMPLES, Sample, find_files, match_files, read_inputs
from mpt.inference.results import on_host
from mpt.inference.trained import Trained, open_trained
from mpt.precision.shared.choice import DTYPES
from mpt.run.checkpoints.choice import Wanted
from mpt.seams import Inference


def open_with_inputs(
    wanted: str | None,
    inputs: Sequence[str] = (),
    *,
    as_trained: bool = True,
    truncation: float | None = None,
    seed: int | None = None,
    device: str | None = None,
    runs: Path = Path("runs"),
    allow: Sequence[str] = (),
    which: Wanted = None,
) -> tuple[Trained, list[Sample]]:
    """Return a run or an export, built again, and the samples that the inputs make for its task.

    `inputs` are files, folders or `FIELD=PATH`. Raises ConfigError for an export that is not to be taken `as_trained`,
    and the errors of `open_trained`, `open_exported`, `find_files` and `match_files`.
    """
    given = find_files(inputs)
    wishes = {"task.truncation": truncation, "seed": seed}
    overrides = tuple(f"{key}={value}" for key, value in wishes.items() if value is not None)
    if wanted is not None and is_export(wanted):
        if which is not None:
            raise ConfigError(
                "--best, --newest, --step: an exported file is of one step; name a run."
            )
        if not as_trained:
            raise ConfigError(
                "--half, --dtype: an exported file is taken as it is, in float32; name a run."
            )
        trained = open_exported(Path(wanted), device or "auto", overrides, tuple(allow))
    else:
        trained = open_trained(wanted, runs, device or "auto", overrides, tuple(allow), which)
    return trained, match_files(trained.run.task, trained.config.model.name, given)


def in_dtype(trained: Trained, dtype: str | None) -> Trained:
    """Return a trained run that infers in a dtype, with float32 weights. None leaves it as it was trained."""
    if dtype is None:
        return trained
    if dtype not in ("float32", *DTYPES):
        raise ConfigError(f"--dtype: found {dtype!r}; allowed are float32, {', '.join(DTYPES)}.")
    other = rebuild(trained, FLOAT32) if dtype == "float32" else rebuild(trained, AUTOCAST, dtype)
    return dataclasses.replace(trained, run=other)


def infer(
    trained: Trained,
    samples: Sequence[Sample],
    batch_size: int,
    count: int = SAMPLES,
    first: int = 0,
    every: int = 1,
) -> Iterator[Inference]:
    """Yield the task's inference for each batch of inputs, or for each `every`-th from number `first` on."""
    for batch, size in read_inputs(trained, samples, batch_size, count, first=first, every=every):
        yield on_host(infer_batch(trained.run, batch, size))
