"""A video is timed frames with bits, colours and tracks: what comes out of clips as cameras have them."""

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from mpt.data.video.properties import aspect_of
from mpt.errors import ConfigError
from mpt.systems.dain.data.shared.deep_pictures import read_deep_picture, write_deep_picture
from mpt.systems.dain.inference.delivery import choose_film, choose_pace
from mpt.systems.dain.inference.source import open_source

from .clips import draw_texture, frame_times, tones, write_clip
from .test_command import make_runs, type_in

pytest.importorskip("av")

UNEVEN = [0, 40, 80, 220, 260, 300, 500, 540, 1020]


@pytest.fixture
def interpolate(tmp_path: Path) -> Callable[..., int]:
    """Return `mpt dain interpolate` with a run whose network is not trained."""
    runs = make_runs(tmp_path)
    return lambda *words: type_in("dain", "interpolate", "smooth", *words, "--runs", runs)


def ramp(count: int, deep: bool = False) -> np.ndarray:
    """Return frames that brighten evenly, grey."""
    most = 65535 if deep else 255
    levels = np.linspace(0.2, 0.8, count) * most
    return np.broadcast_to(levels[:, None, None, None], (count, 48, 64, 3)).astype(
        np.uint16 if deep else np.uint8
    )


def test_uneven_times_are_kept_and_halved(interpolate, tmp_path, capsys):
    clip = write_clip(tmp_path / "in.mkv", ramp(9), UNEVEN, sounds=(440,))
    assert interpolate(clip, "--output", tmp_path / "out.mkv", "--scene-cut", 0) == 0
    assert "at their own times" in capsys.readouterr().out
    halves = [(one + other) / 2 for one, other in pairwise(UNEVEN)]
    wanted = sorted([*UNEVEN, *halves])
    found = frame_times(tmp_path / "out.mkv")
    assert found[: len(wanted)] == pytest.approx([time / 1000 for time in wanted], abs=0.0015)
    assert len(found) == 2 * len(UNEVEN)


def test_uneven_times_become_an_even_rate_where_one_is_asked_for(interpolate, tmp_path):
    clip = write_clip(tmp_path / "in.mkv", ramp(9), UNEVEN)
    assert interpolate(clip, "--output", tmp_path / "out.mp4", "--rate", 50, "--scene-cut", 0) == 0
    found = frame_times(tmp_path / "out.mp4")
    assert found == pytest.approx([number / 50 for number in range(len(found))], abs=1e-3)
    assert found[-1] >= 1.02


def test_ten_bits_hdr_and_both_sounds_come_out(interpolate, tmp_path, capsys):
    import av

    clip = write_clip(tmp_path / "in.mkv", ramp(9, deep=True), UNEVEN, deep=True, sounds=(440, 880))
    assert interpolate(clip, "--output", tmp_path / "out.mp4", "--scene-cut", 0) == 0
    assert "not kept" not in capsys.readouterr().out
    with av.open(str(tmp_path / "out.mp4")) as container:
        video = container.streams.video[0]
        frames = list(container.decode(video))
        context = video.codec_context
        assert context.format.name == "yuv420p10le"
        assert (int(context.colorspace), int(context.color_primaries), int(context.color_trc)) == (
            9,
            9,
            16,
        )
        sides = {side.type.name for side in frames[0].side_data}
        assert {"MASTERING_DISPLAY_METADATA", "CONTENT_LIGHT_LEVEL"} <= sides
        levels = [float(frame.to_ndarray(format="gray16le").mean()) / 65535 for frame in frames]
    assert np.diff(levels[:17]) == pytest.approx(
        np.full(16, np.mean(np.diff(levels[:17]))), abs=0.004
    )
    assert levels[1] not in {round(level * 255) / 255 for level in levels}
    assert [round(hertz, -1) for hertz, _ in tones(tmp_path / "out.mp4")] == [440, 880]


