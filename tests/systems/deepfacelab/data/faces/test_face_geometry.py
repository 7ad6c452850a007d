"""Alignment against the matrices that DeepFaceLab's extractor left in its files, and resampling against OpenCV."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mpt.systems.deepfacelab.data.faces import face_geometry as geometry
from mpt.systems.deepfacelab.data.faces.face_files import describe
from mpt.systems.deepfacelab.data.faces.resampling import cut, resize

FIXTURES = Path(__file__).parents[2] / "fixtures"


def compose(second, first):
    """Return the map that does `first`, then `second`."""
    return np.column_stack(
        (second[:, :2] @ first[:, :2], second[:, :2] @ first[:, 2] + second[:, 2])
    )


@pytest.mark.parametrize(
    ("name", "size"), [("full.jpg", 128), ("wf_xseg.jpg", 256), ("wf_polygons.jpg", 256)]
)
def test_a_face_is_cut_where_deepfacelab_cut_it(name, size):
    face = describe(FIXTURES / name)
    matrix = geometry.face_matrix(face.source_landmarks, size, face.kind)
    np.testing.assert_allclose(matrix, face.source_matrix, atol=2e-4)
    aligned = geometry.transform_points(face.source_landmarks, matrix)
    np.testing.assert_allclose(aligned, face.landmarks, atol=1e-3)


def test_a_smaller_type_of_a_larger_face_is_the_smaller_face():
    face = describe(FIXTURES / "wf_xseg.jpg")
    direct = geometry.face_matrix(face.source_landmarks, 64, "f")
    through = compose(geometry.face_matrix(face.landmarks, 64, "f"), face.source_matrix)
    np.testing.assert_allclose(through, direct, atol=1e-3)


def test_types_of_face_grow_in_their_order():
    landmarks = describe(FIXTURES / "wf_xseg.jpg").source_landmarks
    zooms = [
        abs(np.linalg.det(geometry.face_matrix(landmarks, 64, kind)[:, :2]))
        for kind in geometry.PADDING
    ]
    assert zooms == sorted(zooms, reverse=True)


def test_maps_invert_and_compose():
    matrix = np.array([[0.7, 0.2, 3.0], [-0.2, 0.7, 9.0]])
    np.testing.assert_allclose(compose(geometry.invert(matrix), matrix), np.eye(2, 3), atol=1e-12)


def test_a_mirrored_face_is_turned_the_other_way():
    landmarks = describe(FIXTURES / "full.jpg").landmarks
    order = [
        *range(16, -1, -1),
        *range(26, 16, -1),
        27,
        28,
        29,
        30,
        *range(35, 30, -1),
        *range(36, 68),
    ]
    mirrored = landmarks[order] * (-1, 1)
    assert geometry.estimate_yaw(mirrored) == pytest.approx(-geometry.estimate_yaw(landmarks))


@pytest.mark.parametrize("size", [33, 64, 128])
def test_shrinking_and_cutting_are_opencvs(size):
    cv2 = pytest.importorskip("cv2")
    picture = np.random.default_rng(0).random((96, 96, 3), np.float32)
    image = torch.from_numpy(picture).permute(2, 0, 1)
    matrix = np.array([[0.7, 0.2, 3.3], [-0.2, 0.7, 20.2]])
    for mode, flag in (("bicubic", cv2.INTER_CUBIC), ("bilinear", cv2.INTER_LINEAR)):
        shrunk = resize(image, size, mode).permute(1, 2, 0).numpy()
        np.testing.assert_allclose(
            shrunk, cv2.resize(picture, (size, size), interpolation=flag), atol=1e-4
        )
        for beyond, border in (("border", cv2.BORDER_REPLICATE), ("zeros", cv2.BORDER_CONSTANT)):
            expected = cv2.warpAffine(picture, matrix, (size, size), flags=flag, borderMode=border)
            # Other versions of OpenCV round coordinates to a 32nd of a pixel.
            difference = np.abs(
                cut(image, matrix, size, mode, beyond).permute(1, 2, 0).numpy() - expected
            )
            assert difference.mean() < 0.01
