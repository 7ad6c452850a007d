import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mpt import cli
from mpt.data.video.video import describe_video, read_frames
from mpt.data.video.video_writer import VideoWriter
from mpt.inference.trained import open_trained
from mpt.systems.deepfacelab.data.faces.face_files import list_faces, open_image
from mpt.systems.deepfacelab.data.faces.face_geometry import invert
from mpt.systems.deepfacelab.data.faces.resampling import cut
from mpt.systems.deepfacelab.inference.frames import open_frames
from mpt.systems.deepfacelab.inference.planning import peak_bytes
from tests.systems.deepfacelab.commands.small_run import make_run

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run, frames, and the faces cut from them."""
    folder = tmp_path_factory.mktemp("merge")
    make_run(folder / "runs", 2)
    (folder / "frames").mkdir()
    for face in list_faces(FIXTURES / "wf_xseg.pak", "dst")[:3]:
        picture = (
            torch.from_numpy(np.array(open_image(face.read(), "x").convert("RGB"))).permute(2, 0, 1)
            / 255
        )
        frame = cut(picture, invert(face.source_matrix), (240, 320), "bicubic", "border").clamp(
            0, 1
        )
        array = (frame * 255).byte().permute(1, 2, 0).numpy()
        Image.fromarray(array).save(folder / "frames" / f"{Path(face.source_filename).stem}.png")
    Image.new("RGB", (320, 240)).save(folder / "frames" / "90000.png")
    return folder


def merge(place, output, *words, frames="frames"):
    asked = [
        "deepfacelab",
        "merge",
        place / "runs" / "faces",
        "--frames",
        place / frames,
        "--output",
        output,
    ]
    asked += ["--aligned", FIXTURES / "wf_xseg.pak", "--device", "cpu", *words]
    with pytest.raises(SystemExit) as done:
        cli.main([str(word) for word in asked])
    return done.value.code


def read(path):
    return np.asarray(Image.open(path), np.int32)


def test_frames_come_out_swapped_and_what_is_there_is_not_made_again(place, tmp_path, capsys):
    out = tmp_path / "out"
    assert merge(place, out, "--mask", "dst", "--blur", "10") == 0
    assert "4 frames, 3 faces in 3 of them; 4 frames to do" in capsys.readouterr().out
    names = sorted(path.name for path in out.glob("*.png"))
    assert names == ["00000.png", "00001.png", "00002.png", "90000.png"]
    assert (read(out / "90000.png") == read(place / "frames" / "90000.png")).all()
    change = np.abs(read(out / "00000.png") - read(place / "frames" / "00000.png")).max(-1)
    assert 100 < (change > 8).sum() < change.size / 2
    before = (out / "00001.png").stat().st_mtime_ns
    (out / "00002.png").unlink()
    assert merge(place, out, "--mask", "dst", "--blur", "10", "--batch-size", "1") == 0
    assert "1 frames to do" in capsys.readouterr().out
    assert (out / "00001.png").stat().st_mtime_ns == before
    assert (out / "00002.png").is_file()


def test_other_settings_do_not_mix_into_a_folder_that_was_begun(place, tmp_path, capsys):
    out = tmp_path / "out"
    assert merge(place, out, "--raw") == 0
    assert merge(place, out, "--mask", "full") == 2
    assert "begun with other settings" in capsys.readouterr().err
    assert json.loads((out / "merge.json").read_text())["mode"] == "raw-rgb"
    assert merge(place, out, "--mask", "full", "--overwrite", "--sharpen", "3") == 0
    record = json.loads((out / "merge.json").read_text())
    assert (record["mask"], record["sharpen"]) == ("full", 3)
    # stands for faces of which bad ones were removed
    shutil.copy(FIXTURES / "wf_xseg.pak", tmp_path / "fewer.pak")
    assert (
        merge(place, out, "--mask", "full", "--sharpen", "3", "--aligned", tmp_path / "fewer.pak")
        == 2
    )
    histogram = ["--mode", "hist-match", "--hist-threshold", "100", "--no-hist-masked"]
    assert merge(place, out, *histogram, "--overwrite") == 0
    record = json.loads((out / "merge.json").read_text())
    assert (record["mode"], record["hist_threshold"], record["hist_masked"]) == (
        "hist-match",
        100,
        False,
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thing.txt").touch()
    assert merge(place, tmp_path / "other") == 5


def test_frames_that_differ_in_the_suffix_alone_are_refused(place, tmp_path, capsys):
    shutil.copytree(place / "frames", tmp_path / "frames")
    Image.open(tmp_path / "frames" / "00000.png").save(tmp_path / "frames" / "00000.jpg")
    assert merge(place, tmp_path / "out", frames=tmp_path / "frames") == 3
    assert "00000.jpg and 00000.png" in capsys.readouterr().err


def test_frames_of_8k_are_read(tmp_path):
    Image.new("L", (7680, 4320)).save(tmp_path / "a.png")
    ((_, frame),) = open_frames(tmp_path).read({0})
    assert frame.shape == (3, 4320, 7680)


def test_any_batch_size_and_half_draw_the_same_faces(place, tmp_path):
    assert merge(place, tmp_path / "one", "--raw", "--batch-size", "1") == 0
    assert merge(place, tmp_path / "all", "--raw", "--batch-size", "8") == 0
    assert merge(place, tmp_path / "half", "--raw", "--half", "--vram", "2GiB") == 0
    for name in ("00000.png", "00002.png"):
        assert np.abs(read(tmp_path / "one" / name) - read(tmp_path / "all" / name)).max() <= 1
        assert np.abs(read(tmp_path / "one" / name) - read(tmp_path / "half" / name)).mean() < 3


def test_a_video_becomes_a_video(place, tmp_path):
    pytest.importorskip("av")
    with VideoWriter(tmp_path / "in.mp4", 10) as writer:
        for name in ("00000.png", "00001.png", "00002.png"):
            writer.write(
                torch.from_numpy(read(place / "frames" / name).astype(np.uint8)).permute(2, 0, 1)
            )
    shutil.copytree(place / "runs", tmp_path / "runs")
    assert merge(tmp_path, tmp_path / "out.mp4", "--mask", "dst", frames="in.mp4") == 0
    info = describe_video(tmp_path / "out.mp4")
    assert (info.width, float(info.frame_rate)) == (320, 10)
    assert len(list(read_frames(tmp_path / "out.mp4"))) == 3
    # counted from 1, though the faces are counted from 0
    first = read(tmp_path / "out-frames" / "00001.png")
    assert (np.abs(first - read(place / "frames" / "00000.png")).max(-1) > 24).sum() > 100


def test_masks_of_the_merged_frames_are_written_too_as_pictures_or_a_video(place, tmp_path, capsys):
    pytest.importorskip("av")
    out, masks = tmp_path / "out", tmp_path / "masks.mp4"
    assert (
        merge(
            place, out, "--mask", "dst", "--mask-output", masks, "--fps", "10", "--mode", "seamless"
        )
        == 0
    )
    mask = read(tmp_path / "masks-frames" / "00000.png")
    assert mask.shape == (240, 320)
    assert mask.max() == 255
    change = np.abs(read(out / "00000.png") - read(place / "frames" / "00000.png")).max(-1)
    assert (change[mask == 0] == 0).all()
    assert not read(tmp_path / "masks-frames" / "90000.png").any()
    assert len(list(read_frames(masks))) == 4
    assert merge(place, out, "--mask-output", out) == 2
    assert "is where the frames go" in capsys.readouterr().err


def packets(path, kind):
    import av

    with av.open(str(path)) as container:
        return [(bytes(p), p.pts * p.time_base) for p in container.demux(**{kind: 0}) if p.size]


def test_the_sound_of_a_video_is_kept_packet_for_packet(place, tmp_path):
    av = pytest.importorskip("av")
    rate, frames = (
        16000,
        [read(place / "frames" / name).astype(np.uint8) for name in ("00000.png", "00001.png")],
    )
    with av.open(str(tmp_path / "in.mp4"), "w") as container:
        video, sound = container.add_stream("mpeg4", rate=4), container.add_stream("aac", rate=rate)
        video.width, video.height, video.pix_fmt, sound.layout = 320, 240, "yuv420p", "mono"
        tone = np.sin(np.arange(rate // 2) * 0.1).astype(np.float32)[None]
        spoken = av.AudioFrame.from_ndarray(tone, "fltp", "mono")
        spoken.sample_rate, spoken.pts = rate, 0
        for stream, made in (
            (video, [av.VideoFrame.from_ndarray(one, "rgb24") for one in frames]),
            (sound, [spoken]),
        ):
            for one in (*made, None):
                container.mux(stream.encode(one))
    shutil.copytree(place / "runs", tmp_path / "runs")
    assert merge(tmp_path, tmp_path / "out.mp4", "--mask", "dst", frames="in.mp4") == 0
    before = packets(tmp_path / "in.mp4", "audio")
    assert len(before) > 3
    assert packets(tmp_path / "out.mp4", "audio") == before
    assert packets(tmp_path / "out.mp4", "video") != packets(tmp_path / "in.mp4", "video")


def test_infer_says_how_whole_frames_are_swapped(place, tmp_path, capsys):
    asked = [
        "infer",
        place / "runs" / "faces",
        "--input",
        place / "frames",
        "--output",
        tmp_path / "out",
    ]
    with pytest.raises(SystemExit) as done:
        cli.main([str(word) for word in (*asked, "--device", "cpu")])
    assert not done.value.code
    assert f"mpt infer {place / 'runs' / 'faces'} --input frames=DIR" in capsys.readouterr().out


def test_infer_swaps_whole_frames_where_it_is_given_frames_and_faces(place, tmp_path, capsys):
    asked = [
        "infer",
        place / "runs" / "faces",
        "--input",
        f"frames={place / 'frames'}",
        "--device",
        "cpu",
    ]
    asked += ["--input", f"aligned={FIXTURES / 'wf_xseg.pak'}", "-o", tmp_path / "out"]
    with pytest.raises(SystemExit) as done:
        cli.main([str(word) for word in asked])
    assert not done.value.code
    assert "these inputs are for `mpt deepfacelab merge`" in capsys.readouterr().out
    assert merge(place, tmp_path / "typed") == 0
    for path in (tmp_path / "typed").glob("*.png"):
        assert (read(path) == read(tmp_path / "out" / path.name)).all()


def test_faces_of_other_frames_and_runs_that_swap_nothing_are_named(place, tmp_path, capsys):
    (tmp_path / "frames").mkdir()
    shutil.copy(place / "frames" / "90000.png", tmp_path / "frames" / "x.png")
    shutil.copytree(place / "runs", tmp_path / "runs")
    assert merge(tmp_path, tmp_path / "out") == 3
    assert "none of the 6 faces" in capsys.readouterr().err
    assert merge(place, tmp_path / "out", frames="nowhere") == 3


def test_the_planned_memory_grows_with_the_faces_and_half_takes_less(place):
    trained = open_trained(str(place / "runs" / "faces"), place / "runs", "cpu")
    one, four, half = (
        peak_bytes(trained, *wish) for wish in ((None, 1), (None, 4), ("bfloat16", 4))
    )
    assert one < four
    assert half < four
