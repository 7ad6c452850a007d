"""Sample grids on a page: strips of pictures stay legible, large grids are made smaller."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from mpt.report.run_page.pictures import embed

pytestmark = pytest.mark.tier("fast")


@pytest.mark.parametrize(
    ("size", "shown", "wide"),
    [
        ((1546, 196), (1438, 183), True),
        ((9000, 100), (1600, 18), True),
        ((1000, 1000), (512, 512), False),
        ((64, 64), (64, 64), False),
    ],
)
def test_a_picture_keeps_its_proportions_and_a_strip_gets_the_whole_width(
    tmp_path: Path, size: tuple[int, int], shown: tuple[int, int], wide: bool
) -> None:
    Image.new("RGB", size).save(tmp_path / "samples.png")
    picture = embed(tmp_path / "samples.png", "step 1")
    with Image.open(io.BytesIO(base64.b64decode(picture.source.partition(",")[2]))) as image:
        assert image.size == pytest.approx(shown, abs=2)
    assert picture.wide == wide
