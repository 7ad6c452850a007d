"""Torch's own fake tensors with the seams of `LeanFakeMode`, to compare the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode


class TorchFakeMode(FakeTensorMode):
    """Torch's own mode in place of LeanFakeMode, to compare the two."""

    def view(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take no view at once."""

    def number(self, func: Any, args: Sequence[Any]) -> None:
        """Answer for no number at once."""

    def known(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Answer nothing at once."""
