"""A data set that is not here, known by the layout that a run's folder remembers: enough to build its networks.

So a run can be copied to another machine and infer there, or be converted, without the data it was trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from mpt.errors import DataError
from mpt.seams import Dataset, DataSpec


class AbsentDataset(Dataset):
    """Has a layout and no samples: fetching one says why the data set is not here."""

    def __init__(self, spec: DataSpec, reason: str) -> None:
        self.spec, self.reason = spec, reason

    def __len__(self) -> int:
        return self.spec.size

    def fetch(self, indices: Sequence[int], epoch: int) -> NoReturn:
        """Raise DataError."""
        raise DataError(
            f"{self.reason}. The networks are here and their data set is not; give --input to infer without it"
        )
