"""XSeg trains as in DeepFaceLab, on polygons that were painted there, and its files go both ways."""

import dataclasses
import io
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mpt import cli
from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.engine.step.step import update
from mpt.errors import DataError
from mpt.systems.deepfacelab.data.faces.face_masks import Polygon
from mpt.systems.deepfacelab.data.faces.face_metadata import read_polygons
from mpt.systems.deepfacelab.data.faces.mask_faces import describe_masks
from mpt.systems.deepfacelab.data.labelled_faces import PaintedFaces, Settings, build, painted
from mpt.systems.deepfacelab.data.leras.leras_pickle import write_arrays
from mpt.systems.deepfacelab.nn.facelib.xseg import XSeg
from mpt.systems.deepfacelab.nn.weights.facelib_weights import (
    fill_network,
    key_of,
    network_arrays,
    to_torch,
)
from mpt.systems.deepfacelab.tasks import face_mask
from tests.systems.deepfacelab.formula_weights import fill
from tests.systems.deepfacelab.pixels import arrays, facts

FIXTURES = Path(__file__).parents[1] / "fixtures"
OWN = {
    "model": {"name": "xseg"},
    "dataset": {"name": "procedural_masks"},
    "precision": {"mode": "fp32"},
    "optimizer": {"name": "rmsprop_leras", "lr": 1e-4},
    "train": {"batch_size": 1},
}


def command(*words):
    """Run a command; return its exit code."""
    with pytest.raises(SystemExit) as done:
        cli.main([str(word) for word in words])
    return done.value.code or 0


def batch_of_fixture():
    stored = arrays("xseg")
    face = torch.from_numpy(
        stored["input_u8"].astype(np.float32).reshape(256, 256, 3) / 255
    ).permute(2, 0, 1)[None]
    mask = torch.from_numpy(stored["mask_u8"].reshape(1, 1, 256, 256) > 0).float()
    return {"face": face.flip(1).contiguous(), "mask": mask}


def test_a_step_has_deepfacelabs_loss_gradient_and_change():
    stored, listing = arrays("xseg"), facts("xseg")["listing"]
    run = build_run(load_config(OWN), torch.device("cpu"), describe_masks(256, 10))
    network = run.task.modules["xseg"]
    fill_network(
        network, {key: fill("XSeg", key, tuple(shape)) for key, shape in listing.items()}, "formula"
    ).train()
    before = {name: value.detach().clone() for name, value in network.named_parameters()}
    done = update(run, run.phases[0], batch_of_fixture())
    assert float(done.losses["loss"]) == pytest.approx(facts("xseg")["loss_step1"][0], abs=2e-5)
    for key in [key for key in stored if key.startswith("gradient_")]:
        name = key.removeprefix("gradient_")
        wanted = to_torch(stored[key]).reshape(before[name].shape)
        state = run.optimizers["xseg"].state[dict(network.named_parameters())[name]]["acc"]
        highest = float(wanted.abs().max())  # both sum 65,536 pixels in float32
        torch.testing.assert_close(
            state.sqrt() * 10**0.5, wanted.abs(), rtol=1e-2, atol=1e-2 * highest
        )
        moved = (before[name] - dict(network.named_parameters())[name].detach()).sign()
        large = wanted.abs() > 0.05 * wanted.abs().max()
        # against the gradient, everywhere: nothing was dropped
        assert (moved[large] == wanted.sign()[large]).all()


def test_masks_are_deepfacelabs_polygons():
    stored = arrays("xseg")
    files = build(
        Settings(src=str(FIXTURES / "wf_polygons.pak"), image_size=256), "test", 0
    ).faces.files
    assert all(file.polygons for file in files)
    file = files[0]
    polygons = (Polygon(True, stored["polygon_include"]), Polygon(False, stored["polygon_exclude"]))
    drawn = PaintedFaces([dataclasses.replace(file, polygons=polygons)], 256, "wf").load(0).mask
    np.testing.assert_array_equal(drawn > 0.5, stored["mask_u8"].reshape(256, 256) > 0)


def test_of_ten_faces_one_is_held_out_and_of_nine_none():
    file = build(
        Settings(src=str(FIXTURES / "wf_polygons.pak"), image_size=64), "test", 0
    ).faces.files[0]
    for count, wanted in ((10, (9, 1)), (9, (9, 9)), (25, (23, 2))):
        files = [dataclasses.replace(file, name=f"{number}.jpg") for number in range(count)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "mpt.systems.deepfacelab.data.labelled_faces.list_faces",
                lambda *_, files=files: files,
            )
            sides = [
                build(Settings(src="src", image_size=64), split, 0).faces.files
                for split in ("train", "test")
            ]
        assert tuple(map(len, sides)) == wanted
        assert count < 10 or not {one.name for one in sides[0]} & {one.name for one in sides[1]}


def test_an_applied_mask_is_inside_from_a_half_on():
    shades = np.repeat(np.array([[0, 126, 128, 255]], np.uint8), 4, 0)
    data = io.BytesIO()
    Image.fromarray(shades).save(data, "PNG")
    file = build(Settings(src=str(FIXTURES / "wf_xseg.pak"), image_size=64), "test", 0).faces.files[
        0
    ]
    mask = painted(
        dataclasses.replace(file, polygons=(), mask_path=None, xseg_mask=data.getvalue()), (4, 4)
    )
    assert mask.tolist() == [[0.0, 0.0, 1.0, 1.0]] * 4


