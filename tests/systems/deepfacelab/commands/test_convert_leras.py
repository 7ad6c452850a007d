import pickle

import numpy as np
import pytest
import torch

from mpt.config.load import load_config
from mpt.engine.build import build_datasets, build_run
from mpt.engine.state import capture
from mpt.engine.step import update
from mpt.errors import CheckpointError, ConfigError
from mpt.run import checkpoint
from mpt.run.layout import RunDirectory, create_run
from mpt.systems.deepfacelab.commands.convert_leras import leras_to_torch, torch_to_leras

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
        return {k: v for key, item in value.items() for k, v in flatten(item, f"{path}/{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for key, item in enumerate(value) for k, v in flatten(item, f"{path}/{key}").items()}
    return {path: value}


@pytest.mark.parametrize(
    ("optimizer", "model"),
    [
        ("adabelief", {"true_face_power": 0.01, "gan_power": 0.1, "gan_patch_size": 8, "gan_dims": 4}),
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
            assert torch.equal(value, two[key]) if isinstance(value, torch.Tensor) else value == two[key], key
    assert checkpoint.load(RunDirectory(back)).step == 2


def test_files_and_options_are_those_that_deepfacelab_loads(tmp_path):
    directory = train(tmp_path, config_of(true_face_power=0.01))
    folder = torch_to_leras(str(directory.path), tmp_path / "dfl", name="faces_SAEHD")
    parts = ["encoder", "inter", "decoder_src", "decoder_dst", "code_discriminator", "src_dst_opt", "D_code_opt"]
    assert {path.name for path in folder.iterdir()} == {f"faces_SAEHD_{part}.npy" for part in parts} | {
        "faces_SAEHD_data.dat",
        "faces_SAEHD_summary.txt",
    }
    for path in folder.glob("*.npy"):
        arrays = pickle.loads(path.read_bytes())
        assert path.read_bytes()[:2] == b"\x80\x04"
        assert {array.dtype for key, array in arrays.items() if key != "iters:0"} == {np.dtype("<f4")}
    optimizer = pickle.loads((folder / "faces_SAEHD_D_code_opt.npy").read_bytes())
    assert {"iters:0", "ms_dis/convs_0/weight_0:0", "vs_dis/out_conv/bias_0:0"} <= set(optimizer)
    assert optimizer["iters:0"] == 2
    options = pickle.loads((folder / "faces_SAEHD_data.dat").read_bytes())
    assert options["iter"] == 2
    assert (options["options"]["resolution"], options["options"]["archi"]) == (64, "df-ud")


def test_options_that_are_there_are_left_alone(tmp_path):
    (tmp_path / "dfl").mkdir()
    (tmp_path / "dfl" / "new_SAEHD_data.dat").write_bytes(b"theirs")
    torch_to_leras(str(train(tmp_path, config_of()).path), tmp_path / "dfl")
    assert (tmp_path / "dfl" / "new_SAEHD_data.dat").read_bytes() == b"theirs"


def test_the_archi_comes_from_the_summary_or_the_user(tmp_path):
    folder = torch_to_leras(str(train(tmp_path, config_of()).path), tmp_path / "dfl")
    own = leras_to_torch(folder, tmp_path / "own")
    (folder / "new_SAEHD_summary.txt").unlink()
    with pytest.raises(ConfigError, match="do not tell the options u and c"):
        leras_to_torch(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    given = leras_to_torch(folder, tmp_path / "given", archi="df-ud")
    (folder / "new_SAEHD_summary.txt").write_text("==   resolution: 64   ==\n==        archi: df-ud   ==\n")
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
    (folder / "new_SAEHD_decoder_dst.npy").write_bytes(b"\x80\x04cos\nsystem\nX\x02\x00\x00\x00ls\x85R.")
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
