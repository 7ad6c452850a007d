"""The whole step, as `mpt train` builds it, in every precision mode and under the tricks that the 6 GB plan rests
on."""

import copy
import dataclasses
import re

import pytest
import torch

from mpt.config.load import load_config
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.state.evaluation import preview
from mpt.engine.state.state import capture, restore
from mpt.engine.step.step import update
from mpt.errors import CheckpointError

MODEL = {
    "name": "saehd",
    "archi": "df-ud",
    "image_size": 64,
    "ae_dims": 6,
    "e_dims": 4,
    "d_dims": 4,
    "d_mask_dims": 2,
}


def build(mode="fp32", memory=None, pretrain=False, **changes):
    data = {
        "model": {**MODEL, **changes.pop("model", {})},
        "dataset": {"name": "procedural_faces", "count": 4, "test_count": 2},
        "optimizer": {"name": "adabelief", "clip_grad_norm": 1.0},
        "precision": {"mode": mode, **changes.pop("precision", {})},
        "memory": memory or {},
        "train": {"batch_size": 4, "steps": 2},
    }
    config = load_config(data)
    train_data, _ = build_datasets(config)
    spec = dataclasses.replace(
        train_data.spec, extra={**train_data.spec.extra, "pretrain": pretrain}
    )
    return build_run(config, torch.device("cpu"), spec), train_data


def weights_after(run, data, steps=2):
    for step in range(steps):
        for phase in run.phases:
            done = update(run, phase, data.fetch(range(4), step))
            assert all(torch.isfinite(value) for value in done.losses.values())
    return torch.cat(
        [value.detach().float().flatten() for value in run.task.autoencoder.parameters()]
    )


@pytest.mark.parametrize("mode", ["fp32", "amp", "bf16", "O1", "O2", "bf16-pure"])
def test_a_step_with_both_discriminators_is_finite_in_every_mode(mode):
    powers = {"true_face_power": 0.1, "gan_power": 0.1, "gan_dims": 4, "gan_patch_size": 8}
    run, data = build(mode, model=powers)
    before = torch.cat(
        [value.detach().float().flatten() for value in run.task.autoencoder.parameters()]
    )
    after = weights_after(run, data)
    assert torch.isfinite(after).all()
    assert not torch.equal(before, after)
    with torch.no_grad():
        assert torch.isfinite(preview(run, data.fetch([0, 1], 0))).all()


def test_recomputing_stages_changes_no_bit():
    plain = weights_after(*build())
    assert torch.equal(plain, weights_after(*build(memory={"recompute": "all"})))


@pytest.mark.parametrize(
    ("mode", "kept"), [("bf16-pure", []), ("O2", []), ("bf16-pure", ["*decoder_src"])]
)
def test_a_decoder_that_travels_as_a_whole_trains_as_one_that_stays(mode, kept):
    """A mode casts at a module's methods; those of the trick return weights, which have to stay what they are."""
    plain, travelling = (
        weights_after(*build(mode, memory, precision={"keep_fp32": kept}))
        for memory in (None, {"stream_weights": {"min_kibibytes": 0}})
    )
    assert torch.equal(plain, travelling)


def test_micro_batches_add_up():
    torch.testing.assert_close(
        weights_after(*build()), weights_after(*build(memory={"micro_batch": 1})), atol=1e-5, rtol=0
    )


def test_the_dense_layers_can_be_kept_in_float32():
    run, data = build("bf16", precision={"keep_fp32": ["autoencoder.inter.dense*"]})
    seen = {}
    for name in ("dense1", "upscale1"):
        layer = run.task.autoencoder["inter"].get_submodule(name)
        layer.register_forward_hook(
            lambda module, inputs, output, name=name: seen.update({name: output.dtype})
        )
    weights_after(run, data, steps=1)
    assert seen == {"dense1": torch.float32, "upscale1": torch.bfloat16}


@pytest.mark.parametrize("mode", ["fp32", "O2"])
def test_a_discriminator_that_is_switched_on_later_begins_anew(mode):
    before, data = build(mode)
    weights_after(before, data, steps=1)
    powers = {"true_face_power": 0.1, "gan_power": 0.1, "gan_dims": 4, "gan_patch_size": 8}
    run, _ = build(mode, model=powers)
    built = {key: value.clone() for key, value in run.task.patch_discriminator.state_dict().items()}
    told = restore(run, copy.deepcopy(capture(before)))
    assert set(told) == {"code_disc", "patch_disc"}
    assert "begin anew" in str(told["patch_disc"])
    for key, value in run.task.patch_discriminator.state_dict().items():
        assert torch.equal(value, built[key])
    for key, value in run.task.autoencoder.state_dict().items():
        assert torch.equal(value, before.task.autoencoder.state_dict()[key])
    states = [one.optimizers["autoencoder"].state_dict()["state"][0]["vs"] for one in (before, run)]
    assert torch.equal(*states)
    weights_after(run, data, steps=1)


def test_true_face_that_is_switched_on_during_pretraining_is_asked_as_it_was_made():
    before, data = build(pretrain=True)
    weights_after(before, data, steps=1)
    run, _ = build(pretrain=True, model={"true_face_power": 0.1})
    built = {key: value.clone() for key, value in run.task.code_discriminator.state_dict().items()}
    assert restore(run, copy.deepcopy(capture(before))) == {}
    weights_after(run, data, steps=1)
    for key, value in run.task.code_discriminator.state_dict().items():
        assert torch.equal(value, built[key])
    frozen, _ = build(pretrain=True, model={"true_face_power": 0.1})
    frozen.task.code_discriminator.requires_grad_(False)
    with pytest.raises(CheckpointError, match="no module code_discriminator"):
        restore(frozen, copy.deepcopy(capture(before)))


def test_a_discriminator_that_is_switched_off_is_dropped_with_a_word():
    before, data = build(model={"gan_power": 0.1, "gan_dims": 4, "gan_patch_size": 8})
    weights_after(before, data, steps=1)
    run, _ = build()
    told = restore(run, copy.deepcopy(capture(before)))
    assert set(told) == {"patch_disc"}
    assert re.fullmatch(
        r"switched off .*: its AdaBelief \([1-9][\d,]* bytes\) is dropped", str(told["patch_disc"])
    )
    assert not told["patch_disc"].is_as_before
    weights_after(run, data, steps=1)


def test_a_checkpoint_of_another_task_is_not_completed():
    run, _ = build()
    saved = capture(run)
    saved["optimizers"] = {"other": saved["optimizers"]["autoencoder"]}
    saved["modules"] = {"other": saved["modules"]["autoencoder"]}
    with pytest.raises(CheckpointError, match="no module autoencoder"):
        restore(run, saved)
