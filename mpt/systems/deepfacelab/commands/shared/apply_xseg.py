"""Write masks of an XSeg into faces: the work of `mpt deepfacelab xseg-apply`."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from mpt.engine.building.devices import choose_device
from mpt.errors import DataError
from mpt.systems.deepfacelab.data.faces.face_files import FaceFile, list_faces, open_image
from mpt.systems.deepfacelab.data.faces.face_geometry import face_matrix
from mpt.systems.deepfacelab.data.faces.face_metadata import read_metadata
from mpt.systems.deepfacelab.data.faces.face_writing import (
    Picture,
    encode_mask,
    with_segment,
    write_face,
)
from mpt.systems.deepfacelab.data.faces.opencv import opencv
from mpt.systems.deepfacelab.inference.masks import Segment, load_segment
from mpt.systems.deepfacelab.nn.facelib.xseg import SIDE

SECONDS_BETWEEN_LINES = 5.0
COUNTED = 0.5
"""An applied mask is 1 from here on, else 0."""


def apply_xseg(
    folder: Path, xseg: Path, face_type: str | None, device: str | None, runs: str = "runs"
) -> None:
    """Write masks into all faces of a folder. DataError for a faceset.pak, or faces without metadata."""
    opencv()  # said before anything is loaded
    if not folder.is_dir() or (folder / "faceset.pak").is_file():
        raise DataError(
            f"{folder}: masks are written into a folder of JPGs; unpack a faceset.pak first"
        )
    faces = list_faces(folder, "dst")
    masks = load_segment(xseg, choose_device(device or "auto"), Path(runs))
    segment, face_type = masks.segment, face_type or masks.face_type
    started = told = time.perf_counter()
    for number, face in enumerate(faces, start=1):
        data = face.read()
        metadata = read_metadata(data, face.name)
        if metadata is None or face.landmarks is None:
            raise DataError(
                f"{face.name}: has no DeepFaceLab metadata to keep a mask in; extract it again"
            )
        mask = (draw_aligned(face, data, segment, face_type) >= COUNTED).astype(np.float32)
        metadata["xseg_mask"] = np.frombuffer(encode_mask(mask), np.uint8)
        write_face(face.path, with_segment(data, metadata, face.name))
        if time.perf_counter() - told > SECONDS_BETWEEN_LINES or number == len(faces):
            told = time.perf_counter()
            print(
                f"{number}/{len(faces)} faces, {number / (told - started):.2f} faces/s", flush=True
            )
    print(f"wrote masks into {len(faces)} faces in {folder}")


def draw_aligned(face: FaceFile, data: bytes, segment: Segment, face_type: str | None) -> Picture:
    """Return the mask of an aligned face at the network's resolution, of the face's own square."""
    cv2 = opencv()
    picture = np.asarray(open_image(data, face.name).convert("RGB"), np.float32)[..., ::-1] / 255
    if face_type is None or face_type == face.kind:
        return segment(cv2.resize(picture, (SIDE, SIDE), interpolation=cv2.INTER_LANCZOS4))
    assert face.landmarks is not None, "checked by the caller"
    matrix = face_matrix(face.landmarks, SIDE, face_type)
    mask = segment(cv2.warpAffine(picture, matrix, (SIDE, SIDE), flags=cv2.INTER_LANCZOS4))
    side = picture.shape[0]
    back = cv2.warpAffine(
        mask, matrix, (side, side), flags=cv2.WARP_INVERSE_MAP | cv2.INTER_LANCZOS4
    )
    return np.asarray(cv2.resize(back, (SIDE, SIDE), interpolation=cv2.INTER_LANCZOS4))
