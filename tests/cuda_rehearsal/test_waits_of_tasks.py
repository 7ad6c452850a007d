"""No step makes the host wait for the device in tasks that no shipped config has; a line that does is named."""

import os
import shutil
from pathlib import Path

import pytest

from tests.cuda_rehearsal.programs import ROOT
from tests.cuda_rehearsal.test_shipped_configs import FURTHER, SMALL, waits_of_steps

PARTS = ROOT / "tests" / "outside_parts"
OUTSIDE = """
model: {model}
dataset: {dataset}
optimizer: {{name: adam, lr: 0.001}}
"""
DISCRIMINATORS = ("gan_power=0.1", "true_face_power=0.1", "gan_dims=4", "gan_patch_size=8")


def test_a_face_swap_with_both_discriminators_does_not_wait(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    words = (*FURTHER["saehd_demo"], *(f"model.{word}" for word in DISCRIMINATORS))
    assert not waits_of_steps("saehd_demo", SMALL["saehd_demo"], *words, "precision.mode=fp32")


def test_another_autoencoder_does_not_wait(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    found = waits_of_steps("vae", SMALL["vae"], "model.name=dvae")
    assert not found, found


@pytest.mark.parametrize(
    ("model", "dataset", "mode"),
    [("grid_net", "drawn_boxes", "amp"), ("decoder", "letters", "bf16")],
)
def test_parts_from_outside_of_the_package_do_not_wait(
    model: str, dataset: str, mode: str, tmp_path: Path
) -> None:
    """Not for the figures that they log either (`grid_net`, `find_boxes`)."""
    os.chdir(tmp_path)
    Path("config.yaml").write_text(OUTSIDE.format(model=model, dataset=dataset))
    found = waits_of_steps("config.yaml", 8, f"precision={mode}", "--parts", str(PARTS))
    assert not found, found


def test_figures_are_read_where_a_line_is_written_alone(tmp_path: Path) -> None:
    """A line at each step: there is one more wait a step for each figure, and none without lines."""
    os.chdir(tmp_path)
    Path("config.yaml").write_text(OUTSIDE.format(model="grid_net", dataset="drawn_boxes"))
    found = waits_of_steps(
        "config.yaml", 8, "precision=fp32", "--parts", str(PARTS), "train.log_every=1"
    )
    reads = {place: count for place, count in found.items() if "Progress.take_figures" in place}
    assert list(reads.values()) == [4 * 2], "four lines before the last, of two figures"


def test_a_wait_that_is_added_to_a_part_is_named_with_its_line(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    shutil.copytree(PARTS, "parts", ignore=shutil.ignore_patterns("__pycache__"))
    task = Path("parts/tasks/next_token.py")
    text = task.read_text()
    added = "        found = found if found.isfinite().all() else found.nan_to_num()\n"
    before = "        return found.unflatten("
    assert text.count(before) == 1
    task.write_text(text.replace(before, added + before))
    line = 1 + task.read_text().splitlines().index(added.rstrip("\n"))
    Path("config.yaml").write_text(OUTSIDE.format(model="decoder", dataset="letters"))
    (place,) = waits_of_steps("config.yaml", 8, "precision=bf16", "--parts", "parts")
    assert f"parts/tasks/next_token.py:{line} in NextToken.errors" in place
