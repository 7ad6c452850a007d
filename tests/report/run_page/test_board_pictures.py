"""Boards get drawings of each evaluation and, at the end, of the curves."""

import base64
import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from mpt.api import train
from mpt.config.load import load_config
from mpt.report.run_page.board_pictures import draw_evaluation, draw_samples

CONFIG = {
    "dataset": "digits",
    "model": {"name": "small_cnn", "features": 2},
    "train": {
        "steps": 4,
        "batch_size": 8,
        "evaluate_every": 2,
        "log_every": 2,
        "boards": ["wandb"],
    },
}
SECTION = {
    "step": 3,
    "section": {
        "title": "Boxes",
        "note": "",
        "table": {"head": ["class"], "rows": [["car"]]},
        "charts": [
            {
                "title": "precision by recall",
                "x": "r",
                "y": "p",
                "lines": [{"name": "car", "x": [0], "y": [1]}],
            }
        ],
        "matrix": {
            "title": "m",
            "names": ["car", "none"],
            "counts": [[3, 1], [2, 0]],
            "totals": [4, 2],
        },
    },
}


def test_a_board_gets_each_evaluation_and_the_curves_at_the_end(
    tmp_path: Path, monkeypatch
) -> None:
    taken: list[tuple[int, str, tuple[int, int]]] = []

    def log(data: dict[str, Any], step: int) -> None:
        taken.extend(
            (step, name, value) for name, value in data.items() if isinstance(value, tuple)
        )

    wandb: Any = ModuleType("wandb")
    wandb.__spec__ = importlib.util.spec_from_loader("wandb", None)
    wandb.init = lambda **_: SimpleNamespace(log=log, finish=lambda: None)
    wandb.Image, wandb.Settings = (
        lambda path: Image.open(io.BytesIO(Path(path).read_bytes())).size,
        SimpleNamespace,
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    train(load_config(CONFIG), runs=tmp_path)
    for step in (2, 4):
        names = {name for at, name, _ in taken if at == step and name.startswith("evaluation/")}
        assert names == {
            f"evaluation/{name}" for name in ("confusion", "calibration", "worst", "examples")
        }
    plots = {name: at for at, name, _ in taken if name.startswith("plots/")}
    assert plots["plots/losses"] == plots["plots/metric"] == 4
    assert all(width > 100 and height > 100 for _, _, (width, height) in taken)


def test_a_task_s_own_section_is_drawn_with_its_titles(tmp_path: Path) -> None:
    files = draw_evaluation(SECTION, tmp_path)
    assert set(files) == {"evaluation/confusion", "evaluation/precision by recall"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files.values())


@pytest.mark.parametrize(
    "details", [{}, {"classes": ["a"]}, {"step": 1, "section": {"charts": 3}}, {"section": None}]
)
def test_details_that_no_page_understands_give_no_picture(
    details: dict[str, Any], tmp_path: Path
) -> None:
    assert draw_evaluation(details, tmp_path) == {}


def test_samples_of_any_shape_and_script_are_on_one_sheet() -> None:
    def sample(size: tuple[int, int], label: str) -> dict[str, Any]:
        content = io.BytesIO()
        Image.new("L", size, 200).save(content, "PNG")
        picture = "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
        return {"picture": picture, "label": label, "truth": "b", "probability": 0.5}

    sheet = draw_samples(
        [sample((8, 8), "b"), sample((96, 3), "日本"), {**sample((1, 1), "c"), "picture": ""}]
    )
    with Image.open(io.BytesIO(sheet)) as image:
        assert image.size == (2 * 128, 128 + 28)
        assert image.getpixel((64, 64)) == (200, 200, 200)
        assert image.getpixel((128 + 64, 1)) == (200, 200, 200)
        assert image.getpixel((128 + 64, 60)) == (255, 255, 255)
    assert draw_samples([{"picture": ""}]) == b""
