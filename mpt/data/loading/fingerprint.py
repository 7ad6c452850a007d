"""Whether two runs were evaluated on the same samples and trained on the same list: short hashes of both.

A test set's is of the samples as they are loaded, each with its place, taken while an evaluation reads them anyway. It
does not depend on the batch size or the number of processes. A training set's is of its samples' names alone: reading
all of it would take an epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from mpt.seams import Batch, Dataset

BYTES = 8


class Fingerprint:
    """Adds up hashes of samples in any order."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, first: int, batch: Batch) -> None:
        """Add a batch on the CPU whose samples begin with number `first`.

        Trailing zeros do not count: padding differs with the samples that share a batch.
        """
        fields = [(name, batch[name].contiguous()) for name in sorted(batch)]
        for row in range(len(fields[0][1])):
            digest = hashlib.blake2b(f"{first + row}".encode(), digest_size=BYTES)
            for name, values in fields:
                digest.update(name.encode())
                digest.update(
                    values[row].reshape(-1).view(torch.uint8).numpy().tobytes().rstrip(b"\0")
                )
            self.value ^= int.from_bytes(digest.digest(), "big")


def combine(values: Sequence[int]) -> str:
    """Return the hash of samples that one or several processes read, as hexadecimal digits."""
    value = 0
    for one in values:
        value ^= one
    return value.to_bytes(BYTES, "big").hex()


def hash_of_list(data: Dataset) -> str:
    """Return a hash of the samples' names and their order; a file counts by its name and its folder's."""
    digest = hashlib.blake2b(str(len(data)).encode(), digest_size=BYTES)
    for index in range(len(data)):
        folder, _, file = data.name_of(index).replace("\\", "/").rpartition("/")
        name = f"{folder.rpartition('/')[2]}/{file}\n"
        digest.update(name.encode(errors="surrogateescape"))
    return digest.hexdigest()
