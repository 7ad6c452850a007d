"""Masks against OpenCV, which DeepFaceLab draws them with, and against what was painted."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mpt.errors import DataError
from mpt.systems.deepfacelab.data.faces import face_masks
from mpt.systems.deepfacelab.data.faces.face_files import describe, list_faces
from mpt.systems.deepfacelab.data.faces.face_metadata import read_mask, read_polygons

FIXTURES = Path(__file__).parents[2] / "fixtures"


def overlap(one, two):
    return np.minimum(one, two).sum() / np.maximum(one, two).sum()


def painted_ellipse():
    """What the fixtures' owner painted."""
    cv2 = pytest.importorskip("cv2")
    mask = np.zeros((256, 256), np.float32)
    cv2.ellipse(mask, (128, 128), (60, 90), 0, 0, 360, 1, -1)
    mask[128:150] = 0
    return mask


@pytest.mark.parametrize("path", ["wf_xseg.jpg", "wf_xseg.pak"])
def test_a_painted_xseg_mask_is_the_mask(path):
    faces = (
        list_faces(FIXTURES / path, "src") if path.endswith("pak") else [describe(FIXTURES / path)]
    )
    for face in faces:
        assert (face.mask_kind("painted"), face.mask_kind("hull"), face.kind) == (
            "xseg",
            "hull",
            "wf",
        )
        assert overlap(face.draw_face(256), painted_ellipse()) > 0.99
        mask = face.load(128)[3].numpy()
        assert mask[66, 64] == 0  # the gap
        assert mask[40, 64] == 1


def test_painted_polygons_are_the_mask_and_faces_without_have_their_hull():
    cv2 = pytest.importorskip("cv2")
    faces = list_faces(FIXTURES / "wf_polygons.pak", "src")
    assert [face.mask_kind("painted") for face in faces] == ["polygons", "polygons", "hull", "hull"]
    assert [face.mask_kind("xseg") for face in faces] == ["hull"] * 4
    for face in faces[:2]:
        expected = np.zeros((256, 256), np.float32)
        for polygon in face.polygons:
            cv2.fillPoly(expected, [polygon.points.astype(np.int32)], float(polygon.includes))
        assert overlap(face.draw_face(256), expected) > 0.99


def test_every_painted_mask_is_met():
    """Over all fixtures of either kind: intersection over union of what is trained on and what was painted."""
    cv2 = pytest.importorskip("cv2")
    met = []
    for path in sorted(FIXTURES.glob("wf_*")):
        for face in list_faces(path, "src") if path.suffix == ".pak" else [describe(path)]:
            kind = face.mask_kind("painted")
            expected = painted_ellipse() if kind == "xseg" else np.zeros((256, 256), np.float32)
            for polygon in face.polygons if kind == "polygons" else ():
                cv2.fillPoly(expected, [polygon.points.astype(np.int32)], float(polygon.includes))
            if kind != "hull":
                met.append(overlap(face.draw_face(256), expected))
    assert len(met) >= 9
    assert min(met) > 0.99


def test_a_pack_holds_what_the_folder_held():
    packed = list_faces(FIXTURES / "wf_xseg.pak", "src")[0]
    alone = describe(FIXTURES / "wf_xseg.jpg")
    np.testing.assert_allclose(packed.landmarks, alone.landmarks)
    assert (packed.xseg_mask, packed.face_type, packed.brow_factor) == (
        alone.xseg_mask,
        alone.face_type,
        alone.brow_factor,
    )
    assert (packed.load(64) == alone.load(64)).all()


def test_excluding_polygons_are_cut_out_of_the_hull():
    face = describe(FIXTURES / "full.jpg")
    points = np.array([(40, 40), (90, 40), (90, 90), (40, 90)])
    cut = type(face)(**{**vars(face), "polygons": (face_masks.Polygon(False, points),)})
    assert face.draw_face(128)[60, 60] == 1
    assert cut.draw_face(128)[60, 60] == 0
    assert cut.draw_face(128).sum() > 0


def test_masks_that_are_none_are_refused():
    with pytest.raises(DataError, match="XSeg mask is a dict"):
        read_mask({}, "face")
    with pytest.raises(DataError, match="polygons"):
        read_polygons({"polys": [{"type": 7, "pts": [[0, 0]]}]}, "face")
    assert read_polygons({"polys": [{"type": 1, "pts": [[0, 0], [1, 1]]}]}, "face") == ()
    assert read_mask(np.frombuffer(b"x", np.uint8), "face") == b"x"


@pytest.mark.parametrize("scale", [1, 2, 4])
def test_hull_and_regions_are_opencvs(scale):
    cv2 = pytest.importorskip("cv2")
    landmarks, side = describe(FIXTURES / "full.jpg").landmarks * scale, 128 * scale
    hull = np.zeros((side, side), np.float32)
    raised = face_masks.raise_brows(landmarks, 1.0)
    for part in face_masks.HULL_PARTS:
        cv2.fillConvexPoly(hull, cv2.convexHull(raised[list(part)]), 1)
    assert overlap(face_masks.draw_hull(landmarks, side, 1.0), hull) > 0.995

    def soft(*parts):
        canvas = np.zeros((side, side), np.float32)
        for part in parts:
            cv2.fillConvexPoly(canvas, cv2.convexHull(landmarks.astype(int)[list(part)]), 1)
        width, reach = side // 32, side // 16 | 1
        canvas = cv2.dilate(canvas, cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (width, width)))
        return cv2.GaussianBlur(canvas, (reach, reach), 0)

    expected = soft(face_masks.RIGHT_EYE, face_masks.LEFT_EYE) + soft(face_masks.INNER_LIPS)
    found = face_masks.draw_eyes_mouth(landmarks, side)
    assert np.abs(found - expected.clip(0, 1)).mean() / expected.mean() < 0.02


@pytest.mark.parametrize("size", [*range(1, 12), 16, 21])
def test_dilation_is_opencvs(size):
    cv2 = pytest.importorskip("cv2")
    element = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (size, size))
    np.testing.assert_array_equal(face_masks.ellipse(size), element > 0)
    mask = (np.random.default_rng(size).random((40, 33)) > 0.98).astype(np.float32)
    np.testing.assert_array_equal(face_masks.dilate(mask, size), cv2.dilate(mask, element))


@pytest.mark.parametrize("taps", [1, 3, 5, 7, 11, 17])
def test_blurring_is_opencvs(taps):
    cv2 = pytest.importorskip("cv2")
    image = np.random.default_rng(0).random((30, 40)).astype(np.float32)
    np.testing.assert_allclose(
        face_masks.blur(image, taps), cv2.GaussianBlur(image, (taps, taps), 0), atol=1e-5
    )


def test_regions_lie_within_the_face_and_reach_one(tmp_path):
    face = describe(FIXTURES / "wf_xseg.jpg")
    mask, regions = face.draw_masks(256)
    assert (regions[mask == 0] == 0).all()
    file = io.BytesIO()
    Image.new("L", (256, 256)).save(file, "PNG")
    nothing = type(face)(**{**vars(face), "xseg_mask": file.getvalue()})
    assert nothing.draw_masks(256).sum() == 0
