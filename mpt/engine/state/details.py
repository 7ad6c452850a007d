"""The details of a run's last evaluation, `evaluation.json`: the task's findings, with the pictures of its worst
errors and of examples.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from mpt.data.pictures.images import grid_of
from mpt.engine.state.evaluation import counted_samples
from mpt.errors import MptError
from mpt.run.process.files import write_atomically
from mpt.seams import Dataset

SIDE = 96
PICTURED = ("worst", "examples")


def write_details(
    path: Path, details: Mapping[str, Any], step: int, data: Dataset
) -> dict[str, Any]:
    """Write a task's details of an evaluation with pictures of the samples that it calls worst or examples.

    Returns the file's content.
    """
    shown, counted = {}, counted_samples(data)
    for kind in PICTURED:
        found = [{**one, "index": counted[one["index"]]} for one in details.get(kind, [])]
        shown[kind] = [{**one, "name": data.name_of(one["index"])} for one in found]
        for one in shown[kind]:
            # a file that went away since is no reason to stop a training
            with contextlib.suppress(MptError):
                one["picture"] = picture_of(data, one["index"])
    content = {"step": step, **details, **shown}
    write_atomically(path, json.dumps(content, indent=1) + "\n", durable=False)
    return content


def picture_of(data: Dataset, index: int) -> str:
    """Return a sample's image as a PNG in a data URI, empty if it has none. Raises DataError."""
    batch = data.spec.as_floats(data.fetch([index], 0))
    images = [
        batch[name]
        for name, field in data.spec.fields.items()
        if field.kind == "image" and name in batch
    ]
    if not images or images[0].dim() != 4 or images[0].shape[1] not in (1, 3, 4):
        return ""
    picture = grid_of(images[0], 1, padding=0)
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    picture.save(content, "PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode("ascii")
