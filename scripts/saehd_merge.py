"""How near merged frames come to the true ones: drawn people in frames, where the true swap of each face is known.

    python scripts/saehd_merge.py RUN [--frames 8]

RUN is a run of configs/saehd_demo.yaml. Each frame holds the destination, turned and scaled, in a larger picture; the
true frame holds the source with the same expression in its place. PSNR is over the square of the face.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch

from mpt.inference.half import rebuild
from mpt.inference.trained import open_trained
from mpt.systems.deepfacelab.commands.merge import drawing
from mpt.systems.deepfacelab.data.faces.face_files import FaceFile
from mpt.systems.deepfacelab.data.faces.face_geometry import MEAN_FACE, PADDING, USED, invert, transform_points
from mpt.systems.deepfacelab.data.procedural_faces import DESTINATION, SOURCE, draw_expressions, render
from mpt.systems.deepfacelab.inference.frames import draw_within_memory
from mpt.systems.deepfacelab.inference.merging import MergeSettings, cut_face, merge_face, paste

SHAPE = (240, 320)
SETTINGS = {
    "learned, no colours": MergeSettings(colours="none"),
    "learned, rct": MergeSettings(),
    "learned, blur 20": MergeSettings(colours="none", blur=20),
    "full, no colours": MergeSettings(mask="full", colours="none"),
}


def place_face(index: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a frame's landmarks of a face, and the map from the frame to the face."""
    angle, zoom = math.radians(10 * math.sin(index)), 1.6 + 0.3 * math.cos(index)
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]) * zoom
    to_frame = np.column_stack((turn, (110 + 8 * index % 40, 60)))
    half = PADDING["f"] * math.sqrt(2) + 0.5
    points = np.full((68, 2), 0.5)
    points[USED] = MEAN_FACE
    return transform_points((points - (0.5 - half)) * size / (2 * half), to_frame), invert(to_frame)


def psnr(one: torch.Tensor, two: torch.Tensor, where: torch.Tensor) -> float:
    """Return the PSNR in dB where a mask (1 h w) is set."""
    error = ((one - two).square() * where).sum() / (where.sum() * 3)
    return float(-10 * torch.log10(error))


def main() -> None:
    """Merge and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--frames", type=int, default=8)
    given = parser.parse_args()
    trained = open_trained(given.run, Path("runs"), "cpu")
    size = trained.config.model.settings.image_size
    draw = drawing(rebuild(trained, "fp32"))
    expressions = draw_expressions(given.frames, 77)
    people = {name: render(person, expressions, size) for name, person in (("dst", DESTINATION), ("src", SOURCE))}
    line = torch.linspace(0.2, 0.8, SHAPE[1]).expand(3, *SHAPE)
    whole = torch.ones(1, size, size)
    sums: dict[str, list[float]] = {}
    for index in range(given.frames):
        landmarks, matrix = place_face(index, size)
        frame, where = paste(line, people["dst"].image[index], whole, matrix)
        true, _ = paste(line, people["src"].image[index], whole, matrix)
        face = FaceFile(Path("drawn"), "drawn", face_type="full_face", landmarks=landmarks, source_landmarks=landmarks)
        (drawn,) = draw_within_memory(cut_face(frame, face, size, "f")[None], draw)
        sums.setdefault("not swapped", []).append(psnr(frame, true, where))
        for name, settings in SETTINGS.items():
            merged, _ = merge_face(frame, face, drawn, "f", settings, index)
            sums.setdefault(name, []).append(psnr(merged, true, where))
    for name, values in sums.items():
        print(f"{name:24s} {sum(values) / len(values):6.2f} dB")


if __name__ == "__main__":
    main()
