"""A face goes from one video to another by one command and no second program."""

import numpy as np
import pytest
import torch

from mpt import cli
from mpt.data.video.video import read_frames
from mpt.data.video.video_writer import VideoWriter
from mpt.systems.deepfacelab.commands.shared import extract_faces
from mpt.systems.deepfacelab.data.faces.face_writing import FoundFace
from tests.systems.deepfacelab.pixels import arrays

TINY = [
    "model.image_size=64",
    "model.ae_dims=6",
    "model.e_dims=4",
    "model.d_dims=4",
    "model.d_mask_dims=2",
]


class Known:
    """Stands for the detectors: the stored face."""

    def find_faces(self, frame, most):
        stored = arrays("geometry")
        return [
            FoundFace(
                tuple(int(x) for x in stored["extract_rects"][0]), stored["extract_landmarks"][0]
            )
        ]


def test_a_swap_of_two_videos_is_made_from_frames_to_a_video_and_continues(
    tmp_path, monkeypatch, capsys
):
    pytest.importorskip("av")
    monkeypatch.setattr(extract_faces, "load_detectors", lambda *_: Known())
    frame = torch.from_numpy(
        np.ascontiguousarray(arrays("geometry")["extract_frame_u8"][..., ::-1])
    ).permute(2, 0, 1)
    for name, picture in (("src", frame), ("dst", frame.flip(0))):
        with VideoWriter(tmp_path / f"{name}.mp4", 10) as writer:
            for _ in range(3):
                writer.write(picture)
    asked = [
        "deepfacelab",
        "swap",
        "src.mp4",
        "dst.mp4",
        "--output",
        "out.mp4",
        "--facelib",
        "nowhere",
    ]
    asked += ["--device", "cpu", *TINY, "train.batch_size=2", "precision.mode=fp32"]
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with pytest.raises(SystemExit) as done:
            cli.main([*asked, "train.steps=2", "--size", "96"])
        assert not done.value.code, capsys.readouterr().err
    printed = capsys.readouterr()
    assert "3 frames, 0 to do" in printed.out
    assert "the run was complete already" in printed.err
    assert "0 frames to do" in printed.out
    assert len(list(read_frames(tmp_path / "out.mp4"))) == 3
    before, after = (next(iter(read_frames(tmp_path / name))) for name in ("dst.mp4", "out.mp4"))
    assert (before.int() - after.int()).abs().max() > 30
    with pytest.raises(SystemExit) as done:
        # trained on, so all frames are merged again
        cli.main([*asked, "train.steps=3", "--size", "96"])
    printed = capsys.readouterr()
    assert not done.value.code, printed.err
    assert "3 frames to do" in printed.out
