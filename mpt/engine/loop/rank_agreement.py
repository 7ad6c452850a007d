"""Whether the processes of one training were given the same: configuration, program, data and first weights.

Each builds for itself, so that no weights travel at the start; a file that differs between machines would train
something that none of them was asked for, and nothing would say so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from mpt.config.differences import flatten
from mpt.config.finding.part_packages import outside_packages
from mpt.errors import ConfigError
from mpt.parallel.local import full
from mpt.run.records.used_parts import hash_of
from mpt.seams import Dataset, Run
from mpt.version import VERSION

MPT = Path(__file__).resolve().parents[2]


def check_alike(run: Run, train_data: Dataset, test_data: Dataset) -> None:
    """Raise ConfigError, on all ranks alike, naming a rank that differs from the first one and the difference."""
    if run.world.size == 1:
        return
    told = run.world.collect(describe(run, train_data, test_data))
    for rank, (host, entries) in enumerate(told):
        for name in {**entries, **told[0][1]}:
            value, first = entries.get(name), told[0][1].get(name)
            if value != first:
                raise ConfigError(
                    f"rank {rank} on {host} differs from rank 0 on {told[0][0]}: {name} is {value}, not {first}. "
                    "Give all processes the same configuration, program and data"
                )


def describe(run: Run, train_data: Dataset, test_data: Dataset) -> tuple[str, dict[str, Any]]:
    """Return this process's host and the values that must be the same everywhere, the most telling first."""
    settings = {
        name: value for name, value in flatten(run.config.to_data()).items() if name != "name"
    }
    digest = hashlib.sha256()
    for module in run.task.trainable.values():
        for parameter in module.parameters():
            digest.update(
                full(parameter)
                .detach()
                .cpu()
                .contiguous()
                .reshape(-1)
                .view(torch.uint8)
                .numpy()
                .tobytes()
            )
    return run.world.host, {
        "the version of mpt": VERSION,
        "the version of torch": torch.__version__,
        **settings,
        "what the files of the program come to": digest_files(
            [MPT, *(one.folder for one in outside_packages())]
        ),
        "the number of training samples": len(train_data),
        "the number of test samples": len(test_data),
        "what a sample holds": str(run.data.to_record()["fields"]),
        "the classes": str(run.data.classes)[:200],
        "what three training samples come to": digest_samples(train_data),
        "the networks before the first step": digest.hexdigest()[:12],
    }


def digest_files(folders: Iterable[Path]) -> str:
    """Return a short hash of the Python files in folders, with their names."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)}\0{hash_of(path)}\0".encode())
    return digest.hexdigest()[:12]


def digest_samples(data: Dataset) -> str:
    """Return a short hash of the first, the middle and the last sample, which uses up no random numbers of the run."""
    digest = hashlib.sha256()
    with torch.random.fork_rng(devices=[]):
        samples = data.fetch(sorted({0, len(data) // 2, len(data) - 1}), 0)
    for name, value in sorted(samples.items()):
        digest.update(
            name.encode() + value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()[:12]
