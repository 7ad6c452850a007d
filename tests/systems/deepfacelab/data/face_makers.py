"""Makes the files that DeepFaceLab would: aligned JPGs with metadata, and facesets packed from them."""

import io
import pickle
import struct

import numpy as np
from PIL import Image


def landmarks(side):
    """68 points of a face that fills the middle of a square picture."""
    points = np.zeros((68, 2))
    angle = np.linspace(0, np.pi, 17)
    points[:17] = np.stack((0.5 - 0.35 * np.cos(angle), 0.45 + 0.45 * np.sin(angle)), 1)
    points[17:22] = np.stack((np.linspace(0.2, 0.42, 5), np.full(5, 0.3)), 1)
    points[22:27] = np.stack((np.linspace(0.58, 0.8, 5), np.full(5, 0.3)), 1)
    points[27:36] = np.stack((np.full(9, 0.5), np.linspace(0.35, 0.6, 9)), 1)
    for start, middle in ((36, 0.32), (42, 0.68)):
        turn = np.linspace(0, 2 * np.pi, 6, endpoint=False)
        points[start : start + 6] = np.stack(
            (middle + 0.07 * np.cos(turn), 0.4 + 0.03 * np.sin(turn)), 1
        )
    turn = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    points[48:60] = np.stack((0.5 + 0.15 * np.cos(turn), 0.72 + 0.06 * np.sin(turn)), 1)
    turn = np.linspace(0, 2 * np.pi, 8, endpoint=False)
    points[60:68] = np.stack((0.5 + 0.11 * np.cos(turn), 0.72 + 0.04 * np.sin(turn)), 1)
    return points * side


def picture(seed=0, side=64):
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    )


def jpg(seed=0, side=64, metadata=None, protocol=4):
    """A JPG with an APP15 segment; `metadata=None` gives a full face, `False` none at all."""
    file = io.BytesIO()
    picture(seed, side).save(file, "JPEG")
    data = file.getvalue()
    if metadata is False:
        return data
    if metadata is None:
        metadata = {}
    if isinstance(metadata, dict):
        content = {
            "face_type": "full_face",
            "landmarks": landmarks(side).tolist(),
            "source_filename": "0001.png",
            "source_rect": [0, 0, side, side],
            "source_landmarks": landmarks(side).tolist(),
            "image_to_face_mat": np.eye(2, 3).tolist(),
            "eyebrows_expand_mod": 1.0,
        }
        metadata = pickle.dumps(content | metadata, protocol)
    return data[:2] + b"\xff\xef" + struct.pack(">H", len(metadata) + 2) + metadata + data[2:]


def pak(faces, configs=None):
    """A faceset.pak of encoded faces."""
    if configs is None:
        configs = [{"filename": f"{index:05d}.jpg", "face_type": 2} for index in range(len(faces))]
    settings = pickle.dumps(configs, 4)
    offsets = np.cumsum([0, *(len(face) for face in faces)]).tolist()
    start = 16 + len(settings) + 8 * (len(faces) + 1)
    offsets[-1] += start
    head = (
        struct.pack("<QQ", 1, len(settings)) + settings + struct.pack(f"<{len(offsets)}Q", *offsets)
    )
    return head + b"".join(faces)


def folder(path, count=3, **options):
    path.mkdir(parents=True)
    for index in range(count):
        (path / f"{index:05d}.jpg").write_bytes(jpg(index, **options))
    return path
