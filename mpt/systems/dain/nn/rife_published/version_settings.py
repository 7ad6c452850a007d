"""The names of RIFE's published versions, as `model.version` takes them."""

from __future__ import annotations

from typing import Literal

Version = Literal[
    *("ifnet", "ifnet_m", "hd3", "hd3_older"),
    *("4.0", "4.1", "4.2", "4.3", "4.4", "4.5", "4.6", "4.7", "4.8", "4.9", "4.10", "4.11", "4.12", "4.12.lite"),
    *("4.13", "4.13.lite", "4.14", "4.14.lite", "4.15", "4.15.lite", "4.16.lite", "4.17", "4.17.lite", "4.18", "4.19"),
    *("4.20", "4.21", "4.22", "4.22.lite", "4.23", "4.24", "4.25", "4.25.lite", "4.25.heavy", "4.26", "4.26.heavy"),
]
