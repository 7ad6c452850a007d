"""StyleGAN2's phases: lazy, exempt from scaling, with averages that move after the step and survive a restart."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mpt.commands import convert
from mpt.commands.convert import Command as ConvertArguments
from mpt.engine.state.evaluation import apart_from_training, evaluate_batches, infer
from mpt.engine.state.moving_averages import follow_step
from mpt.engine.state.state import capture, restore
from mpt.engine.step.step import update
from mpt.errors import CheckpointError, ConfigError
from mpt.inference.exported import open_exported
from mpt.inference.inputs import infer_one
from mpt.inference.trained import open_trained
from mpt.run.checkpoints import checkpoint
from mpt.run.records.layout import open_run
from mpt.seams import loss_scales
from mpt.systems.stylegan2.nn.shared.stylegan2_layers import Convolution
from mpt.systems.stylegan2.tasks.stylegan2 import Settings, StyleGan2, draw_noise
from mpt.tasks.shared.samples import METRIC_SEED
from tests.commands.conftest import save_run
from tests.tasks.generative import STYLEGAN2, build, make_batch, take_step, weights

ADAPTIVE = {"metric_samples": 8, "preview_count": 4, "ada_target": 0.6, "ada_kimg": 1.0}


@pytest.mark.parametrize("mode", ["fp32", "amp", "O1", "O2", "native"])
def test_it_trains_in_every_mode_with_augmentation(mode: str) -> None:
    run = build("stylegan2", mode, task=ADAPTIVE)
    before = weights(run)
    for step in range(2):
        assert all(done.finite for done in take_step(run, step).values())
    after = weights(run)
    for module, old in before.items():
        moved = [not torch.equal(a, b) for a, b in zip(old, after[module], strict=True)]
        assert all(moved)


def test_regularisers_come_seldom_and_are_exempt_from_scaling() -> None:
    run = build("stylegan2", {"mode": "amp", "dtype": "float16"})
    assert [(p.name, p.every, p.scaled) for p in run.phases] == [
        ("gen", 1, True),
        ("gen_path", 4, False),
        ("disc", 1, True),
        ("disc_r1", 16, False),
    ]
    assert set(loss_scales(run.precision)) == {"gen", "disc"}


def test_rates_and_decays_allow_for_the_extra_steps() -> None:
    run = build("stylegan2", optimizer={"name": "adam", "lr": 2e-3, "betas": [0.0, 0.99]})
    for name, every in (("gen", 4), ("disc", 16)):
        (group,) = run.optimizers[name].param_groups
        assert group["lr_scale"] == every / (every + 1)
        assert group["betas"] == (0.0, 0.99 ** (every / (every + 1)))


def test_a_regulariser_of_weight_zero_has_no_phase_and_scales_nothing() -> None:
    run = build("stylegan2", task={"path_weight": 0.0, "r1_gamma": 0.0})
    assert [phase.name for phase in run.phases] == ["gen", "disc"]
    assert "lr_scale" not in run.optimizers["gen"].param_groups[0]


def test_activations_keep_their_result_alone_except_where_gradients_are_differentiated_again() -> (
    None
):
    run = build("stylegan2")
    layers = [
        m
        for net in (run.task.gen, run.task.disc)
        for m in net.modules()
        if isinstance(m, Convolution)
    ]
    for phase in run.phases:
        run.task.draw(make_batch(run, 8), phase)
        assert {layer.is_differentiated_twice for layer in layers} == {
            phase.name in ("gen_path", "disc_r1")
        }


def test_the_path_phase_draws_half_a_batch_and_no_images() -> None:
    run = build("stylegan2")
    drawn = run.task.draw(make_batch(run, 8), run.phases[1])
    assert {len(value) for value in drawn.values()} == {4}
    assert "image" not in drawn


def test_style_mixing_can_be_switched_off() -> None:
    run = build("stylegan2", task={"style_mixing": 0.0})
    task = run.task
    assert isinstance(task, StyleGan2)
    drawn = task.draw(make_batch(run, 8), run.phases[0])
    assert (drawn["crossover"] == task.gen.synthesis.style_count).all()
    alone = task.gen(drawn["latent"], drawn["noise"])
    assert torch.equal(task.fake_side(drawn)[0], alone)


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_the_mean_path_length_moves_after_the_step_and_not_with_the_split(
    micro_batch: int | None,
) -> None:
    run = build("stylegan2")
    task = run.task
    assert isinstance(task, StyleGan2)
    run.adaptation.micro_batch_size = micro_batch
    torch.manual_seed(2)
    update(run, run.phases[1], make_batch(run, 8))
    assert task.path_mean == 0
    total, count = task.lengths.tolist()
    assert count == 4
    task.after_step(0, 0)
    assert float(task.path_mean) == pytest.approx(0.01 * total / 4, rel=1e-5)
    moved = task.path_mean.clone()
    task.after_step(1, 8)  # a step without the phase
    assert torch.equal(task.path_mean, moved)


def test_a_path_phase_that_is_not_finite_leaves_the_mean_alone() -> None:
    run = build("stylegan2")
    task = run.task
    assert isinstance(task, StyleGan2)
    take_step(run)
    before = task.path_mean.clone()
    strength = task.gen.synthesis.blocks[0].second.noise_strength
    was = strength.detach().clone()
    with torch.no_grad():
        strength.fill_(math.nan)
    assert not update(run, run.phases[1], make_batch(run)).finite
    task.after_step(4, 32)
    assert torch.equal(task.path_mean, before)
    with torch.no_grad():
        strength.copy_(was)
    assert update(run, run.phases[1], make_batch(run)).finite


def test_evaluation_tells_what_the_controllers_do() -> None:
    run = build("stylegan2", task=ADAPTIVE)
    task = run.task
    assert isinstance(task, StyleGan2)
    assert task.augment is not None
    task.path_mean.fill_(2.5)
    task.augment.probability.fill_(0.25)
    figures = evaluate_batches(run, [make_batch(run)], chunk=8)
    assert (figures["path_length"], figures["augment_probability"]) == (2.5, 0.25)
    plain = build("stylegan2", task={"path_weight": 0.0, "metric_samples": 8})
    assert not {"path_length", "augment_probability"} & set(
        evaluate_batches(plain, [make_batch(run)], chunk=8)
    )


@pytest.mark.parametrize(
    "settings", [{}, {"ada_target": 0.6}, {"ada_target": 0.6, "r1_gamma": 0.0}]
)
def test_advice_names_settings_that_this_task_has_and_changes_them(
    settings: dict[str, float],
) -> None:
    task = build("stylegan2", task=settings).task
    assert isinstance(task, StyleGan2)
    key, value = task.remedy().removeprefix("task.").split("=")
    assert Settings.model_validate({**settings, key: float(value)}) != task.style


def test_adaptive_augmentation_follows_the_sign_of_real_scores_every_fourth_step() -> None:
    run = build("stylegan2", task=ADAPTIVE)
    task = run.task
    assert isinstance(task, StyleGan2)
    assert task.augment is not None
    task.batch_size = 8
    task.signs = torch.tensor([8.0, 8.0])
    for step in range(3):
        task.after_step(step, 0)
    assert task.augment.probability == 0
    task.after_step(3, 0)
    assert float(task.augment.probability) == pytest.approx(4 * 8 / 1000)
    assert torch.equal(task.signs, torch.zeros(2))


def test_controllers_and_averages_are_saved() -> None:
    run = build("stylegan2", task=ADAPTIVE)
    for step in range(2):
        take_step(run, step)
    saved = run.task.state_dict()
    assert saved["path_mean"] > 0
    assert saved["signs"][1] == 16
    assert {"gen_ema", "augment"} < set(run.task.modules)
    other = build("stylegan2", task=ADAPTIVE)
    other.task.load_state_dict(saved)
    assert torch.equal(other.task.state_dict()["signs"], saved["signs"])


def test_r1_differentiates_through_the_augmentation() -> None:
    run = build("stylegan2", task=ADAPTIVE)
    task = run.task
    assert isinstance(task, StyleGan2)
    assert task.augment is not None
    task.augment.probability.fill_(0.5)
    done = update(run, run.phases[3], make_batch(run))
    assert done.finite
    assert done.losses["loss"] > 0


def test_samples_come_from_the_average_and_truncation_narrows_them() -> None:
    run = build("stylegan2")
    task = run.task
    assert isinstance(task, StyleGan2)
    wide, narrow = task.sampler.sample(16, 0), task.sampler.sample(16, 0, truncation=0.3)
    assert wide.shape == (16, 3, 16, 16)
    assert 0 <= wide.min() <= wide.max() <= 1
    assert narrow.std(0).mean() < wide.std(0).mean()
    with torch.no_grad():
        task.gen.synthesis.constant.zero_()
    with apart_from_training(run):
        assert torch.equal(task.sampler.sample(16, 0), wide)


@torch.no_grad()
def test_a_samples_noise_depends_on_its_number_alone() -> None:
    task = build("stylegan2").task
    assert isinstance(task, StyleGan2)
    with torch.no_grad():
        for name, parameter in task.gen.named_parameters():
            if name.endswith("noise_strength"):
                parameter.fill_(1.0)
    latent = task.sampler.latents(40, 0)
    together, alone = task.generate(latent, first=7), task.generate(latent[35:36], first=42)
    assert torch.allclose(together[35], alone[0], atol=1e-5)
    assert not torch.allclose(together[35], task.generate(latent[35:36], first=43)[0], atol=1e-3)


@pytest.mark.parametrize("seed", [0, 1, METRIC_SEED])
def test_no_sample_is_drawn_from_the_weights_own_random_numbers(seed: int) -> None:
    torch.manual_seed(seed)
    run = build("stylegan2", seed=seed)
    task = run.task
    assert isinstance(task, StyleGan2)
    weights_dd = task.gen.mapping.layers[0].weight.detach() / 100  # the first that are drawn
    torch.manual_seed(seed)
    assert torch.allclose(weights_dd, torch.randn(8, 8), atol=1e-6)
    met = []
    task.gen.mapping.register_forward_pre_hook(lambda _, inputs: met.append(inputs[0]))
    task.gen.mean_style()
    for drawn_bd in (task.sampler.latents(8, seed), met[0], draw_noise(64, seed).reshape(8, 8)):
        assert (
            torch.cosine_similarity(weights_dd.flatten(), drawn_bd[:8].flatten(), dim=0).abs() < 0.5
        )


def test_the_average_starts_as_a_copy_and_then_lags() -> None:
    run = build("stylegan2")
    task = run.task
    assert isinstance(task, StyleGan2)
    twin, gen = task.modules["gen_ema"], task.gen
    take_step(run, 0)
    # nothing seen yet: no half-life
    assert torch.equal(next(twin.parameters()), next(gen.parameters()))
    old = next(twin.parameters()).clone()
    with torch.no_grad():
        next(gen.parameters()).add_(1.0)
    size = run.config.train.batch_size
    follow_step(run, 1000)
    moved = next(twin.parameters()) - old
    half_life = min(10_000, 0.05 * 1000 * size)
    assert torch.allclose(moved, torch.full_like(moved, 1 - 0.5 ** (size / half_life)), atol=1e-4)


def test_a_restored_run_goes_on_bit_for_bit() -> None:
    run = build("stylegan2", task=ADAPTIVE)
    for step in range(2):
        take_step(run, step)
    saved = copy.deepcopy(capture(run))
    for step in range(2, 6):
        take_step(run, step)
    other = build("stylegan2", task=ADAPTIVE)
    restore(other, saved)
    for step in range(2, 6):
        take_step(other, step)
    for name, module in run.task.modules.items():
        for key, value in module.state_dict().items():
            assert torch.equal(value, other.task.modules[name].state_dict()[key]), f"{name}.{key}"
    assert torch.equal(run.task.state_dict()["path_mean"], other.task.state_dict()["path_mean"])


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="float16 kernels and autocast are checked on a CUDA device",
)
@pytest.mark.parametrize("mode", ["amp", "O1", "O2", "native"])
def test_float16_on_a_gpu_takes_twenty_finite_steps(mode: str) -> None:
    run = build(
        "stylegan2",
        {"mode": mode, "dtype": "float16", "init_scale": 1024.0},
        device="cuda",
        task=ADAPTIVE,
    )
    for step in range(20):
        take_step(run, step)
    for module in run.task.trainable.values():
        assert all(torch.isfinite(parameter).all() for parameter in module.parameters())
    sample = infer(run, None, 4).tiles
    assert sample is not None
    assert torch.isfinite(sample).all()


def test_classes_condition_both_networks_and_the_running_mean_is_tracked() -> None:
    model = {**STYLEGAN2, "classes": 2, "published": True}
    run = build(model, task=ADAPTIVE)
    before = weights(run)
    for step in range(2):
        assert all(done.finite for done in take_step(run, step).values())
    after = weights(run)
    for module, old in before.items():
        assert all(not torch.equal(a, b) for a, b in zip(old, after[module], strict=True))
    task = run.task
    assert isinstance(task, StyleGan2)
    average = task.gen.mapping.average
    assert average is not None
    assert float(average.abs().max()) > 0
    first, second = task.generate(torch.ones(2, 8)), task.generate(torch.ones(1, 8), first=1)
    assert torch.allclose(first[1], second[0], atol=1e-6), "a sample's class follows its number"
    assert not torch.allclose(first[0], first[1], atol=1e-3)
    with pytest.raises(ConfigError, match="tell 3 classes apart, and the data have 2"):
        build({**model, "classes": 3})


def test_filtered_augmentation_trains_with_all_its_regularisers() -> None:
    run = build("stylegan2", task={**ADAPTIVE, "ada_filter": True})
    task = run.task
    assert isinstance(task, StyleGan2)
    assert task.augment is not None
    task.augment.probability.fill_(1.0)
    assert all(done.finite for done in take_step(run, 0).values())
    assert "taps" not in task.augment.state_dict()


def test_r1_counts_half_of_gamma_times_its_interval() -> None:
    """Mescheder et al. 2018, equation 9, and Karras et al. 2020, section 3: 0.5 * 10 * 16 = 80."""
    run = build("stylegan2", task={"r1_gamma": 10.0, "r1_every": 16})
    (phase,) = (one for one in run.phases if one.name == "disc_r1")
    batch = run.task.draw(make_batch(run), phase)
    (loss,) = phase.losses(batch)
    image = (batch["image"] * 2 - 1).requires_grad_()
    (slope,) = torch.autograd.grad(run.task.disc(image).sum(), image)
    expected = 80 * slope.square().sum((1, 2, 3)).mean()
    assert torch.allclose(loss.value, expected, rtol=1e-4)


def test_augmentation_rises_by_the_images_of_four_steps() -> None:
    """Karras et al. 2020 (ADA): every 4 steps, by 4 * 8 images of the 1000 in which it may go from 0 to 1."""
    run = build("stylegan2", task=ADAPTIVE)
    task: Any = run.task
    task.batch_size, task.signs = 8, torch.tensor([8.0, 8.0])
    rises = []
    for step in range(4):
        task.after_step(step, 8 * (step + 1))
        rises.append(float(task.augment.probability))
    assert rises == pytest.approx([0.0, 0.0, 0.0, 0.032])


@torch.no_grad()
def test_a_network_with_fixed_noise_is_shown_with_it_and_judged_with_noise_for_each_sample() -> (
    None
):
    run = build({**STYLEGAN2, "published": True})
    task, judged = run.task, []
    assert isinstance(task, StyleGan2)
    for name, parameter in task.gen.named_parameters():
        if name.endswith("noise_strength"):
            parameter.fill_(1.0)
    task.gen.synthesis.fixed_noise.normal_()
    task.quality.features = lambda image, kind: judged.append(image) or {}
    task.evaluate_samples(0, 4)
    shown = task.generate(task.sampler.latents(task.evaluation_samples, METRIC_SEED)[:4])
    assert not torch.allclose(judged[0], shown, atol=1e-3)
    assert torch.equal(task.generate(task.sampler.latents(4, 0)), task.sampler.sample(4, 0))
    fixed = task.gen.synthesis.fixed_noise
    assert torch.equal(task._noise(range(2), fixed.device), fixed.expand(2, -1))


def test_a_graph_has_the_fixed_noise_that_its_inputs_are_made_of(tmp_path: Path) -> None:
    """The task that is built for the file has noise of its own, drawn anew, and its pictures would be others."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="ONNX files are written and run with it")
    data = {
        "model": {**STYLEGAN2, "published": True},
        "dataset": {"name": "shapes", "size": 16},
        "train": {"batch_size": 4, "steps": 1, "ema": 0.9},
        "name": "noisy",
    }
    run = save_run(tmp_path, data)
    directory = open_run(run)
    state = checkpoint.load(directory).state
    for network in state["modules"].values():
        for name, value in network.items():
            if name.endswith("noise_strength"):
                value.fill_(1.0)
            elif name.endswith("fixed_noise"):  # as of a published network
                value.normal_(generator=torch.Generator().manual_seed(7))
    checkpoint.save(directory, 2, state, keep_last=1)
    file = tmp_path / "noisy.onnx"
    convert.run(ConvertArguments(run=str(run), output=str(file), to="onnx", gate="900%", samples=2))
    made, plain = [], "task.truncation=1"
    for opened in (
        open_exported(file, "cpu", (plain,), ()),
        open_trained(str(run), tmp_path, "cpu", ("precision=fp32", plain)),
    ):
        tiles = infer_one(opened, (None, 3)).tiles
        assert tiles is not None
        made.append(tiles)
    torch.testing.assert_close(made[0], made[1], atol=1e-4, rtol=0)
    task = open_trained(str(run), tmp_path, "cpu").run.task
    with pytest.raises(CheckpointError, match="lack its fixed noise"):
        task.take_graph_texts({})