def test_pretraining_compares_drawings_at_deepfacelabs_two_windows(monkeypatch):
    windows = []
    monkeypatch.setattr(
        face_mask, "dssim_at", lambda one, other, sizes: windows.append(sizes) or torch.zeros(2, 1)
    )
    face_mask.structure_error(torch.zeros(1, 1, 256, 256), torch.full((1, 1, 256, 256), 0.5))
    assert windows == [(22, 11)]  # resolution / 11.6 and / 23.2


def test_faces_without_masks_are_refused_and_samples_depend_on_their_number_alone(tmp_path):
    shutil.copy(FIXTURES / "full.jpg", tmp_path / "00000.jpg")
    with pytest.raises(DataError, match=r"none of the 1 faces .* has a mask; draw polygons"):
        build(Settings(src=str(tmp_path), face_type="f", image_size=64), "train", 0)
    data = build(Settings(src=str(FIXTURES / "wf_polygons.pak"), image_size=64), "train", 3)
    one, other = data.fetch([0, 1], 5), data.fetch([1], 5)
    assert torch.equal(one["face"][1], other["face"][0])
    assert not torch.equal(one["face"], data.fetch([0, 1], 6)["face"])
    assert set(one["mask"].unique().tolist()) <= {0.0, 1.0}
    assert one["face"].min() >= 0
    assert one["face"].max() <= 1


def model_folder(folder, iterations=7, face_type="wf"):
    """An XSeg as DeepFaceLab saves it."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    weights = network_arrays(XSeg().state_dict())
    state = {
        f"acc_XSeg/{key}".replace(":", "_") + ":0": np.abs(value) for key, value in weights.items()
    }
    for name, content in (
        ("256", weights),
        ("256_opt", {"iters:0": np.int64(iterations), **state}),
    ):
        with (folder / f"XSeg_{name}.npy").open("wb") as file:
            write_arrays(file, content)
    options = {"face_type": face_type, "pretrain": False, "batch_size": 2}
    data = {"iter": iterations, "options": options, "unknown": "kept"}
    data["loss_history"] = [[0.5] for _ in range(iterations)]
    (folder / "XSeg_data.dat").write_bytes(pickle.dumps(data | {"sample_for_preview": None}))
    return folder


def loaded(path):
    return pickle.loads(path.read_bytes())


def test_an_xseg_comes_from_deepfacelab_trains_and_goes_back(tmp_path, capsys):
    folder = model_folder(tmp_path / "model")
    assert command("deepfacelab", "leras-to-torch", folder, tmp_path / "run") == 0
    back = tmp_path / "back"
    assert command("deepfacelab", "torch-to-leras", tmp_path / "run", back) == 0
    for name in ("XSeg_256.npy", "XSeg_256_opt.npy"):
        ours, theirs = loaded(back / name), loaded(folder / name)
        assert list(ours) == list(theirs)
        assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)
    assert loaded(back / "XSeg_data.dat") == loaded(folder / "XSeg_data.dat")
    words = [
        "dataset.dst=null",
        f"dataset.src={FIXTURES / 'wf_polygons.pak'}",
        "train.steps=8",
        "train.batch_size=1",
        "train.log_every=1",
    ]
    assert (
        command("train", tmp_path / "run" / "config.yaml", "--resume", tmp_path / "run", *words)
        == 0
    )
    capsys.readouterr()
    assert command("deepfacelab", "torch-to-leras", tmp_path / "run", back) == 0
    content = loaded(back / "XSeg_data.dat")
    assert (content["iter"], content["unknown"]) == (8, "kept")
    assert len(content["loss_history"]) == 8
    assert len(content["loss_history"][-1]) == 1
    state = loaded(back / "XSeg_256_opt.npy")
    assert int(state["iters:0"]) == 8
    before, after = (loaded(place / "XSeg_256.npy") for place in (folder, back))
    moved = [key for key in before if (before[key] != after[key]).any()]
    assert len(moved) > 150  # of 222, by a third of the weights each: lr_dropout
    backup = back / "XSeg_autobackups" / "01"
    assert loaded(backup / "XSeg_data.dat")["iter"] == 7
    # The one that is further trained is not replaced unasked.
    assert command("deepfacelab", "leras-to-torch", folder, tmp_path / "old") == 0
    assert command("deepfacelab", "torch-to-leras", tmp_path / "old", back) != 0
    assert "at iteration 8, which is later than this run's 7" in capsys.readouterr().err
    # Masks of the run, into faces and for the merger.
    faces = tmp_path / "faces"
    faces.mkdir()
    shutil.copy(FIXTURES / "wf_polygons.jpg", faces)
    assert (
        command("deepfacelab", "xseg-apply", faces, "--xseg", tmp_path / "run", "--device", "cpu")
        == 0
    )
    assert command("deepfacelab", "xseg-apply", faces, "--xseg", folder, "--device", "cpu") == 0
    assert (
        command(
            "deepfacelab", "xseg-apply", faces, "--xseg", tmp_path / "nothing", "--device", "cpu"
        )
        != 0
    )


def test_names_of_weights_are_deepfacelabs():
    assert [key_of(name) for name in XSeg().state_dict()] == list(facts("xseg")["listing"])


def test_excluding_polygons_are_laid_over_including_ones_whichever_was_drawn_first():
    square = [[0, 0], [9, 0], [9, 9], [0, 9]]
    found = read_polygons([{"type": 0, "pts": square}, {"type": 1, "pts": square}], "face")
    assert [polygon.includes for polygon in found] == [True, False]
