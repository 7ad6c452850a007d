import pytest
import torch

from mpt import cli
from mpt.config.load import load_config
from mpt.run.checkpoints import checkpoint
from mpt.run.records.layout import RunDirectory
from mpt.systems.deepfacelab.data.leras.model_data import read_model_data
from tests.systems.deepfacelab.data.face_makers import folder

TINY = "{archi: %s, image_size: 64, ae_dims: 6, e_dims: 4, d_dims: 4, d_mask_dims: 2}"


def mpt(*words):
    with pytest.raises(SystemExit) as done:
        cli.main([str(word) for word in words])
    return done.value.code


@pytest.mark.parametrize(
    ("archi", "inters"),
    [
        pytest.param("df-ud", {"inter"}, marks=pytest.mark.slow),
        ("liae-ud", {"inter_AB", "inter_B"}),
    ],
)
def test_a_pretrained_model_goes_on_with_a_new_inter(tmp_path, archi, inters):
    many, src, dst = (folder(tmp_path / name, 3) for name in ("many", "src", "dst"))
    text = f"""
model: {{name: saehd, {(TINY % archi)[1:-1]}, gan_power: 0.1, gan_patch_size: 8, gan_dims: 4}}
dataset: {{name: faceset, src: {many}, dst: {many}, pretrain: true}}
optimizer: adabelief
precision: fp32
train: {{steps: 2, batch_size: 2}}
"""
    (tmp_path / "pre.yaml").write_text(text)
    runs = tmp_path / "runs"
    assert mpt("train", tmp_path / "pre.yaml", "--runs", runs, "--name", "pre", "--quiet") == 0
    ended = [
        "deepfacelab",
        "end-pretraining",
        runs / "pre",
        runs / "after",
        f"dataset.src={src}",
        f"dataset.dst={dst}",
    ]
    assert mpt(*ended) == 0
    before, after = (checkpoint.load(RunDirectory(runs / name)) for name in ("pre", "after"))
    assert (before.step, after.step) == (2, 0)
    for key, value in before.state["modules"]["autoencoder"].items():
        fresh = key.split(".")[0] in inters
        if not fresh or key.endswith("weight"):  # inter_AB's biases have not left their zeros
            assert torch.equal(value, after.state["modules"]["autoencoder"][key]) != fresh, key
    config = load_config(runs / "after" / "config.yaml")
    assert (config.dataset.settings.pretrain, config.dataset.settings.src) == (False, str(src))
    assert set(after.state["modules"]) == {"autoencoder", "patch_discriminator"}
    resumed = [
        "train",
        runs / "after" / "config.yaml",
        "--resume",
        runs / "after",
        "--quiet",
        "train.steps=1",
    ]
    assert mpt(*resumed) == 0
    assert mpt("deepfacelab", "end-pretraining", runs / "after", runs / "again") == 2
    if archi == "df-ud":
        check_names(tmp_path, runs, src)


def check_names(tmp_path, runs, src):
    model, back = tmp_path / "model", tmp_path / "back"
    assert mpt("deepfacelab", "torch-to-leras", runs / "pre", model, "--name", "foo") == 0
    assert mpt("deepfacelab", "leras-to-torch", model, runs / "foo") == 0
    assert (
        mpt("deepfacelab", "end-pretraining", runs / "foo", runs / "bar", f"dataset.src={src}") == 0
    )
    assert mpt("deepfacelab", "torch-to-leras", runs / "bar", back) == 0
    assert sorted(path.name for path in back.glob("*.dat")) == ["foo_SAEHD_data.dat"]
    assert len(read_model_data(model / "foo_SAEHD_data.dat")["loss_history"]) == 2
    assert read_model_data(back / "foo_SAEHD_data.dat")["loss_history"] == []  # of the pretraining
