import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from mpt import cli
from mpt.config.load import load_config
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.state.state import capture, restore
from mpt.engine.step.step import update
from mpt.errors import CheckpointError, ConfigError
from mpt.run.checkpoints import checkpoint
from mpt.run.records.layout import RunDirectory, create_run
from mpt.systems.deepfacelab.commands.shared import convert_leras, return_leras
from mpt.systems.deepfacelab.commands.shared.convert_leras import leras_to_torch
from mpt.systems.deepfacelab.commands.shared.return_leras import torch_to_leras
from mpt.systems.deepfacelab.data.leras.model_data import QUICK96
from tests.systems.deepfacelab.data.face_makers import folder as write_folder

TINY = {"name": "saehd", "image_size": 64, "ae_dims": 6, "e_dims": 4, "d_dims": 4, "d_mask_dims": 2}


def config_of(optimizer="adabelief", **model):
    return load_config(
        {
            "model": {**TINY, "archi": "df-ud", **model},
            "dataset": {"name": "procedural_faces", "count": 4, "test_count": 2},
            "optimizer": {"name": optimizer},
            "precision": {"mode": "fp32"},
            "train": {"batch_size": 2, "steps": 2},
        }
    )


def train(tmp_path, config, steps=2):
    """A run directory after a few steps, as the loop would leave it."""
    data, _ = build_datasets(config)
    run = build_run(config, torch.device("cpu"), data.spec)
    for step in range(steps):
        for phase in run.phases:
            update(run, phase, data.fetch([0, 1], step))
    directory = create_run(tmp_path / "runs", "trained")
    directory.config_path.write_text(config.to_yaml())
    checkpoint.save(directory, steps, capture(run), keep_last=1)
    return directory


def flatten(value, path=""):
    if isinstance(value, dict):
        return {
            k: v for key, item in value.items() for k, v in flatten(item, f"{path}/{key}").items()
        }
    if isinstance(value, list | tuple):
        return {
            k: v
            for key, item in enumerate(value)
            for k, v in flatten(item, f"{path}/{key}").items()
        }
    return {path: value}


@pytest.mark.parametrize(
    ("optimizer", "model"),
    [
        (
            "adabelief",
            {"true_face_power": 0.01, "gan_power": 0.1, "gan_patch_size": 8, "gan_dims": 4},
        ),
        ("rmsprop_leras", {"archi": "liae-udt"}),
    ],
)
def test_a_run_goes_to_deepfacelab_and_comes_back_bit_for_bit(tmp_path, optimizer, model):
    config = config_of(optimizer, **model)
    directory = train(tmp_path, config)
    folder = torch_to_leras(str(directory.path), tmp_path / "dfl")
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    back = leras_to_torch(folder, tmp_path / "runs" / "back", config=tmp_path / "config.yaml")
    first, second = (checkpoint.load(RunDirectory(path)).state for path in (directory.path, back))
    for part in ("modules", "optimizers"):
        one, two = flatten(first[part]), flatten(second[part])
        assert set(one) == set(two)
        for key, value in one.items():
            assert (
                torch.equal(value, two[key])
                if isinstance(value, torch.Tensor)
                else value == two[key]
            ), key
    assert checkpoint.load(RunDirectory(back)).step == 2


def test_files_and_options_are_those_that_deepfacelab_loads(tmp_path):
    directory = train(tmp_path, config_of(true_face_power=0.01))
    folder = torch_to_leras(str(directory.path), tmp_path / "dfl", name="faces_SAEHD")
    parts = [
        "encoder",
        "inter",
        "decoder_src",
        "decoder_dst",
        "code_discriminator",
        "src_dst_opt",
        "D_code_opt",
    ]
    assert {path.name for path in folder.iterdir()} == {
        f"faces_SAEHD_{part}.npy" for part in parts
    } | {
        "faces_SAEHD_data.dat",
        "faces_SAEHD_summary.txt",
    }
    for path in folder.glob("*.npy"):
        arrays = pickle.loads(path.read_bytes())
        assert path.read_bytes()[:2] == b"\x80\x04"
        assert {array.dtype for key, array in arrays.items() if key != "iters:0"} == {
            np.dtype("<f4")
        }
    optimizer = pickle.loads((folder / "faces_SAEHD_D_code_opt.npy").read_bytes())
    assert {"iters:0", "ms_dis/convs_0/weight_0:0", "vs_dis/out_conv/bias_0:0"} <= set(optimizer)
    assert optimizer["iters:0"] == 2
    options = pickle.loads((folder / "faces_SAEHD_data.dat").read_bytes())
    assert options["iter"] == 2
    assert (options["options"]["resolution"], options["options"]["archi"]) == (64, "df-ud")


