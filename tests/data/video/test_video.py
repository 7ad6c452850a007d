import math
import random
import sys
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from mpt.data.video.video import describe_video, is_video, read_frames, read_timed_frames
from mpt.data.video.video_writer import VideoWriter, join_videos
from mpt.errors import ConfigError, DataError, InputOutputError

av = pytest.importorskip("av")

pytestmark = pytest.mark.tier("fast")


def write_with_sound(path: Path, frames: int = 20, rate: int = 10) -> None:
    """Make a video of ever brighter grey frames with a 440 Hz tone, with PyAV alone."""
    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=rate)
        video.width, video.height, video.pix_fmt = 96, 64, "yuv420p"
        sound = container.add_stream("aac", rate=44100)
        sound.layout = "mono"
        for index in range(frames):
            pixels = np.full((64, 96, 3), index * 10, np.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(video.encode(None))
        wave = (0.3 * np.sin(np.arange(44100 * frames // rate) / 44100 * 2 * math.pi * 440)).astype(
            np.float32
        )
        for start in range(0, len(wave), 1024):
            frame = av.AudioFrame.from_ndarray(
                wave[None, start : start + 1024], format="fltp", layout="mono"
            )
            frame.sample_rate, frame.pts = 44100, start
            container.mux(sound.encode(frame))
        container.mux(sound.encode(None))


def noise(count: int, height: int = 64, width: int = 96) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(256, (3, height, width), dtype=torch.uint8, generator=generator)
        for _ in range(count)
    ]


def broken(count: int) -> Iterator[torch.Tensor]:
    """Yield frames, then fail as a network that makes them may."""
    yield from noise(count)
    raise RuntimeError


def write(path: Path, frames: Iterable[torch.Tensor], rate: float = 10, **options: object) -> None:
    with VideoWriter(path, rate, **options) as writer:  # type: ignore[arg-type]
        for frame in frames:
            writer.write(frame)


def test_a_video_made_by_pyav_is_described_and_read(tmp_path):
    write_with_sound(tmp_path / "in.mp4")
    info = describe_video(tmp_path / "in.mp4")
    assert (info.width, info.height, info.frame_rate) == (96, 64, 10)
    frames = list(read_timed_frames(tmp_path / "in.mp4"))
    assert [float(frame.time) for frame in frames] == [index / 10 for index in range(20)]
    levels = [float(frame.image.float().mean()) for frame in frames]
    assert all(abs(level - 10 * index) < 3 for index, level in enumerate(levels))
    part = list(read_frames(tmp_path / "in.mp4", 5, 8))
    assert [torch.equal(one, frames[index].image) for index, one in enumerate(part, 5)] == [
        True
    ] * 3


def test_colours_survive_writing_and_reading_at_small_and_large_sizes(tmp_path):
    for height in (64, 720):
        colour = torch.tensor([200, 30, 60], dtype=torch.uint8)[:, None, None].expand(3, height, 64)
        write(tmp_path / "colour.mp4", [colour] * 2)
        for frame in read_frames(tmp_path / "colour.mp4"):
            assert (frame.int() - colour.int()).abs().max() <= 3


def test_floats_are_scaled_and_clipped(tmp_path):
    write(tmp_path / "a.mp4", [torch.full((3, 32, 32), 1.7), torch.full((3, 32, 32), 0.5)])
    frames = list(read_frames(tmp_path / "a.mp4"))
    assert frames[0].min() >= 253
    assert (frames[1].int() - 128).abs().max() <= 2


@pytest.mark.parametrize("slow", [1, 2])
def test_sound_that_lasts_longer_than_the_pictures_is_kept_to_its_end(tmp_path, slow):
    write_with_sound(tmp_path / "in.mp4")
    write(tmp_path / "out.mp4", noise(4), 10, audio_from=tmp_path / "in.mp4", slow=Fraction(slow))
    lengths = []
    for name in ("in.mp4", "out.mp4"):
        with av.open(str(tmp_path / name)) as container:
            lengths.append(sum(frame.samples for frame in container.decode(audio=0)))
    assert lengths[1] == pytest.approx(slow * lengths[0], rel=0.02)


def test_the_sound_goes_along_unchanged(tmp_path):
    write_with_sound(tmp_path / "in.mp4")
    doubled = [frame for frame in read_frames(tmp_path / "in.mp4") for _ in range(2)]
    write(tmp_path / "out.mp4", doubled, 20, audio_from=tmp_path / "in.mp4")
    info = describe_video(tmp_path / "out.mp4")
    assert info.frame_rate == 20
    assert len(list(read_frames(tmp_path / "out.mp4"))) == 40
    sounds = []
    for name in ("in.mp4", "out.mp4"):
        with av.open(str(tmp_path / name)) as container:
            sounds.append(
                np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
            )
    length = min(sound.shape[1] for sound in sounds)
    assert length > 44100 * 1.9
    assert np.array_equal(sounds[0][:, :length], sounds[1][:, :length])


def test_odd_sides_and_fractional_rates_are_kept(tmp_path):
    write(tmp_path / "odd.mp4", noise(3, 65, 63), Fraction(30000, 1001))
    info = describe_video(tmp_path / "odd.mp4")
    assert (info.width, info.height, info.frame_rate) == (63, 65, Fraction(30000, 1001))


def test_a_turned_video_is_read_upright(tmp_path):
    frame = torch.zeros(3, 64, 96, dtype=torch.uint8)
    frame[:, :, 48:] = 255
    write(tmp_path / "flat.mp4", [frame] * 2)
    with (
        av.open(str(tmp_path / "flat.mp4")) as source,
        av.open(str(tmp_path / "turned.mp4"), "w") as target,
    ):
        stream = target.add_stream_from_template(source.streams.video[0])
        set_rotation = getattr(stream, "set_display_rotation", None)
        if set_rotation is None:
            pytest.skip("this PyAV cannot write a display matrix")
        set_rotation(90)
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    info = describe_video(tmp_path / "turned.mp4")
    assert (info.width, info.height) == (64, 96)


def test_what_is_no_video_is_named(tmp_path):
    with av.open(str(tmp_path / "sound.wav"), "w") as container:
        tone = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), "s16", "mono")
        sound.rate = 8000
        container.mux(tone.encode(sound))
    for name, content in (
        ("sound.mp4", (tmp_path / "sound.wav").read_bytes()),
        ("random.mp4", random.Random(0).randbytes(5000)),
        ("empty.mkv", b""),
        ("text.avi", b"hello" * 100),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}: not a video"):
            describe_video(tmp_path / name)
    with pytest.raises(DataError, match="there is no such video"):
        describe_video(tmp_path / "absent.mp4")


