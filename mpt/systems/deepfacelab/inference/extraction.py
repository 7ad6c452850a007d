"""Find the faces of frames: boxes by S3FD, landmarks by FAN, as DeepFaceLab's extractor does.

A frame in which no face is found upright is turned by 90, 270 and 180 degrees. Landmarks are looked for once more in
the aligned face, as a mean over five places, if S3FD finds exactly one face there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mpt.errors import CheckpointError
from mpt.systems.deepfacelab.data.faces.face_geometry import face_matrix, invert, transform_points
from mpt.systems.deepfacelab.data.faces.face_writing import FoundFace
from mpt.systems.deepfacelab.data.faces.opencv import opencv
from mpt.systems.deepfacelab.nn.facelib.fan import FAN, find_landmarks
from mpt.systems.deepfacelab.nn.facelib.s3fd import S3FD, choose, input_scale, refine
from mpt.systems.deepfacelab.nn.weights.facelib_weights import load_network

Picture = np.ndarray[Any, np.dtype[Any]]
Box = tuple[int, int, int, int]
FILES = {"S3FD.npy": S3FD, "2DFAN.npy": FAN}
PLACES = ("", "facelib", "DeepFaceLab/facelib", "_internal/DeepFaceLab/facelib")
"""DeepFaceLab's paths of its networks below the folder that a user names."""
TURNS = (0, 1, 3, 2)
"""Quarter turns by which faces are looked for, in order."""
ALIGNED_SIDE = 256


class Detectors:
    """Both networks on a device."""

    def __init__(self, boxes: nn.Module, landmarks: nn.Module, device: torch.device) -> None:
        self.boxes, self.landmarks, self.device = boxes.to(device), landmarks.to(device), device

    @torch.no_grad()
    def find_boxes(self, picture_rgb: Picture) -> list[Box]:
        """Return the boxes of a picture's faces (h, w, 3), uint8, largest first."""
        cv2 = opencv()
        height, width = picture_rgb.shape[:2]
        scale = input_scale(height, width)
        size = (max(1, int(width / scale)), max(1, int(height / scale)))
        small = cv2.resize(picture_rgb, size, interpolation=cv2.INTER_LINEAR)
        tensor = (
            torch.from_numpy(small.astype(np.float32))
            .permute(2, 0, 1)[None]
            .contiguous()
            .to(self.device)
        )
        outputs = [
            tuple(part[0].permute(1, 2, 0).float().cpu().numpy() for part in pair)
            for pair in self.boxes(tensor)
        ]
        return choose(refine([(chances, offsets) for chances, offsets in outputs]), scale)

    @torch.no_grad()
    def draw_heat(self, faces: Picture) -> Picture:
        """Return the heat maps of faces (b, 256, 256, 3), R, G, B in [0, 1]."""
        tensor = torch.from_numpy(np.ascontiguousarray(faces.transpose(0, 3, 1, 2), np.float32)).to(
            self.device
        )
        return np.asarray(self.landmarks(tensor).float().cpu().numpy())

    def find_faces(self, frame_bgr: Picture, most: int = 0) -> list[FoundFace]:
        """Return a frame's faces, largest first; at most that many, if `most` is not 0."""
        picture = np.ascontiguousarray(frame_bgr[..., ::-1])
        for turns in TURNS:
            turned = np.ascontiguousarray(np.rot90(picture, turns))
            boxes = self.find_boxes(turned)
            boxes = boxes[:most] if most else boxes
            if boxes:
                return [
                    self.turn_back(self.find_face(turned, box), turns, picture.shape)
                    for box in boxes
                ]
        return []

    def find_face(self, picture: Picture, box: Box) -> FoundFace:
        """Return the face in a box, its landmarks found twice if that is possible."""
        cv2 = opencv()
        points = find_landmarks(self.draw_heat, picture, box)
        matrix = face_matrix(points, ALIGNED_SIDE, "f")
        aligned = cv2.warpAffine(
            picture, matrix, (ALIGNED_SIDE, ALIGNED_SIDE), flags=cv2.INTER_CUBIC
        )
        again = self.find_boxes(aligned)
        if len(again) == 1:
            nearer = find_landmarks(self.draw_heat, aligned, again[0], around=True)
            points = transform_points(nearer, invert(matrix))
        return FoundFace(box, points)

    def turn_back(self, face: FoundFace, turns: int, shape: tuple[int, ...]) -> FoundFace:
        """Return a face of a picture that was turned, in the picture as it was."""
        if not turns:
            return face
        height, width = shape[:2]
        corners = np.array(face.box, np.float64).reshape(2, 2)
        points, corners = (unturn(part, turns, height, width) for part in (face.landmarks, corners))
        (left, top), (right, bottom) = corners.min(axis=0), corners.max(axis=0)
        return FoundFace((int(left), int(top), int(right), int(bottom)), points)


def unturn(points: Any, turns: int, height: int, width: int) -> Any:
    """Map points of a picture turned counter-clockwise by quarters to the picture of these sides."""
    x, y = points[:, 0], points[:, 1]
    back = {1: (width - 1 - y, x), 2: (width - 1 - x, height - 1 - y), 3: (y, height - 1 - x)}
    return np.stack(back[turns], axis=1)


def load_detectors(folder: Path, device: torch.device) -> Detectors:
    """Load both networks from the folder of the user's DeepFaceLab. CheckpointError if they are not there."""
    for place in PLACES:
        if all((folder / place / name).is_file() for name in FILES):
            networks = [load_network(make(), folder / place / name) for name, make in FILES.items()]
            return Detectors(networks[0], networks[1], device)
    raise CheckpointError(
        f"{folder}: no {' and '.join(FILES)} there; name the folder `facelib` of your DeepFaceLab"
    )
