"""Faces are cut out of frames and masks drawn into them without a second program; a stopped extraction continues."""

import shutil

import numpy as np
import pytest
from PIL import Image

from mpt import cli
from mpt.systems.deepfacelab.commands.shared import apply_xseg, extract_faces
from mpt.systems.deepfacelab.data.faces.face_files import describe, open_image
from mpt.systems.deepfacelab.data.faces.face_metadata import find_metadata
from mpt.systems.deepfacelab.data.faces.face_writing import (
    FoundFace,
    encode_face,
    fits_its_box,
    with_segment,
)
from mpt.systems.deepfacelab.inference.extraction import Detectors, unturn
from mpt.systems.deepfacelab.inference.masks import TrainedMasks
from tests.systems.deepfacelab.pixels import PIXELS, arrays

TYPES = {"HALF": "h", "FULL": "f", "WHOLE_FACE": "wf", "HEAD": "head"}


def stored_face(number):
    stored = arrays("geometry")
    return FoundFace(
        tuple(int(x) for x in stored["extract_rects"][number]), stored["extract_landmarks"][number]
    )


@pytest.mark.parametrize(
    "path", sorted((PIXELS / "extracted").glob("*.jpg")), ids=lambda path: path.stem
)
def test_an_extracted_face_is_deepfacelabs(path):
    """Bit for bit with OpenCV 4, which made them; OpenCV 5 interpolates more exactly."""
    kind, size, quality, number = path.stem.rsplit("_", 3)
    frame = arrays("geometry")["extract_frame_u8"]
    data = encode_face(
        frame,
        stored_face(int(number[4:])),
        "frame_00001.png",
        TYPES[kind],
        int(size),
        int(quality[1:]),
    )
    before = path.read_bytes()
    one, other = (np.asarray(open_image(part, "x"), int) for part in (data, before))
    assert np.abs(one - other).mean() < 0.7
    assert np.abs(one - other).max() <= 8
    assert data.index(find_metadata(data, "x")) == before.index(find_metadata(before, "x"))
    copy = path.parent / path.name
    found, expected = describe_bytes(data), describe(copy)
    assert (found.face_type, found.source_filename) == (
        expected.face_type,
        expected.source_filename,
    )
    np.testing.assert_allclose(found.landmarks, expected.landmarks, rtol=1e-4)
    np.testing.assert_allclose(found.source_matrix, expected.source_matrix, rtol=1e-4)
    np.testing.assert_allclose(found.source_landmarks, expected.source_landmarks)


def describe_bytes(data):
    from pathlib import Path

    from mpt.systems.deepfacelab.data.faces.face_files import FaceFile, with_metadata

    return with_metadata(FaceFile(Path("x"), "x"), data)


def test_a_small_faces_square_that_is_far_larger_than_its_box_is_left_out():
    small = FoundFace((0, 0, 20, 20), stored_face(0).landmarks)
    assert fits_its_box(stored_face(0), 128, "f")
    assert not fits_its_box(small, 128, "f")
    assert fits_its_box(small, 128, "wf")


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_places_in_a_turned_picture_are_found_back(turns):
    picture = np.zeros((5, 7), int)
    picture[1, 4] = 1
    row, column = np.argwhere(np.rot90(picture, turns))[0]
    np.testing.assert_array_equal(unturn(np.array([[column, row]]), turns, 5, 7), [[4, 1]])


class Known:
    """Stands for the detectors: the stored faces in the stored frame, none elsewhere."""

    calls = 0

    def find_faces(self, frame, most):
        Known.calls += 1
        faces = [stored_face(0), stored_face(1)] if frame.any() else []
        return faces[:most] if most else faces


@pytest.fixture
def frames(tmp_path, monkeypatch):
    folder = tmp_path / "frames"
    folder.mkdir()
    for number in (1, 3):
        Image.fromarray(arrays("geometry")["extract_frame_u8"][..., ::-1]).save(
            folder / f"{number:05d}.png"
        )
    Image.new("RGB", (256, 256)).save(folder / "00002.png")
    monkeypatch.setattr(extract_faces, "load_detectors", lambda *_: Known())
    Known.calls = 0
    return folder


