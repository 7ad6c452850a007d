"""What DeepFaceLab (master, 46fc239) computed, for tests that hold us to its pixels (`fixtures/pixels/README.md`).

`MPT_DEEPFACELAB_PIXELS` names a folder with a larger set in the same form.
"""

import json
import os
from functools import cache
from pathlib import Path

import numpy as np

PIXELS = Path(
    os.environ.get("MPT_DEEPFACELAB_PIXELS") or Path(__file__).parent / "fixtures" / "pixels"
)


@cache
def arrays(name):
    """Return the arrays of a file."""
    with np.load(PIXELS / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


@cache
def facts(name):
    """Return what is written beside a file's arrays."""
    return json.loads((PIXELS / f"{name}.json").read_text())


def levels(found, expected):
    """Return the mean and the largest difference, in grey levels of 255, of values in [0, 1]."""
    difference = np.abs(np.asarray(found, np.float64) - np.asarray(expected, np.float64)) * 255
    return float(difference.mean()), float(difference.max())