def test_slow_motion_stretches_sound_with_its_pitch_or_drops_it(interpolate, tmp_path, capsys):
    even = [40 * number for number in range(10)]
    clip = write_clip(tmp_path / "in.mp4", ramp(10), even, sounds=(440,))
    assert interpolate(clip, "--output", tmp_path / "slow.mp4", "--slow", 3, "--scene-cut", 0) == 0
    assert "sound: made 3 times as long with its pitch kept" in capsys.readouterr().out
    found = frame_times(tmp_path / "slow.mp4")
    assert found == pytest.approx([number / 25 for number in range(30)], abs=1e-3)
    ((hertz, seconds),) = tones(tmp_path / "slow.mp4")
    assert hertz == pytest.approx(440, abs=5)
    assert seconds == pytest.approx(3 * 0.46, abs=0.1)  # of the sound, longer than the pictures
    words = ("--input-rate", 12.5, "--sound", "drop", "--scene-cut", 0)
    assert interpolate(clip, "--output", tmp_path / "mute.mp4", *words) == 0
    assert "not kept: sound (aac)" in capsys.readouterr().out
    assert not tones(tmp_path / "mute.mp4")


def with_subtitles(clip: Path, path: Path) -> Path:
    """Write a clip with one line of text, shown from 0.1 to 0.3 s."""
    import av

    text = path.with_suffix(".srt")
    text.write_text("1\n00:00:00,100 --> 00:00:00,300\nHello\n")
    with (
        av.open(str(path), "w") as target,
        av.open(str(clip)) as pictures,
        av.open(str(text)) as lines,
    ):
        pairs = [
            (source, stream, target.add_stream_from_template(stream))
            for source in (pictures, lines)
            for stream in source.streams
        ]
        for source, stream, copy in pairs:
            for packet in source.demux(stream):
                if packet.size:
                    packet.stream = copy
                    target.mux(packet)
    return path


