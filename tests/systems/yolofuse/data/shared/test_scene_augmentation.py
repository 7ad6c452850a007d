"""Which boxes are left of pictures that are cut."""

import math

import numpy as np
from PIL import Image

from mpt.systems.yolofuse.data.shared.scene_augmentation import Canvas, Scene


def placed(window: tuple[float, float, float, float]) -> int:
    """Return the boxes of a 100 pixel picture at (-60, 0) of a canvas as large; its box reaches from 0 to 66."""
    box = np.array([[0, 0.0, 0.0, 0.66, 1.0]], np.float32)
    scene = Scene([Image.new("RGB", (100, 100))], box)
    canvas = Canvas(scene.pictures, 100, 100)
    canvas.place(scene, window, 1.0, -60.0, 0.0)
    return len(canvas.boxes)


def test_a_boxs_visible_share_counts_from_the_part_on_the_mosaics_plane() -> None:
    # 6 of its 66 columns are seen, 6 of the 56 that the plane holds: Ultralytics cuts boxes to the plane first.
    everything = (-math.inf, -math.inf, math.inf, math.inf)
    assert placed(everything) == 0
    assert placed((-50.0, -50.0, 150.0, 150.0)) == 1
