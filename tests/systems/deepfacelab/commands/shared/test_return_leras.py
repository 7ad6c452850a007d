"""A run takes a model's place only if it is the same model and no older, or if that is asked for."""

import json
import pickle

import pytest

from mpt import cli
from mpt.config.load import change_precision
from mpt.errors import CheckpointError
from mpt.systems.deepfacelab.commands.shared.return_leras import torch_to_leras
from tests.systems.deepfacelab.commands.shared.test_convert_leras import config_of, train


@pytest.fixture
def small(tmp_path):
    return train(tmp_path / "small", config_of(), steps=1)


def listed(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def returned(run, folder, *words):
    with pytest.raises(SystemExit) as done:
        cli.main(["deepfacelab", "torch-to-leras", str(run.path), str(folder), *words])
    return done.value.code


def test_a_model_of_another_shape_is_not_replaced_unless_told(tmp_path, small, capsys):
    folder = torch_to_leras(
        str(train(tmp_path / "liae", config_of(archi="liae-ud", e_dims=6)).path), tmp_path / "dfl"
    )
    before = listed(folder)
    assert returned(small, folder) == 4
    message = capsys.readouterr().err
    assert "archi is liae-du, not df-du" in message
    assert "e_dims is 6, not 4" in message
    assert "--replace" in message
    assert listed(folder) == before
    assert not returned(small, folder, "--replace")
    after = listed(folder)
    assert not {"new_SAEHD_decoder.npy", "new_SAEHD_inter_AB.npy"} & set(after)
    assert {
        name.rpartition("/")[2]: data for name, data in after.items() if "autobackups/01" in name
    } == before
    data = pickle.loads(after["new_SAEHD_data.dat"])
    assert (data["iter"], data["options"]["archi"]) == (1, "df-ud")


@pytest.mark.parametrize("without_data", [False, True])
def test_a_model_that_is_further_trained_is_not_replaced(tmp_path, small, without_data, capsys):
    folder = torch_to_leras(
        str(train(tmp_path / "long", config_of(), steps=3).path), tmp_path / "dfl"
    )
    if without_data:
        (folder / "new_SAEHD_data.dat").unlink()
    assert returned(small, folder) == 4
    assert "at iteration 3, which is later than this run's 1" in capsys.readouterr().err
    assert not returned(small, folder, "--name", "other")  # beside it
    assert not returned(small, folder, "--replace")
    assert (folder / "new_SAEHD_autobackups" / "01" / "new_SAEHD_encoder.npy").is_file()


def test_a_damaged_model_is_replaced_on_demand_alone(tmp_path, small):
    folder = tmp_path / "dfl"
    folder.mkdir()
    (folder / "new_SAEHD_data.dat").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="is not replaced: give --name"):
        torch_to_leras(str(small.path), folder)
    torch_to_leras(str(small.path), folder, replace=True)
    assert (
        folder / "new_SAEHD_autobackups" / "01" / "new_SAEHD_data.dat"
    ).read_bytes() == b"damaged"


def test_a_loss_history_is_the_runs_own(tmp_path, small):
    folder = torch_to_leras(str(small.path), tmp_path / "dfl")
    data = pickle.loads((folder / "new_SAEHD_data.dat").read_bytes())
    other = {
        **data,
        "loss_history": [[9.0, 9.0]],
        "options": {**data["options"], "autobackup_hour": 3},
    }
    (folder / "new_SAEHD_data.dat").write_bytes(pickle.dumps(other, 4))
    torch_to_leras(str(small.path), folder)
    assert (
        pickle.loads((folder / "new_SAEHD_data.dat").read_bytes())["loss_history"]
        == data["loss_history"]
    )


def test_what_discriminators_say_is_never_in_the_loss_history(tmp_path, small):
    losses = {
        f"autoencoder/{side}_{part}": 1.0
        for side in ("src", "dst")
        for part in ("mask", "face", "eyes_mouth")
    }
    adversarial = {
        "autoencoder/src_gan": 9.0,
        "autoencoder/src_true_face": 9.0,
        "autoencoder/src_background": 9.0,
    }
    styles = {"autoencoder/face_style": 0.5, "autoencoder/background_style": 0.25}
    line = {
        "kind": "train",
        "step": 1,
        "losses": losses | adversarial | styles | {"code_disc/src": 9.0},
    }
    small.metrics_path.write_text(json.dumps(line) + "\n")
    data = pickle.loads(
        (torch_to_leras(str(small.path), tmp_path / "dfl") / "new_SAEHD_data.dat").read_bytes()
    )
    assert data["loss_history"] == [[3.75, 3.0]]


def test_an_optimizer_without_state_yet_goes_with_zeros(tmp_path, capsys):
    fresh = train(tmp_path / "fresh", config_of(), steps=0)
    folder = torch_to_leras(str(fresh.path), tmp_path / "dfl")
    assert "counterpart" not in capsys.readouterr().out
    state = pickle.loads((folder / "new_SAEHD_src_dst_opt.npy").read_bytes())
    assert state["iters:0"] == 0
    assert {key.partition("_")[0] for key in state} == {"iters:0", "ms", "vs"}
    assert not any(value.any() for key, value in state.items() if key != "iters:0")
    assert not returned(fresh, folder)  # is there at iteration 1


def test_what_a_precision_mode_keeps_of_its_rounding_does_not_go_along(tmp_path):
    config = change_precision(config_of(), "bf16-kahan")
    run = train(tmp_path / "kahan", config, steps=1)
    folder = torch_to_leras(str(run.path), tmp_path / "dfl")
    state = pickle.loads((folder / "new_SAEHD_src_dst_opt.npy").read_bytes())
    assert {key.partition("_")[0] for key in state} == {"iters:0", "ms", "vs"}
    assert any(value.any() for key, value in state.items() if key.startswith("vs_"))