OPTIONS = {
    "resolution": np.int64(64),
    "face_type": "wf",
    "models_opt_on_gpu": False,
    "archi": "df-ud",
    "ae_dims": np.int64(6),
    "e_dims": np.int64(4),
    "d_dims": np.int64(4),
    "d_mask_dims": np.int64(2),
    "masked_training": True,
    "eyes_mouth_prio": True,
    "uniform_yaw": False,
    "blur_out_mask": False,
    "adabelief": True,
    "lr_dropout": "cpu",
    "random_warp": False,
    "random_hsv_power": np.float64(0.0),
    "true_face_power": np.float64(0.01),
    "face_style_power": np.float64(0.0),
    "bg_style_power": np.float64(0.0),
    "ct_mode": "none",
    "clipgrad": True,
    "pretrain": False,
    "autobackup_hour": 2,
    "write_preview_history": False,
    "target_iter": 0,
    "random_src_flip": False,
    "random_dst_flip": True,
    "batch_size": 2,
    "gan_power": np.float64(0.1),
    "gan_patch_size": np.int64(12),
    "gan_dims": 4,
    "of a later version": [1, "x"],
}


def original(tmp_path, options, iterations=7, count=3, name="foo_SAEHD"):
    """A model folder in the layout that DeepFaceLab saves: framed pickles of NumPy's own scalars and arrays."""
    settings = {
        "gan_power": float(options["gan_power"]),
        "gan_patch_size": int(options["gan_patch_size"]),
    }
    config = config_of(true_face_power=0.01, gan_dims=4, **settings)
    folder = torch_to_leras(
        str(train(tmp_path / "made", config, count).path), tmp_path / "workspace" / "model", name
    )
    for path in folder.glob("*.npy"):
        arrays = {
            key: np.array(value) if np.ndim(value) else value
            for key, value in pickle.loads(path.read_bytes()).items()
        }
        path.write_bytes(pickle.dumps(arrays, 4))
    preview = [[np.zeros((2, 64, 64, 3), np.float32), np.ones((2, 64, 64, 1), np.float32)]]
    data = {
        "iter": iterations,
        "options": options,
        "loss_history": [[1.0, 2.0] for _ in range(iterations)],
    }
    data |= {"sample_for_preview": preview, "choosed_gpu_indexes": None, "unknown": (1, 2)}
    (folder / f"{name}_data.dat").write_bytes(pickle.dumps(data, 4))
    (folder / "SAEHD_default_options.dat").write_bytes(pickle.dumps(options, 4))
    return folder