def extract(frames, out, *words):
    asked = [
        "deepfacelab",
        "extract",
        frames,
        out,
        "--facelib",
        frames.parent,
        "--device",
        "cpu",
        *words,
    ]
    with pytest.raises(SystemExit) as done:
        cli.main([str(word) for word in asked])
    return done.value.code


def test_frames_become_faces_and_what_is_done_is_not_done_again(frames, tmp_path, capsys):
    out = tmp_path / "aligned"
    assert not extract(frames, out, "--size", 128, "--face-type", "f")
    names = ["00001_0.jpg", "00001_1.jpg", "00003_0.jpg", "00003_1.jpg"]
    assert sorted(path.name for path in out.glob("*.jpg")) == names
    assert (out / "no_faces.txt").read_text() == "00002\n"
    assert "no face was found in 1 frames" in capsys.readouterr().out
    face = describe(out / "00003_1.jpg")
    assert (face.kind, face.source_filename) == ("f", "00003.png")
    shutil.copy(frames / "00001.png", frames / "00004.png")
    assert not extract(frames, out, "--size", 128, "--face-type", "f")
    assert Known.calls == 4
    assert (out / "00004_1.jpg").is_file()
    assert extract(frames, out, "--size", 256) == 2
    assert "begun with other settings" in capsys.readouterr().err


def test_without_the_networks_one_line_says_what_to_name(frames, tmp_path, capsys, monkeypatch):
    monkeypatch.undo()
    assert extract(frames, tmp_path / "aligned") == 4
    assert "name the folder `facelib` of your DeepFaceLab" in capsys.readouterr().err


def test_a_face_is_found_twice_and_in_a_frame_that_lies_on_its_side():
    import torch

    class Turned(Detectors):
        """Finds a face only in pictures whose bright corner is at the upper left."""

        def find_boxes(self, picture_rgb):
            return [(60, 60, 200, 200)] if picture_rgb[:8, :8].mean() > 200 else []

        def draw_heat(self, faces):
            heat = np.zeros((len(faces), 68, 64, 64), np.float32)
            stored = arrays("geometry")["extract_landmarks"][0]
            points = ((stored - stored.min(0)) / np.ptp(stored, axis=0) * 30 + 16).astype(int)
            heat[:, np.arange(68), points[:, 1], points[:, 0]] = 1
            return heat

    detectors = Turned(torch.nn.Identity(), torch.nn.Identity(), torch.device("cpu"))
    frame = np.zeros((256, 256, 3), np.uint8)
    frame[:16, :16] = 255
    (upright,) = detectors.find_faces(frame)
    (turned,) = detectors.find_faces(np.ascontiguousarray(np.rot90(frame, 3)))  # clockwise
    np.testing.assert_allclose(
        turned.landmarks, np.stack((255 - upright.landmarks[:, 1], upright.landmarks[:, 0]), 1)
    )


def test_masks_of_an_xseg_are_kept_in_the_faces(frames, tmp_path, monkeypatch, capsys):
    out = tmp_path / "aligned"
    assert not extract(frames, out, "--size", 128)
    half = np.zeros((256, 256), np.float32)
    half[:, :128] = 0.7
    monkeypatch.setattr(
        apply_xseg, "load_segment", lambda *_: TrainedMasks(lambda face: half, None)
    )
    before = describe(out / "00001_0.jpg")
    for words in ((), ("--face-type", "f")):
        with pytest.raises(SystemExit) as done:
            cli.main(
                [
                    "deepfacelab",
                    "xseg-apply",
                    str(out),
                    "--xseg",
                    str(tmp_path),
                    "--device",
                    "cpu",
                    *words,
                ]
            )
        assert not done.value.code
        face = describe(out / "00001_0.jpg")
        mask = face.draw_face(64, "xseg")
        assert mask[32, 20] == 1
        assert mask[32, 44] == 0
        np.testing.assert_array_equal(face.landmarks, before.landmarks)
    assert "wrote masks into 4 faces" in capsys.readouterr().out
    one, other = (
        np.asarray(open_image(data, "x"))
        for data in (face.read(), with_segment(face.read(), {}, "x"))
    )
    np.testing.assert_array_equal(one, other)
