"""Grids of pictures: every tile where it belongs, with the channels that a model may make."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from mpt.data.pictures.images import SMALLEST_TILE, grid_of, write_grid
from mpt.errors import InputOutputError

pytestmark = pytest.mark.tier("fast")


@pytest.mark.parametrize(("channels", "mode"), [(1, "RGB"), (3, "RGB"), (4, "RGBA")])
def test_tiles_of_any_channels_stand_in_rows(channels: int, mode: str) -> None:
    values = torch.linspace(0, 1, 5)
    tiles = values.view(5, 1, 1, 1).expand(5, channels, 8, 8)
    grid = grid_of(tiles, columns=3)
    cell = SMALLEST_TILE + 2
    assert (grid.mode, grid.size) == (mode, (3 * cell + 2, 2 * cell + 2))
    for index, value in enumerate(values):
        middle = (cell * (index % 3) + cell // 2, cell * (index // 3) + cell // 2)
        assert grid.getpixel(middle) == (round(value.item() * 255),) * len(mode)


def test_a_grid_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputOutputError, match="cannot write the picture"):
        write_grid(torch.zeros(1, 1, 4, 4), tmp_path / "file" / "grid.png")


def test_a_written_grid_is_a_picture(tmp_path: Path) -> None:
    write_grid(torch.rand(2, 4, 4, 4), tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as image:
        assert image.mode == "RGBA"


def test_a_link_planted_for_the_folder_or_the_picture_is_not_written_through(
    tmp_path: Path,
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious.png").write_text("x")
    (tmp_path / "samples").symlink_to(elsewhere)
    with pytest.raises(InputOutputError, match="symbolic link"):
        write_grid(torch.zeros(1, 1, 4, 4), tmp_path / "samples" / "grid.png", follow_folder=False)
    (tmp_path / "grid.png").symlink_to(elsewhere / "precious.png")
    write_grid(torch.zeros(1, 1, 4, 4), tmp_path / "grid.png", follow_folder=False)
    assert [(path.name, path.read_text()) for path in elsewhere.iterdir()] == [
        ("precious.png", "x")
    ]
    assert not (tmp_path / "grid.png").is_symlink()
