"""Picture files come out upright, whatever way the camera was held."""

import numpy
import pytest
import torch
from PIL import ExifTags, Image, PngImagePlugin

from mpt.data.pictures import decoding
from mpt.data.pictures.decoding import decode_bytes, upright_size

WIDTH, HEIGHT = 48, 32


def upright_picture() -> Image.Image:
    """A picture whose corners differ, in blocks of 16 pixels, so that JPEG keeps them apart."""
    pixels = numpy.full((HEIGHT, WIDTH, 3), 128, numpy.uint8)
    pixels[:16, :16], pixels[:16, -16:], pixels[-16:, :16] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    return Image.fromarray(pixels)


def save_turned(path, orientation: int) -> None:
    """Write the picture as a camera held in one of eight ways does: turned, with the way back in its EXIF data."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    back = decoding.TURNS.get(orientation)
    inverse = {
        Image.Transpose.ROTATE_90: Image.Transpose.ROTATE_270,
        Image.Transpose.ROTATE_270: Image.Transpose.ROTATE_90,
    }
    picture = upright_picture()
    picture = picture if back is None else picture.transpose(inverse.get(back, back))
    picture.save(path, exif=exif, **({"lossless": True} if path.suffix == ".webp" else {}))


@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_come_out_upright(tmp_path, kind, orientation):
    path = tmp_path / f"a.{kind}"
    save_turned(path, orientation)
    found = decode_bytes(path, 3, None, 10_000)
    wanted = torch.from_numpy(numpy.array(upright_picture())).permute(2, 0, 1)
    assert found.shape == wanted.shape
    assert (found.float() - wanted.float()).abs().mean() < 6  # JPEG blurs the blocks' edges
    assert upright_size(path) == (WIDTH, HEIGHT)


@pytest.mark.parametrize("orientation", [1, 6])
def test_opencv_turns_pictures_the_same_way(tmp_path, orientation):
    cv2 = pytest.importorskip("cv2")
    save_turned(tmp_path / "a.jpg", orientation)
    theirs = torch.from_numpy(cv2.imread(str(tmp_path / "a.jpg"))[..., ::-1].copy()).permute(
        2, 0, 1
    )
    assert torch.equal(decode_bytes(tmp_path / "a.jpg", 3, None, 10_000), theirs)


@pytest.mark.parametrize("has_simplejpeg", [True, False])
def test_a_turned_jpeg_is_reduced_by_its_upright_proportions(tmp_path, monkeypatch, has_simplejpeg):
    if not has_simplejpeg:
        monkeypatch.setattr(decoding, "jpeg_decoder", lambda: None)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    upright_picture().resize((480, 320)).transpose(Image.Transpose.ROTATE_90).save(
        tmp_path / "a.jpg", exif=exif
    )
    wanted = decode_bytes(tmp_path / "a.jpg", 3, (32, 48), 10**6, "letterbox").float()
    for size, fit in (((32, 48), "letterbox"), ((160, 240), "crop")):
        wanted = decode_bytes(tmp_path / "a.jpg", 3, size, 10**6, fit).float()
        found = decode_bytes(tmp_path / "a.jpg", 3, size, 10**6, fit, reduces=True).float()
        assert found.shape == (3, *size)
        assert (found - wanted).abs().mean() < 6


def test_what_is_cut_is_cut_from_the_upright_picture(tmp_path):
    save_turned(tmp_path / "a.png", 6)
    found = decode_bytes(
        tmp_path / "a.png",
        3,
        None,
        10_000,
        choose_cut=lambda width, height: (width - 16, 0, width, 16),
    )
    assert found.float().mean((1, 2)).tolist() == [0, 255, 0]


def test_orientation_after_the_pixels_of_a_png_counts_too(tmp_path):
    save_turned(tmp_path / "a.png", 6)
    with Image.open(tmp_path / "a.png") as image:
        exif = image.info["exif"]
    plain = tmp_path / "plain.png"
    with Image.open(tmp_path / "a.png") as image:
        Image.fromarray(numpy.array(image)).save(plain)
    content = plain.read_bytes()
    end = content.rindex(b"IEND") - 4
    body = exif.removeprefix(b"Exif\0\0")
    with (tmp_path / "late.png").open("wb") as file:
        file.write(content[:end])
        PngImagePlugin.putchunk(file, b"eXIf", body)
        file.write(content[end:])
    assert upright_size(plain) == (HEIGHT, WIDTH)
    assert upright_size(tmp_path / "late.png") == (WIDTH, HEIGHT)
    assert decode_bytes(tmp_path / "late.png", 3, None, 10_000).shape == (3, HEIGHT, WIDTH)


def test_exif_data_that_cannot_be_read_turn_nothing(tmp_path):
    for number, damaged in enumerate(
        (b"Exif\0\0MM", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0nothing")
    ):
        upright_picture().save(tmp_path / f"{number}.jpg", exif=damaged)
        assert decode_bytes(tmp_path / f"{number}.jpg", 3, None, 10_000).shape == (3, HEIGHT, WIDTH)
