"""What an optimizer is built over: parameters, or groups of them with settings of their own."""

from __future__ import annotations

from typing import Any

from torch import nn

Parameters = list[nn.Parameter] | list[dict[str, Any]]
