"""Deep pixels become 8 bits by a range that somebody chose, and keep their differences."""

import numpy
import pytest
import torch
from PIL import ExifTags, Image

from mpt.data.pictures.counts import Levels, read_counts, read_grey
from mpt.data.pictures.decoding import TURNS, BadImageError
from mpt.errors import ConfigError

LOW, HIGH = 3000, 4275
"""Of a thermal camera that writes counts of 40 mK."""


def counts(dtype: type = numpy.uint16) -> numpy.ndarray:
    return numpy.linspace(LOW, HIGH, 24 * 40).reshape(24, 40).astype(dtype)


def grey(path, levels: Levels) -> numpy.ndarray:
    return numpy.asarray(read_grey(path, 10_000, levels))


def save(path, pixels: numpy.ndarray):
    Image.fromarray(pixels).save(path)
    return path


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize(
    ("levels", "low", "high"),
    [
        (Levels((LOW, HIGH)), LOW, HIGH),
        (Levels((2000.0, 6000.0)), 2000, 6000),
        (Levels("picture"), LOW, HIGH),
        (Levels("percentile", (10.0, 90.0)), LOW + 127.5, HIGH - 127.5),
    ],
    ids=str,
)
def test_counts_of_16_bits_fill_the_range_that_was_chosen(tmp_path, suffix, levels, low, high):
    path = save(tmp_path / f"a.{suffix}", counts())
    wanted = ((counts().astype(float) - low) / (high - low) * 255).clip(0, 255)
    assert numpy.abs(grey(path, levels) - wanted).max() <= 1


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_deep_pixels_without_a_range_are_refused_with_their_numbers(tmp_path, suffix):
    path = save(tmp_path / f"a.{suffix}", counts())
    with pytest.raises(
        ConfigError, match=r"16-bit whole numbers from 3000 to 4275, most .* dataset\.ir_range"
    ):
        grey(path, Levels())
    assert (grey(path, Levels("full")) == counts() >> 8).all()


@pytest.mark.parametrize("dtype", [numpy.float32, numpy.int32])
def test_kelvins_and_whole_numbers_of_32_bits_are_read(tmp_path, dtype):
    path = save(tmp_path / "a.tif", counts(dtype) - 5000)
    wanted = (counts().astype(float) - LOW) / (HIGH - LOW) * 255
    assert numpy.abs(grey(path, Levels((LOW - 5000, HIGH - 5000))) - wanted).max() <= 1
    with pytest.raises(ConfigError, match="-2000 to -725"):
        grey(path, Levels())
    with pytest.raises(BadImageError, match="=full is for 16 bits and for floats from 0 to 1"):
        grey(path, Levels("full"))


def test_floats_from_0_to_1_and_8_bits_need_no_range(tmp_path):
    ramp = numpy.arange(256, dtype=numpy.uint8).reshape(16, 16)
    assert (grey(save(tmp_path / "a.tif", ramp / numpy.float32(255)), Levels()) == ramp).all()
    assert (grey(save(tmp_path / "a.png", ramp), Levels()) == ramp).all()
    stretched = grey(save(tmp_path / "a.png", ramp // 4 + 9), Levels("picture"))
    assert numpy.abs(stretched - ramp // 4 * (255 / 63)).max() <= 0.5


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("dtype", [numpy.uint16, numpy.float32])
def test_several_deep_channels_keep_their_depth(tmp_path, suffix, channels, dtype):
    cv2 = pytest.importorskip("cv2")
    if dtype == numpy.float32 and suffix == "png":
        pytest.skip("PNG holds no floats")
    path = tmp_path / f"a.{suffix}"
    pixels = numpy.repeat(counts(dtype)[..., None], channels, 2)
    assert cv2.imwrite(str(path), pixels)
    found = read_counts(path, 10_000)
    assert found.dtype == dtype
    assert numpy.abs(found - counts(dtype).astype(float)).max() <= 1
    assert len(numpy.unique(grey(path, Levels((LOW, HIGH))))) > 200


def test_deep_colour_needs_opencv_and_says_so(tmp_path, monkeypatch):
    cv2 = pytest.importorskip("cv2")
    cv2.imwrite(str(tmp_path / "a.png"), numpy.repeat(counts()[..., None], 3, 2))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadImageError, match="pip install opencv-python-headless"):
        read_counts(tmp_path / "a.png", 10_000)


def test_a_tif_of_two_channels_is_refused_and_not_reduced_to_8_bits(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    pytest.importorskip("cv2")
    pixels = numpy.full((8, 9, 2), 3000, numpy.uint16)
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="minisblack", planarconfig="contig")
    with pytest.raises(BadImageError, match="not a picture of 1, 3 or 4 channels"):
        read_counts(tmp_path / "a.tif", 10_000)


@pytest.mark.parametrize("orientation", range(2, 9))
@pytest.mark.parametrize("channels", [1, 3])
def test_deep_pictures_are_turned_upright_too(tmp_path, orientation, channels):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    path = tmp_path / "a.png"
    if channels == 1:
        Image.fromarray(counts()).save(path, exif=exif)
    else:
        cv2 = pytest.importorskip("cv2")
        cv2.imwrite(str(path), numpy.repeat(counts()[..., None], 3, 2))
        content = path.read_bytes()
        chunk = tmp_path / "chunk.png"
        Image.new("L", (1, 1)).save(chunk, exif=exif)
        body = chunk.read_bytes()
        start = body.index(b"eXIf") - 4
        length = int.from_bytes(body[start : start + 4], "big") + 12
        path.write_bytes(content[:33] + body[start : start + length] + content[33:])
    wanted = numpy.asarray(
        Image.fromarray(counts().astype(numpy.int32)).transpose(TURNS[orientation])
    )
    assert (read_counts(path, 10_000) == wanted).all()


@pytest.mark.parametrize(
    ("pixels", "said"),
    [
        (
            numpy.full((4, 4), 60_000, numpy.uint16),
            r"its pixels from 60000 to 60000 lie outside of dataset\.ir_range",
        ),
        (numpy.full((4, 4), numpy.nan, numpy.float32), "no finite numbers"),
    ],
)
def test_what_a_fixed_range_cannot_hold_is_a_bad_file(tmp_path, pixels, said):
    with pytest.raises(BadImageError, match=said):
        grey(save(tmp_path / "a.tif", pixels), Levels((LOW, HIGH)))


def test_a_picture_of_one_number_is_black(tmp_path):
    path = save(tmp_path / "a.png", numpy.full((4, 4), 3000, numpy.uint16))
    assert not torch.from_numpy(grey(path, Levels("picture")).copy()).any()