def test_a_video_that_is_cut_off_or_damaged_is_named(tmp_path):
    write(tmp_path / "whole.mkv", noise(30))
    content = bytearray((tmp_path / "whole.mkv").read_bytes())
    (tmp_path / "cut.mkv").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"cut off: \d+ of about 30 frames"):
        list(read_frames(tmp_path / "cut.mkv"))
    content[len(content) // 2 : len(content) // 2 + 4000] = bytes(4000)
    (tmp_path / "damaged.mkv").write_bytes(content)
    with pytest.raises(DataError, match=r"damaged\.mkv"):
        list(read_frames(tmp_path / "damaged.mkv"))


def test_a_playlist_under_a_videos_name_opens_no_other_source(tmp_path):
    write(tmp_path / "real.ts", noise(3))
    playlist = (
        "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nhttp://127.0.0.1:9/x.ts\n#EXT-X-ENDLIST\n"
    )
    (tmp_path / "list.mp4").write_text(playlist)
    with pytest.raises(DataError):
        describe_video(tmp_path / "list.mp4")


def test_nothing_is_left_of_a_video_whose_writing_failed(tmp_path):
    with pytest.raises(RuntimeError):
        write(tmp_path / "out.mp4", broken(1))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="frame 1 is 32x64"):
        write(tmp_path / "out.mp4", [*noise(1), *noise(1, 64, 32)])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputOutputError, match="could not be written"):
        write(tmp_path / "out.unknown", noise(2))
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_file_stays_until_the_new_one_is_complete(tmp_path):
    write(tmp_path / "out.mp4", noise(2))
    before = (tmp_path / "out.mp4").read_bytes()
    with pytest.raises(RuntimeError):
        write(tmp_path / "out.mp4", broken(1))
    assert (tmp_path / "out.mp4").read_bytes() == before


@pytest.mark.parametrize("ending", ["mp4", "mkv", "ts"])
def test_parts_are_joined_frame_for_frame_whatever_times_their_format_keeps(tmp_path, ending):
    pictures = [
        torch.full((3, 32, 48), 20 * (number % 7) + 50, dtype=torch.uint8) for number in range(9)
    ]
    parts = [tmp_path / f"{number}.{ending}" for number in range(3)]
    for part, frames in zip(parts, (pictures[:8], pictures, pictures[8:])):
        write(part, frames)
    join_videos(parts, tmp_path / f"joined.{ending}")
    joined = list(read_timed_frames(tmp_path / f"joined.{ending}"))
    apart = [image for part in parts for image in read_frames(part)]
    assert all(torch.equal(frame.image, image) for frame, image in zip(joined, apart, strict=True))
    assert [float(frame.time) for frame in joined] == pytest.approx(
        [number / 10 for number in range(18)], abs=2e-3
    )


def test_names_tell_videos():
    assert is_video("a/b.MP4")
    assert not is_video("a/b.png")


def test_a_video_without_pyav_is_a_wrong_setup_and_no_code_of_the_user_s(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"pip install 'mpt-trainer\[video\]'"):
        describe_video(tmp_path / "a.mp4")
