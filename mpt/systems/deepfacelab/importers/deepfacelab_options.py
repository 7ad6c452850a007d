"""The options of a DeepFaceLab model: its `_data.dat`, or the summary that it writes next to it (`_summary.txt`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpt.errors import CheckpointError
from mpt.importers.shared.translation import Translation
from mpt.systems.deepfacelab.data.leras.model_data import MAPPED, read_model_data, read_settings

NAME = "DeepFaceLab"
SUMMARY_LINE = re.compile(r"==\s*(\w+):\s*(.+?)\s*==")


def read(path: Path) -> dict[str, Any] | None:
    """Return a model's options from one of its files; None for another file."""
    if path.name.endswith("data.dat"):
        data = read_model_data(path)
        return {**data["options"], "iter": int(data["iter"])}
    if not path.name.endswith("summary.txt"):
        return None
    lines = path.read_text("utf-8", errors="replace").splitlines()
    found = [match for line in lines if (match := SUMMARY_LINE.fullmatch(line.strip()))]
    return {match[1]: value_of(match[2]) for match in found}


def value_of(text: str) -> Any:
    """Return a value of the summary as Python's."""
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def recognises(given: Mapping[str, Any], words: str) -> bool:
    """Return whether the shape of an SAEHD is there."""
    return {"archi", "ae_dims", "resolution"} <= set(given)


def translate(into: Translation) -> None:
    """Take every option that the system has, as opening the model's own folder would."""
    try:
        sections = read_settings({"options": into.given, "iter": into.given.get("iter", 0)}, NAME)
    except CheckpointError as error:
        into.leave("options", "", str(error))
        return
    into.put("model.name", "saehd", "an SAEHD")
    into.put("dataset.name", "faceset", "two folders of aligned faces")
    into.put("dataset.src", "workspace/data_src/aligned", "DeepFaceLab's own place")
    into.put("dataset.dst", "workspace/data_dst/aligned", "DeepFaceLab's own place")
    names = {f"{section}.{key}": option for option, (section, key) in MAPPED.items()}
    for section, own in sections.items():
        for key, value in own.items():
            option = names.get(f"{section}.{key}", key)
            into.put(f"{section}.{key}", value, f"{option}: {into.given.get(option, value)}")
    for option in (*MAPPED, "adabelief", "lr_dropout", "clipgrad", "target_iter"):
        into.given.pop(option, None)
    into.leave_all(
        ("iter",), "weights and iteration come along with `mpt deepfacelab leras-to-torch`"
    )