def assert_equal(one, two, path=""):
    """The same values of the same types, whatever the order of keys."""
    assert type(one) is type(two), path
    if isinstance(one, dict):
        assert set(one) == set(two), path
        for key, value in one.items():
            assert_equal(value, two[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(two), path
        for index, value in enumerate(one):
            assert_equal(value, two[index], f"{path}/{index}")
    elif isinstance(one, np.ndarray):
        assert one.dtype == two.dtype, path
        np.testing.assert_array_equal(one, two, err_msg=path)
    else:
        assert one == two, path


def assert_same_files(folder, back):
    """The same content in every file of the folder, but for the summary's text."""
    for path in folder.iterdir():
        if path.suffix != ".txt":
            assert_equal(
                pickle.loads(path.read_bytes()),
                pickle.loads((back / path.name).read_bytes()),
                path.name,
            )


SAVED = sorted(Path(os.environ.get("MPT_DEEPFACELAB_MODELS", os.devnull)).glob("*/*_data.dat"))
"""Models that DeepFaceLab itself saved, in folders of a folder that the variable names."""
MADE = {
    "df, AdaBelief, discriminators": {},
    "no discriminators, wide options": {
        "gan_power": np.float64(0.0),
        "true_face_power": np.float64(0.0),
    },
    "full face, clipped": {
        "face_type": "f",
        "clipgrad": True,
        "random_warp": True,
        "lr_dropout": "y",
    },
}


@pytest.mark.parametrize("model", [*MADE, *SAVED], ids=str)
def test_every_model_converts_trains_on_and_converts_back_to_the_bit(tmp_path, model):
    folder = (
        model.parent if isinstance(model, Path) else original(tmp_path, {**OPTIONS, **MADE[model]})
    )
    name = next(folder.glob("*_SAEHD_data.dat")).name.removesuffix("_data.dat")
    run = RunDirectory(leras_to_torch(folder, tmp_path / "runs" / "foo"))
    kept_name = name if isinstance(model, Path) else None  # a saved one may lie among others
    back = torch_to_leras(str(run.path), tmp_path / "back", name=kept_name)
    assert {path.name for path in folder.iterdir()} == {path.name for path in back.iterdir()}
    assert_same_files(folder, back)

    config, loaded = load_config(run.config_path), checkpoint.load(run)
    drawn = config.to_data() | {
        "dataset": {"name": "procedural_faces", "count": 4, "test_count": 2}
    }
    data, _ = build_datasets(load_config(drawn))
    built = build_run(config, torch.device("cpu"), data.spec)
    restore(built, loaded.state)
    for phase in built.phases:
        assert update(built, phase, data.fetch([0, 1], 0)).finite
    trained = {**loaded.state, **capture(built)}
    checkpoint.save(run, loaded.step + 1, trained, keep_last=1)
    after = torch_to_leras(str(run.path), tmp_path / "after", name=name)
    before, now = (pickle.loads((one / f"{name}_data.dat").read_bytes()) for one in (folder, after))
    assert now["iter"] == before["iter"] + 1
    assert_equal(before["options"], now["options"])
    one, two = (pickle.loads((one / f"{name}_encoder.npy").read_bytes()) for one in (folder, after))
    assert any(not np.array_equal(one[key], two[key]) for key in one)
    again = checkpoint.load(RunDirectory(leras_to_torch(after, tmp_path / "runs" / "again"))).state
    for part in ("modules", "optimizers"):
        one, two = flatten(trained[part]), flatten(again[part])
        for key in one.keys() & two.keys() if part == "optimizers" else one:
            same = (
                torch.equal(one[key], two[key])
                if isinstance(one[key], torch.Tensor)
                else one[key] == two[key]
            )
            assert same, f"{part}{key}"


def test_a_runs_settings_are_the_options(tmp_path):
    run = leras_to_torch(original(tmp_path, OPTIONS), tmp_path / "runs" / "foo")
    config = load_config(run / "config.yaml")
    assert (config.dataset.settings.face_type, config.dataset.settings.random_warp) == ("wf", False)
    assert config.dataset.settings.src == str(tmp_path / "workspace" / "data_src" / "aligned")
    assert config.task.settings.eyes_mouth_priority
    assert (config.model.settings.gan_patch_size, config.model.settings.true_face_power) == (
        12,
        0.01,
    )
    optimizer = config.optimizer.settings
    assert (
        config.optimizer.name,
        optimizer.lr_dropout,
        optimizer.lr_cos,
        optimizer.clip_grad_norm,
    ) == (
        "adabelief",
        0.3,
        500,
        1.0,
    )
    assert (config.train.batch_size, checkpoint.load(RunDirectory(run)).step) == (2, 7)


def test_a_converted_run_follows_deepfacelabs_rules_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = leras_to_torch(original(tmp_path, OPTIONS), tmp_path / "runs" / "foo")
    settings = load_config(run / "config.yaml").dataset.settings
    assert (settings.hold_out_every, settings.mask) == (0, "xseg")
    said = "as DeepFaceLab: all faces are trained on, and evaluated on (dataset.hold_out_every 0"
    assert said in capsys.readouterr().out
    faces = [
        write_folder(tmp_path / side, 12, metadata={"face_type": "whole_face"})
        for side in ("src", "dst")
    ]
    overrides = [f"dataset.src={faces[0]}", f"dataset.dst={faces[1]}", "train.steps=8"]
    with pytest.raises(SystemExit) as done:
        cli.main(["train", str(run / "config.yaml"), "--resume", str(run), *overrides])
    assert done.value.code == 0
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    assert "12 hulls of landmarks" in printed.out + printed.err


def test_a_converted_run_trains_on_and_deepfacelab_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = original(tmp_path, OPTIONS)
    run = leras_to_torch(folder, tmp_path / "runs" / "foo")
    faces = [
        write_folder(tmp_path / side, 4, metadata={"face_type": "whole_face"})
        for side in ("src", "dst")
    ]
    overrides = [
        f"dataset.src={faces[0]}",
        f"dataset.dst={faces[1]}",
        "train.steps=9",
        "train.log_every=2",
    ]
    overrides += ["task.eyes_mouth_priority=false"]
    with pytest.raises(SystemExit) as done:
        cli.main(["train", str(run / "config.yaml"), "--resume", str(run), *overrides])
    assert done.value.code == 0
    back = torch_to_leras(str(run), tmp_path / "back", name="bar")
    data = pickle.loads((back / "bar_SAEHD_data.dat").read_bytes())
    assert_equal(data["options"], {**OPTIONS, "eyes_mouth_prio": False})
    assert (data["iter"], data["unknown"], len(data["loss_history"])) == (9, (1, 2), 9)
    assert data["loss_history"][:7] == [[1.0, 2.0]] * 7
    state = pickle.loads((back / "bar_SAEHD_src_dst_opt.npy").read_bytes())
    assert state["iters:0"] == 5
    before = pickle.loads((folder / "foo_SAEHD_encoder.npy").read_bytes())
    after = pickle.loads((back / "bar_SAEHD_encoder.npy").read_bytes())
    assert any(not np.array_equal(before[key], after[key]) for key in before)


def test_discriminators_that_are_switched_off_go_back_as_they_came(tmp_path):
    folder = original(tmp_path, OPTIONS)
    data = pickle.loads((folder / "foo_SAEHD_data.dat").read_bytes())
    data["options"] = {**OPTIONS, "gan_power": np.float64(0.0), "true_face_power": np.float64(0.0)}
    (folder / "foo_SAEHD_data.dat").write_bytes(pickle.dumps(data, 4))
    back = torch_to_leras(str(leras_to_torch(folder, tmp_path / "runs" / "foo")), tmp_path / "back")
    for part in ("GAN", "GAN_opt", "code_discriminator", "D_code_opt"):
        assert (back / f"foo_SAEHD_{part}.npy").read_bytes() == (
            folder / f"foo_SAEHD_{part}.npy"
        ).read_bytes()


def test_a_gans_patch_size_is_not_guessed(tmp_path):
    folder = original(tmp_path, OPTIONS)
    (folder / "foo_SAEHD_data.dat").unlink()
    with pytest.raises(ConfigError, match="weights do not tell its patch size"):
        leras_to_torch(folder, tmp_path / "runs" / "foo", archi="df-ud")


def test_a_models_name_has_no_underscore(tmp_path):
    directory = train(tmp_path, config_of())
    with pytest.raises(ConfigError, match="ends it at the first '_'"):
        torch_to_leras(str(directory.path), tmp_path / "dfl", name="my_model")


def test_the_archi_comes_from_the_summary_or_the_user(tmp_path):
    folder = torch_to_leras(str(train(tmp_path, config_of()).path), tmp_path / "dfl")
    own = leras_to_torch(folder, tmp_path / "own")
    (folder / "new_SAEHD_data.dat").unlink()
    (folder / "new_SAEHD_summary.txt").unlink()
    with pytest.raises(ConfigError, match="do not tell the options u and c"):
        leras_to_torch(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    given = leras_to_torch(folder, tmp_path / "given", archi="df-ud")
    (folder / "new_SAEHD_summary.txt").write_text(
        "==   resolution: 64   ==\n==        archi: df-ud   ==\n"
    )
    stated = leras_to_torch(folder, tmp_path / "stated")
    for path in (own, given, stated):
        settings = load_config(path / "config.yaml").model.settings
        assert settings.archi == "df-ud"
        assert {name: getattr(settings, name) for name in TINY if name != "name"} == {
            name: value for name, value in TINY.items() if name != "name"
        }


def test_weights_of_another_architecture_are_named(tmp_path):
    folder = torch_to_leras(str(train(tmp_path, config_of()).path), tmp_path / "dfl")
    with pytest.raises(CheckpointError, match=r"another architecture: archi is df-d, not df-dt"):
        leras_to_torch(folder, tmp_path / "out", archi="df-udt")
    (tmp_path / "other.yaml").write_text(config_of(e_dims=6, archi="liae-ud").to_yaml())
    with pytest.raises(CheckpointError, match=r"archi is df-d, not liae-d; e_dims is 4, not 6"):
        leras_to_torch(folder, tmp_path / "out", config=tmp_path / "other.yaml")


def test_incomplete_hostile_and_missing_models_are_refused(tmp_path):
    folder = torch_to_leras(str(train(tmp_path, config_of()).path), tmp_path / "dfl")
    (folder / "new_SAEHD_decoder_dst.npy").unlink()
    with pytest.raises(CheckpointError, match=r"decoder_dst\.npy is missing"):
        leras_to_torch(folder, tmp_path / "out", archi="df-ud")
    (folder / "new_SAEHD_decoder_dst.npy").write_bytes(
        b"\x80\x04cos\nsystem\nX\x02\x00\x00\x00ls\x85R."
    )
    with pytest.raises(CheckpointError, match=r"decoder_dst\.npy: refused at byte"):
        leras_to_torch(folder, tmp_path / "out", archi="df-ud")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no MODEL_encoder"):
        leras_to_torch(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(CheckpointError, match="no such folder"):
        leras_to_torch(tmp_path / "nowhere", tmp_path / "out")


def test_state_of_another_optimizer_is_said(tmp_path, capsys):
    folder = torch_to_leras(str(train(tmp_path, config_of()).path), tmp_path / "dfl")
    (tmp_path / "config.yaml").write_text(config_of("rmsprop_leras").to_yaml())
    with pytest.raises(ConfigError, match="use adabelief for ms and vs"):
        leras_to_torch(folder, tmp_path / "out", config=tmp_path / "config.yaml")
    torch_to_leras(str(train(tmp_path / "adam", config_of("adam")).path), tmp_path / "dfl-adam")
    assert "src_dst_opt: left out" in capsys.readouterr().out
    assert not list((tmp_path / "dfl-adam").glob("*opt.npy"))


def test_a_liae_trained_without_warps_keeps_inter_ab_and_its_state(tmp_path):
    plain = config_of(archi="liae-ud").to_data()
    config = load_config({**plain, "dataset": {**plain["dataset"], "random_warp": False}})
    warped = torch_to_leras(
        str(train(tmp_path / "warped", config_of(archi="liae-ud")).path), tmp_path / "one"
    )
    run = leras_to_torch(warped, tmp_path / "runs" / "back")
    state = checkpoint.load(RunDirectory(run)).state
    data, _ = build_datasets(config)
    built = build_run(config, torch.device("cpu"), data.spec)
    restore(built, state)
    update(built, built.phases[0], data.fetch([0, 1], 0))
    directory = create_run(tmp_path / "runs", "on")
    directory.config_path.write_text(config.to_yaml())
    checkpoint.save(directory, 3, capture(built), keep_last=1)
    after = torch_to_leras(str(directory.path), tmp_path / "two")
    for part, rests in (("inter_AB", True), ("inter_B", False), ("encoder", False)):
        one, two = (
            pickle.loads((folder / f"new_SAEHD_{part}.npy").read_bytes())
            for folder in (warped, after)
        )
        assert all(np.array_equal(one[key], two[key]) for key in one) == rests, part
    one, two = (
        pickle.loads((folder / "new_SAEHD_src_dst_opt.npy").read_bytes())
        for folder in (warped, after)
    )
    for key in one:
        if "_inter_AB/" in key:
            assert np.array_equal(one[key], two[key]), key
    fresh = torch_to_leras(str(train(tmp_path / "fresh", config).path), tmp_path / "three")
    never = pickle.loads((fresh / "new_SAEHD_src_dst_opt.npy").read_bytes())
    assert set(never) == set(one)
    assert all(not value.any() for key, value in never.items() if "_inter_AB/" in key)


def test_of_several_models_one_is_chosen_by_name_and_other_kinds_are_recognised(tmp_path):
    folder = original(tmp_path, OPTIONS)
    for path in list(folder.glob("foo_*")):
        (folder / path.name.replace("foo_", "bar_")).write_bytes(path.read_bytes())
    with pytest.raises(
        CheckpointError, match=r"several models \(bar_SAEHD, foo_SAEHD\); choose one with --name"
    ):
        leras_to_torch(folder, tmp_path / "runs" / "none")
    with pytest.raises(CheckpointError, match="no single model baz, but bar_SAEHD, foo_SAEHD"):
        leras_to_torch(folder, tmp_path / "runs" / "none", name="baz")
    with pytest.raises(SystemExit) as done:
        cli.main(
            [
                "deepfacelab",
                "leras-to-torch",
                str(folder),
                str(tmp_path / "runs" / "bar"),
                "--name",
                "bar",
            ]
        )
    assert not done.value.code
    assert (
        checkpoint.load(RunDirectory(tmp_path / "runs" / "bar")).manifest["extra"]["source"]
        == "bar_SAEHD"
    )
    for files, what in (
        (["x_AMP_encoder.npy"], "an AMP is no SAEHD"),
        (["XSeg_256.npy"], "holds an XSeg"),
    ):
        other = tmp_path / what
        other.mkdir()
        for name in files:
            (other / name).touch()
        with pytest.raises(CheckpointError, match=what):
            leras_to_torch(other, tmp_path / "runs" / "none")


def test_a_missing_optimizer_and_weights_that_are_not_finite_are_said(tmp_path, capsys):
    folder = original(tmp_path, OPTIONS)
    (folder / "foo_SAEHD_src_dst_opt.npy").unlink()
    leras_to_torch(folder, tmp_path / "runs" / "foo")
    assert (
        "foo_SAEHD_src_dst_opt.npy is missing: this optimizer begins anew"
        in capsys.readouterr().out
    )
    path = folder / "foo_SAEHD_inter.npy"
    arrays = pickle.loads(path.read_bytes())
    arrays["dense1/bias:0"] = np.full_like(arrays["dense1/bias:0"], np.nan)
    path.write_bytes(pickle.dumps(arrays, 4))
    with pytest.raises(
        CheckpointError, match=r"inter\.npy: dense1/bias:0 holds numbers that are not finite"
    ):
        leras_to_torch(folder, tmp_path / "runs" / "nan")
    assert not (tmp_path / "runs" / "nan").exists()


def test_hostile_leftovers_are_read_and_left_out(tmp_path, capsys):
    folder = original(
        tmp_path, {**OPTIONS, "gan_power": np.float64(0.0), "true_face_power": np.float64(0.0)}
    )
    hostile = b"\x80\x04cos\nsystem\nX\x02\x00\x00\x00ls\x85R."
    for name in ("foo_SAEHD_GAN.npy", "SAEHD_default_options.dat"):
        (folder / name).write_bytes(hostile)
    run = leras_to_torch(folder, tmp_path / "runs" / "foo")
    said = capsys.readouterr().out
    assert "left out: " in said
    assert "foo_SAEHD_GAN.npy: refused at byte" in said
    names = {path.name for path in (run / "deepfacelab").iterdir()}
    assert not {"foo_SAEHD_GAN.npy", "SAEHD_default_options.dat"} & names
    assert "foo_SAEHD_code_discriminator.npy" in names


def test_a_quick96_is_an_saehd_of_fixed_options_and_goes_back_as_one(tmp_path, monkeypatch):
    small = {**QUICK96, "ae_dims": 6, "e_dims": 4, "d_dims": 4, "d_mask_dims": 2}
    monkeypatch.setattr(convert_leras, "QUICK96", small)
    monkeypatch.setattr(return_leras, "QUICK96", small)
    made = config_of("rmsprop_leras", image_size=96)
    folder = torch_to_leras(
        str(train(tmp_path / "made", made, 2).path), tmp_path / "model", "quick_Quick96"
    )
    options = {"batch_size": 4, "target_iter": 0, "autobackup_hour": 0}
    data = {
        "iter": 2,
        "options": options,
        "loss_history": [[1.0, 2.0], [1.0, 2.0]],
        "sample_for_preview": None,
    }
    (folder / "quick_Quick96_data.dat").write_bytes(pickle.dumps(data, 4))
    run = leras_to_torch(folder, tmp_path / "runs" / "quick")
    config = load_config(run / "config.yaml")
    assert (config.model.settings.archi, config.model.settings.image_size) == ("df-ud", 96)
    assert config.dataset.settings.random_scale == 0.05  # an SAEHD's is 0.15
    assert not config.task.settings.stretch_mask
    optimizer = config.optimizer.settings
    assert (config.optimizer.name, optimizer.lr, optimizer.lr_dropout) == (
        "rmsprop_leras",
        2e-4,
        0.3,
    )
    assert_same_files(folder, torch_to_leras(str(run), tmp_path / "back"))
    torch_to_leras(str(run), folder)  # the same model, so it is replaced
    assert (folder / "quick_Quick96_autobackups" / "01").is_dir()
