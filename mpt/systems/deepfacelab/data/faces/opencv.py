"""OpenCV, needed to equal DeepFaceLab to the grey level: its L*a*b*, its filters, its seamless clone.

It is imported at its first use, so that training without colour transfer does without.
"""

from __future__ import annotations

from typing import Any

from mpt.errors import ConfigError


def opencv() -> Any:
    """Return the module `cv2`. Raises ConfigError if it is not installed."""
    try:
        import cv2
    except ImportError as error:
        raise ConfigError(
            "DeepFaceLab's colour transfer and merging need OpenCV: pip install 'mpt-trainer[deepfacelab]'"
        ) from error
    return cv2
