"""`mpt dain interpolate` as a user types it."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from mpt.cli import main
from mpt.config.load import load_config
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.state.evaluation import inferring
from mpt.engine.state.state import capture
from mpt.run.checkpoints import checkpoint
from mpt.run.records.layout import create_run
from mpt.seams import Run
from mpt.systems.dain.commands import interpolate as command
from mpt.systems.dain.inference.memory import PassMemory
from mpt.systems.dain.inference.tiles import tiled


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return make_runs(tmp_path)


def make_runs(tmp_path: Path, mode: str = "fp32") -> Path:
    """Return a folder with a run whose network is not trained, and make three pictures beside it."""
    config = load_config({
        "model": {"name": "flow_warp", "pyramid": [4, 8, 8]},
        "dataset": {"name": "procedural_triplets", "count": 2, "test_count": 2},
        "precision": {"mode": mode},
        "train": {"batch_size": 2, "steps": 1},
        "name": "smooth",
    })  # fmt: skip
    run = build_run(config, torch.device("cpu"), build_datasets(config)[0].spec)
    directory = create_run(tmp_path / "runs", config.run_name)
    directory.config_path.write_text(config.to_yaml())
    checkpoint.save(directory, 1, {**capture(run), "loop": {"step": 1}}, keep_last=1)
    for number in range(3):
        Image.new("RGB", (80, 48), (40 * number,) * 3).save(tmp_path / f"{number}.png")
    return tmp_path / "runs"


def type_in(*words: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return int(left.value.code or 0)


def test_pictures_become_more_pictures_in_half_and_in_tiles(runs, tmp_path, capsys):
    out = tmp_path / "out"
    words = [
        "smooth",
        *sorted(tmp_path.glob("?.png")),
        "--output",
        out,
        "--runs",
        runs,
        "--scene-cut",
        0,
    ]
    assert type_in("dain", "interpolate", *words, "--half", "--tile", 72, "--check-seams") == 0
    said = capsys.readouterr().out
    assert "half against float32 on the first pair: PSNR" in said
    assert "tiles against the whole frame" in said
    assert "where tiles overlap they differ by 0.00 grey levels on average" in said
    assert "3 frames of 80 x 48 at 25 -> 6 at 50 frames per second" in said
    levels = [Image.open(file).getpixel((9, 9))[0] for file in sorted(out.iterdir())]
    assert levels == [0, 20, 40, 60, 80, 80]


def test_half_is_compared_with_float32_where_the_run_was_trained_in_half(tmp_path, monkeypatch):
    runs = make_runs(tmp_path, "bf16")
    modes = []

    def noting(run: Run) -> AbstractContextManager[None]:
        modes.append(run.config.precision.mode)
        return inferring(run)

    monkeypatch.setattr(command, "inferring", noting)
    words = [
        "smooth",
        *sorted(tmp_path.glob("?.png")),
        "--output",
        tmp_path / "out",
        "--runs",
        runs,
    ]
    assert type_in("dain", "interpolate", *words, "--half") == 0
    assert modes == ["amp", "fp32", "amp"]


def test_mpt_infer_of_a_folder_of_frames_is_the_same_command(runs, tmp_path, capsys):
    frames = tmp_path / "frames"
    frames.mkdir()
    for number in range(3):
        (tmp_path / f"{number}.png").rename(frames / f"{number}.png")
    words = ["infer", "smooth", "--input", frames, "--runs", runs]
    assert type_in(*words) == 2
    assert "add -o PATH" in capsys.readouterr().err
    assert type_in(*words, "-o", tmp_path / "out", "--top", 3) == 2
    assert "--top: these inputs are for `mpt dain interpolate`" in capsys.readouterr().err
    assert type_in(*words, "-o", tmp_path / "out", "--half", "--factor", 4, "--batch-size", 2) == 0
    said = capsys.readouterr().out
    assert "these inputs are for `mpt dain interpolate`" in said
    assert "half against float32 on the first pair: PSNR" in said
    assert len(list((tmp_path / "out").iterdir())) == 12


def test_mpt_infer_makes_frames_between_two_pictures_and_refuses_a_factor_for_named_ones(
    runs, tmp_path, capsys
):
    first, last, out = tmp_path / "0.png", tmp_path / "2.png", tmp_path / "out"
    words = ["infer", "smooth", "--runs", runs, "-o", out, "--rate", 75]
    assert type_in(*words, "--input", f"first={first}", "--input", f"last={last}") == 2
    assert (
        "--rate: goes with a run and inputs that are for `mpt dain interpolate`"
        in capsys.readouterr().err
    )
    assert type_in(*words, "--input", first, "--input", last) == 0
    assert len(list(out.iterdir())) == 6


def test_a_gap_in_the_numbering_is_refused_with_the_option_that_takes_it(runs, tmp_path, capsys):
    frames = tmp_path / "frames"
    frames.mkdir()
    for number in (0, 2):
        (tmp_path / f"{number}.png").rename(frames / f"{number}.png")
    words = ["infer", "smooth", "--input", frames, "--runs", runs, "-o", tmp_path / "out"]
    assert type_in(*words) == 3
    assert "0.png to 2.png: 1 missing. Add the missing ones, renumber" in (
        said := capsys.readouterr().err
    )
    assert "with --allow-gaps" in said
    assert type_in(*words, "--allow-gaps") == 0
    assert len(list((tmp_path / "out").iterdir())) == 4
    pair = ["--input", f"first={frames / '0.png'}", "--input", f"last={frames / '2.png'}"]
    assert type_in("infer", "smooth", *pair, "--runs", runs, "--allow-gaps") == 2
    assert (
        "--allow-gaps: goes with a run and inputs that are for `mpt dain interpolate`"
        in capsys.readouterr().err
    )


def test_half_and_float32_are_compared_in_tiles_with_which_float32_fits(
    runs, tmp_path, monkeypatch
):
    grids = []

    def noting(*arguments: Any) -> Tensor:
        grids.append(arguments[4])
        return tiled(*arguments)

    monkeypatch.setattr(command, "tiled", noting)
    monkeypatch.setattr(
        command, "pass_memory", lambda net, dtype=None, times=1: PassMemory(0, 1 if dtype else 2)
    )
    Image.new("RGB", (80, 480)).save(tmp_path / "0.png")
    Image.new("RGB", (80, 480)).save(tmp_path / "1.png")
    words = [
        "smooth",
        tmp_path / "0.png",
        tmp_path / "1.png",
        "--output",
        tmp_path / "out",
        "--runs",
        runs,
    ]
    monkeypatch.setattr(command, "parse_budget", lambda text: 50_000)
    assert type_in("dain", "interpolate", *words, "--half", "--vram", "50kB") == 0
    assert [grid.count for grid in grids] == [3, 3]  # half alone fits in one


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        (["--factor", "1"], 2, "--factor: found 1; allowed is 2 to 64"),
        (["--rate", "10"], 2, "--rate: 10 is below the input's 25"),
        (["--tile", "50"], 2, "--tile: found 50; allowed are multiples of 8 from 72"),
        (["--vram", "1MiB"], 2, "--vram: '1MiB' is 1048576 bytes"),
        (["--dtype", "float16"], 2, "--dtype goes with --half"),
        (["--output", "o.webm"], 2, "--output: .webm files are not written; allowed are .mp4,"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_written(
    runs, tmp_path, capsys, changes, code, words
):
    pictures = sorted(tmp_path.glob("?.png"))
    assert (
        type_in(
            "dain",
            "interpolate",
            "smooth",
            *pictures,
            "--output",
            tmp_path / "o",
            "--runs",
            runs,
            *changes,
        )
        == code
    )
    assert words in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_what_is_there_is_written_over_only_where_that_is_asked_for(runs, tmp_path, capsys):
    words = ["dain", "interpolate", "smooth", *sorted(tmp_path.glob("?.png")), "--runs", runs]
    film, folder = tmp_path / "o.mp4", tmp_path / "out"
    film.touch()
    folder.mkdir()
    (folder / "frame-000009.png").touch()
    assert type_in(*words, "--output", film) == 2
    assert (
        f"{film} is there already; write elsewhere, or add --overwrite" in capsys.readouterr().err
    )
    assert type_in(*words, "--output", folder) == 2
    assert "were made from another input" in capsys.readouterr().err
    assert type_in(*words, "--output", folder, "--overwrite") == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        f"frame-{number:06d}.png" for number in range(6)
    ]
    assert type_in(*words, "--output", tmp_path, "--overwrite") == 2
    assert "holds the input" in capsys.readouterr().err


def test_one_picture_is_an_error_of_the_data(runs, tmp_path, capsys):
    assert (
        type_in(
            "dain",
            "interpolate",
            "smooth",
            tmp_path / "0.png",
            "--output",
            tmp_path / "o",
            "--runs",
            runs,
        )
        == 3
    )
    assert "one picture; two or more" in capsys.readouterr().err
