"""Small clips as cameras and discs have them: uneven times, ten bits, HDR, sound, subtitles, a turned picture."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

UNIT = Fraction(1, 1000)
SOUND_RATE = 48_000
MASTERING = "G(8500,39850)B(6550,2300)R(35400,14600)WP(15635,16450)L(10000000,50)"


def write_clip(
    path: Path,
    frames: np.ndarray,
    milliseconds: Sequence[int],
    *,
    deep: bool = False,
    sounds: Sequence[int] = (),
    aspect: Fraction = Fraction(1),
    ordered: bool = False,
) -> Path:
    """Write frames (n, h, w, 3), 8 bits or 16 for 10, at their own times, with a tone of each frequency as a track.

    `ordered` frames are stored as they are shown, so that two may have one time.
    """
    import av

    with av.open(str(path), "w") as container:
        video = container.add_stream("libx265" if deep else "libx264", rate=25)
        video.height, video.width = frames.shape[1:3]
        video.pix_fmt = "yuv420p10le" if deep else "yuv420p"
        video.codec_context.time_base = UNIT
        video.codec_context.sample_aspect_ratio = aspect
        video.options = {"crf": "4", **({"bf": "0"} if ordered else {})}
        if deep:
            params = (
                f"log-level=error:pools=none:master-display={MASTERING}:max-cll=1000,400:hdr10=1"
            )
            video.options = {"crf": "4", "x265-params": params}
            context = video.codec_context
            context.colorspace, context.color_primaries, context.color_trc, context.color_range = (
                9,
                9,
                16,
                1,
            )
        tracks = [container.add_stream("aac", rate=SOUND_RATE) for _ in sounds]
        for image, time in zip(frames, milliseconds, strict=True):
            frame = av.VideoFrame.from_ndarray(image, format="rgb48le" if deep else "rgb24")
            frame = frame.reformat(format=video.pix_fmt, dst_colorspace=9 if deep else 1)
            frame.pts, frame.time_base = time, UNIT
            if deep:
                frame.color_trc, frame.color_primaries, frame.colorspace = 16, 9, 9
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        for track, hertz in zip(tracks, sounds, strict=True):
            write_tone(container, track, hertz, (milliseconds[-1] + 100) / 1000)
    return path


def write_tone(container: Any, track: Any, hertz: int, seconds: float) -> None:
    """Encode a sine."""
    import av

    samples = np.arange(int(seconds * SOUND_RATE), dtype=np.float64)
    wave = (0.5 * np.sin(2 * np.pi * hertz * samples / SOUND_RATE)).astype(np.float32)
    for start in range(0, len(wave), 1024):
        frame = av.AudioFrame.from_ndarray(
            wave[None, start : start + 1024], format="fltp", layout="mono"
        )
        frame.sample_rate, frame.pts = SOUND_RATE, start
        container.mux(track.encode(frame))
    container.mux(track.encode(None))


def frame_times(path: Path) -> list[float]:
    """Return when frames are shown, by their packets."""
    import av

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        return sorted(float(one.pts * one.time_base) for one in container.demux(stream) if one.size)


def tones(path: Path) -> list[tuple[float, float]]:
    """Return each audio track's strongest frequency in hertz and its length in seconds."""
    import av

    found = []
    with av.open(str(path)) as container:
        count = len(container.streams.audio)
    for track in range(count):
        with av.open(str(path)) as container:
            wave = np.concatenate(
                [frame.to_ndarray()[0] for frame in container.decode(audio=track)]
            )
        middle = wave[len(wave) // 4 : len(wave) // 4 + 16_384]
        spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
        found.append((float(spectrum.argmax() * SOUND_RATE / len(middle)), len(wave) / SOUND_RATE))
    return found


def draw_texture(seed: int, height: int, width: int) -> np.ndarray:
    """Return a picture (h, w, 3) in [0, 1] of coarse and fine noise."""
    numbers = np.random.default_rng(seed)
    picture = np.zeros((height, width, 3))
    for cell, strength in ((16, 1.0), (8, 0.6), (4, 0.4)):
        grid = numbers.standard_normal((height // cell + 1, width // cell + 1, 3))
        picture += strength * grid.repeat(cell, 0).repeat(cell, 1)[:height, :width]
    return np.clip(0.5 + picture / 4, 0, 1)
