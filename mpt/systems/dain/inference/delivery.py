"""How the output is paced and what goes along with it: decided, and said, before the first frame is made."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from mpt.data.video.properties import Colour
from mpt.data.video.tracks import lost_tracks
from mpt.data.video.video import is_video
from mpt.errors import ConfigError
from mpt.systems.dain.inference.output import Film
from mpt.systems.dain.inference.source import FrameStream
from mpt.systems.dain.inference.timeline import HIGHEST_FACTOR, Pace

SLOWEST = 64
SOUND = ("stretch", "drop")


def choose_pace(source: FrameStream, factor: int | None, rate: float | None, slow: float) -> Pace:
    """Return how many output frames there are. Raises ConfigError for anything that is out of range.

    A video that is given another `rate` than its own is slowed down by their ratio too, and so is its sound.
    """
    if not 1 <= slow <= SLOWEST:
        raise ConfigError(f"--slow: found {slow:g}; allowed is 1 to {SLOWEST}")
    if factor is not None and not 2 <= factor <= HIGHEST_FACTOR:
        raise ConfigError(f"--factor: found {factor}; allowed is 2 to {HIGHEST_FACTOR}")
    slowed = Fraction(slow).limit_denominator(1000)
    if rate is None:
        usual = int(slowed) if slowed.denominator == 1 and slowed > 1 else 2
        return Pace(factor or usual, None, slowed)
    target = Fraction(rate).limit_denominator(100_000)
    least = source.rate / slowed
    if target < least:
        raise ConfigError(
            f"--rate: {rate:g} is below the input's {float(least):g} frames per second"
        )
    if target > least * HIGHEST_FACTOR:
        raise ConfigError(f"--rate: {rate:g} exceeds {HIGHEST_FACTOR} times the input's")
    return Pace(2, target, slowed)


def sound_factor(source: FrameStream, pace: Pace) -> Fraction:
    """Return how many times as long the output is as the input's own tracks."""
    given = source.own_rate / source.rate if source.own_rate is not None else Fraction(1)
    return pace.slow * given


def output_rate(source: FrameStream, pace: Pace) -> Fraction:
    """Return the output's frames per second, on average where they are uneven."""
    return pace.rate or source.rate * pace.factor / pace.slow


def choose_film(source: FrameStream, pace: Pace, output: Path, sound: str | None) -> Film:
    """Return how a video is written, and print what becomes of its sound and what is lost. Raises ConfigError."""
    slow = sound_factor(source, pace)
    audio = source.properties.audio if source.properties is not None else ()
    check_sound(sound, slow, has_sound=bool(audio))
    keeps_sound, timed = sound != "drop", not source.is_even and pace.rate is None
    if is_video(output) and source.video is not None:
        lost = [f"sound ({', '.join(audio)})"] if audio and not keeps_sound else []
        lost += lost_chroma(source)
        lost += lost_tracks(source.video, output.suffix.lower(), slow, keeps_sound)
        if audio and slow != 1 and keeps_sound:
            print(
                f"sound: made {float(slow):g} times as long with its pitch kept, encoded as AAC (--sound drop: none)"
            )
    else:
        lost = ["sound: a folder of pictures has none"] if audio else []
    if source.colour.aspect != 1 and not is_video(output):
        lost.append(
            f"the shape of pixels, {source.colour.aspect.numerator}:{source.colour.aspect.denominator}"
        )
    if timed and not is_video(output):
        lost.append("frame times, which are uneven: pictures have none")
    lost = [*source.not_kept(), *lost]
    if lost:
        print(f"not kept: {'; '.join(lost)}")
    tracks = source.video if source.has_tracks else None
    colour: Colour = source.colour
    return Film(output_rate(source, pace), timed, colour, tracks, slow, keeps_sound)


def lost_chroma(source: FrameStream) -> list[str]:
    """Return a video's finer colour in words, if it is halved in the output; of odd sides it is stored whole."""
    chroma = source.properties.chroma if source.properties is not None else None
    is_whole = source.height % 2 or source.width % 2
    return [f"{chroma} becomes 4:2:0: colour at half the size"] if chroma and not is_whole else []


def check_sound(sound: str | None, slow: Fraction, *, has_sound: bool) -> None:
    """Raise ConfigError for a wish about sound that cannot be met."""
    if sound is not None and sound not in SOUND:
        raise ConfigError(f"--sound: found {sound!r}; allowed are {' and '.join(SOUND)}")
    if slow == 1 and sound == "stretch":
        raise ConfigError(
            "--sound: nothing is slowed down, so sound is copied as it is; leave it out, or write drop"
        )
    if slow < 1 and sound is None and has_sound:
        raise ConfigError(
            "--input-rate: it is above the video's own rate; its sound is not sped up: add --sound drop"
        )