def test_subtitles_go_along_slowed_too_or_are_named(interpolate, tmp_path, capsys):
    import av

    plain = write_clip(tmp_path / "plain.mkv", ramp(10), [40 * number for number in range(10)])
    clip = with_subtitles(plain, tmp_path / "in.mkv")
    assert interpolate(clip, "--output", tmp_path / "out.mkv", "--slow", 2, "--scene-cut", 0) == 0
    with av.open(str(tmp_path / "out.mkv")) as container:
        (packet, *_) = container.demux(container.streams.subtitles[0])
        assert b"Hello" in bytes(packet)
        assert float(packet.pts * packet.time_base) == pytest.approx(0.2, abs=0.01)
    assert interpolate(clip, "--output", tmp_path / "out.mp4", "--scene-cut", 0) == 0
    assert (
        "not kept: subtitle track 1 (subrip), which .mp4 does not hold; .mkv may"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(("ending", "deep"), [("mp4", False), ("mkv", False), ("mp4", True)])
def test_pixels_that_are_not_square_stay_so_or_are_named(
    interpolate, tmp_path, capsys, ending, deep
):
    import av

    aspect = Fraction(16, 11)  # a DVD's
    clip = write_clip(
        tmp_path / f"in.{ending}", ramp(3, deep), [0, 40, 80], deep=deep, aspect=aspect
    )
    assert interpolate(clip, "--output", tmp_path / f"out.{ending}", "--scene-cut", 0) == 0
    with av.open(str(tmp_path / f"out.{ending}")) as container:
        assert container.streams.video[0].sample_aspect_ratio == aspect
    assert "not kept" not in capsys.readouterr().out
    assert interpolate(clip, "--output", tmp_path / "out", "--scene-cut", 0) == 0
    assert "not kept: the shape of pixels, 16:11" in capsys.readouterr().out


def test_of_a_turned_picture_pixels_are_turned_too(tmp_path):
    stream = SimpleNamespace(sample_aspect_ratio=Fraction(16, 11))
    assert aspect_of(stream, SimpleNamespace(rotation=-90)) == Fraction(11, 16)
    assert aspect_of(stream, SimpleNamespace(rotation=180)) == Fraction(16, 11)
    assert aspect_of(SimpleNamespace(sample_aspect_ratio=None), None) == 1


def test_of_two_frames_at_one_time_the_first_is_not_shown(interpolate, tmp_path):
    clip = write_clip(tmp_path / "in.mkv", ramp(5), [0, 40, 40, 80, 120], ordered=True)
    assert frame_times(clip) == [0, 0.04, 0.04, 0.08, 0.12]
    assert interpolate(clip, "--output", tmp_path / "out.mkv", "--scene-cut", 0) == 0
    found = frame_times(tmp_path / "out.mkv")
    assert found[:7] == pytest.approx([0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12], abs=0.0015)


def test_interlacing_chapters_and_attachments_are_named(tmp_path):
    import av

    with av.open(str(tmp_path / "in.mkv"), "w") as container:
        video = container.add_stream(
            "libx264", rate=25, options={"x264-params": "tff=1", "flags": "+ildct+ilme"}
        )
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        container.add_attachment("letters.ttf", "application/x-truetype-font", b"letters")
        times = {"start": 0, "end": 40, "time_base": Fraction(1, 1000), "metadata": {}}
        container.set_chapters([{**times, "id": 1}, {**times, "id": 2}])
        for image in ramp(3):
            container.mux(video.encode(av.VideoFrame.from_ndarray(image)))
        container.mux(video.encode(None))
    found = "; ".join(open_source([tmp_path / "in.mkv"]).not_kept())
    assert "interlacing: both fields are taken as one frame" in found
    assert found.endswith("2 chapters; attachment track 1")


def test_pictures_of_16_bits_stay_so(interpolate, tmp_path):
    import torch

    for number in range(2):
        image = torch.full((3, 48, 64), 20_000 + 101 * number, dtype=torch.int32)
        write_deep_picture(image, tmp_path / f"deep{number}.png")
    files = sorted(tmp_path.glob("deep?.png"))
    assert interpolate(*files, "--output", tmp_path / "out", "--scene-cut", 0) == 0
    made = [
        int(read_deep_picture(file)[0, 9, 9]) for file in sorted((tmp_path / "out").glob("*.png"))
    ]
    assert made[0] == 20_000
    assert abs(made[1] - 20_050) <= 2
    assert made[2:] == [20_101, 20_101]


@pytest.mark.parametrize(
    ("kind", "mode"), [("webp", "RGBA"), ("tiff", "RGBA"), ("tiff", "LA"), ("png", "P")]
)
def test_alpha_of_any_picture_of_a_sequence_is_named(kind, mode, tmp_path):
    Image.new("RGB", (40, 24)).save(tmp_path / f"0.{kind}")
    Image.new(mode, (40, 24)).save(
        tmp_path / f"1.{kind}", **({"transparency": 0} if mode == "P" else {})
    )
    source = open_source([tmp_path / f"0.{kind}", tmp_path / f"1.{kind}"])
    assert source.not_kept() == ["alpha: frames become opaque"]
    assert open_source([tmp_path / f"0.{kind}"] * 2).not_kept() == []


def test_a_tiff_of_16_bits_is_read_whole(tmp_path):
    import av

    levels = np.arange(24 * 40 * 3, dtype=np.uint16).reshape(24, 40, 3) * 20
    encoder = av.codec.CodecContext.create("tiff", "w")
    encoder.width, encoder.height, encoder.pix_fmt, encoder.time_base = 40, 24, "rgb48le", 1
    packets = encoder.encode(av.VideoFrame.from_ndarray(levels, format="rgb48le"))
    for number in range(2):
        (tmp_path / f"{number}.tif").write_bytes(b"".join(map(bytes, packets)))
    source = open_source([tmp_path])
    assert source.deep
    assert (next(iter(source.frames())).image.permute(1, 2, 0).numpy() == levels).all()


@pytest.mark.parametrize(
    ("sampling", "said"), [("yuv444p", "4:4:4"), ("yuv422p", "4:2:2"), ("yuv420p", None)]
)
def test_finer_colour_than_a_video_keeps_is_named(sampling, said, tmp_path, capsys):
    import av

    with av.open(str(tmp_path / "in.mkv"), "w") as container:
        video = container.add_stream("libx264", rate=25)
        video.width, video.height, video.pix_fmt = 64, 48, sampling
        for image in ramp(3):
            container.mux(video.encode(av.VideoFrame.from_ndarray(image)))
        container.mux(video.encode(None))
    source = open_source([tmp_path / "in.mkv"])
    pace = choose_pace(source, None, None, 1.0)
    choose_film(source, pace, tmp_path / "out.mkv", None)
    assert capsys.readouterr().out == (
        f"not kept: {said} becomes 4:2:0: colour at half the size\n" if said else ""
    )
    choose_film(source, pace, tmp_path / "out", None)
    assert capsys.readouterr().out == ""


def test_what_is_lost_is_said_before_the_start(tmp_path, capsys):
    Image.new("RGBA", (40, 24)).save(tmp_path / "0.png")
    Image.new("RGBA", (40, 24)).save(tmp_path / "1.png")
    source = open_source([tmp_path / "0.png", tmp_path / "1.png"])
    choose_film(source, choose_pace(source, None, None, 1.0), tmp_path / "out", None)
    assert "not kept: alpha: frames become opaque" in capsys.readouterr().out
    clip = write_clip(tmp_path / "in.mkv", ramp(3), [0, 40, 300], sounds=(440,))
    source = open_source([clip])
    choose_film(source, choose_pace(source, None, None, 1.0), tmp_path / "out", None)
    assert capsys.readouterr().out == (
        "not kept: sound: a folder of pictures has none; frame times, which are uneven: pictures have none\n"
    )
    for changes, words in (
        ({"slow": 0.5}, "--slow: found 0.5"),
        ({"rate": 1.0}, "--rate: 1 is below the input's"),
        ({"factor": 65}, "--factor: found 65"),
    ):
        with pytest.raises(ConfigError, match=words):
            choose_pace(source, **{"factor": None, "rate": None, "slow": 1.0, **changes})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--sound: found 'loud'"):
        choose_film(source, choose_pace(source, None, None, 1.0), tmp_path / "o.mp4", "loud")


def test_a_clip_with_everything_keeps_times_bits_sound_and_scenes(interpolate, tmp_path, capsys):
    """Uneven times, ten bits, sound, a cut in the light and one in the dark, and a frame that repeats."""
    import av

    scenes = [draw_texture(seed, 96, 200) for seed in (1, 2, 3)]
    lights = [1.0, 0.08, 0.08]
    plan = [(0, 0), (0, 3), (0, 3), (0, 9), (1, 0), (1, 3), (2, 0), (2, 3)]  # scene, pan in pixels
    milliseconds = [0, 40, 80, 120, 220, 260, 300, 500]
    shown = [scenes[scene][:, pan : pan + 160] * lights[scene] for scene, pan in plan]
    frames = np.stack([(image * 65535).astype(np.uint16) for image in shown])
    clip = write_clip(tmp_path / "in.mkv", frames, milliseconds, deep=True, sounds=(440,))
    assert interpolate(clip, "--output", tmp_path / "out.mkv") == 0
    said = capsys.readouterr().out
    assert "2 scene cuts not blended" in said
    assert "1 repeated frames interpolated over" in said
    times = frame_times(tmp_path / "out.mkv")
    wanted = sorted([*milliseconds, *((one + other) / 2 for one, other in pairwise(milliseconds))])
    assert times[: len(wanted)] == pytest.approx([time / 1000 for time in wanted], abs=0.0015)
    with av.open(str(tmp_path / "out.mkv")) as container:
        assert container.streams.video[0].codec_context.format.name == "yuv420p10le"
        made = [frame.to_ndarray(format="rgb48le") / 65535 for frame in container.decode(video=0)]
    # Between 120 and 220 ms: no blend, but the frame before up to the middle and the one after from there on.
    for place, source in ((7, 4), (11, 6)):  # at 170 and 280 ms
        assert wanted[place] in (170, 280)
        blend = (shown[source - 1] + shown[source]) / 2
        assert np.abs(made[place] - shown[source]).mean() < 0.6 * np.abs(made[place] - blend).mean()
    # at 80 ms the input shows the frame of 40 ms again; the output is on its way to that of 120 ms
    repeated = made[4]
    assert np.abs(repeated - shown[2]).mean() > 0.01
    ((hertz, seconds),) = tones(tmp_path / "out.mkv")
    assert hertz == pytest.approx(440, abs=5)
    assert seconds == pytest.approx(0.6, abs=0.15)
