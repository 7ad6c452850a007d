"""YOLOFuse's own command, `python train_dual.py --batch 32 --data llvip.yaml`, as articles have it.

The published script reads no options: its settings stand in the file, and are the defaults here. The name of its
network stands there too, and is not known from the command; the middle fusion is what the published figures are of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpt.importers.shared.translation import Translation
from mpt.systems.yolofuse.importers import ultralytics

NAME = "YOLOFuse"
SCRIPT = "train_dual.py"
WRITTEN = {
    "data": "ultralytics/cfg/datasets/LLVIP.yaml",
    "ch": 6,
    "batch": 64,
    "close_mosaic": 0,
    "workers": 16,
    "optimizer": "SGD",
    "patience": 0,
}
"""What the script holds that differs from Ultralytics' defaults."""


def recognises(given: Mapping[str, Any], words: str) -> bool:
    """Return whether the command is YOLOFuse's script."""
    return SCRIPT in words


def translate(into: Translation) -> None:
    """Take the command's options, then what the script holds."""
    has_model, has_amp = (into.given.get(name) is not None for name in ("model", "amp"))
    into.given = {**WRITTEN, **into.given}
    into.given.setdefault("model", "Mid-level-Feature-Fusion.yaml")
    ultralytics.translate(into)
    if not has_model:
        into.settings["model.fusion"] = (
            "mid",
            f"the published figures'; see YOLO(...) in {SCRIPT}: early, easy, decision, deyolo and defa are others",
        )
    if not has_amp:
        into.settings["precision.mode"] = ("amp", f"{SCRIPT} as published has amp=False: fp32")
