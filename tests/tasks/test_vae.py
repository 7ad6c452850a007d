"""The variational task: its bound, its codes, and what it says when the code is unused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mpt.engine.step.step import update
from mpt.errors import DataError
from mpt.losses.shared import variational
from mpt.tasks.shared.advice import FIRST_STEPS
from mpt.tasks.vae import Vae
from tests.tasks.generative import build, make_batch, take_step


def task_of(name: str, precision: str = "fp32") -> tuple[Vae, dict[str, torch.Tensor]]:
    run = build({"name": name, "image_size": 8, "hidden": 16, "latent_size": 4}, precision)
    assert isinstance(run.task, Vae)
    return run.task, make_batch(run, 16)


@pytest.mark.parametrize("name", ["vae", "cvae", "dvae"])
@pytest.mark.parametrize("mode", ["fp32", "amp", "O1", "O2"])
def test_the_bound_improves_in_every_mode(name: str, mode: str) -> None:
    run = build({"name": name, "image_size": 8, "hidden": 16, "latent_size": 4}, mode)
    batch = make_batch(run, 16)
    losses = [float(sum(update(run, run.phases[0], batch).losses.values())) for _ in range(30)]
    assert losses[-1] < losses[0] - 0.3


def test_the_losses_are_reconstruction_and_divergence_of_the_drawn_posterior() -> None:
    task, batch = task_of("vae")
    noise = torch.randn(16, 4)
    mean, log_variance = task.encoder(batch["image"])
    logits = task.decoder(mean + (0.5 * log_variance).exp() * noise)
    reconstruction, kl = task.losses({**batch, "posterior": noise})
    assert torch.allclose(
        reconstruction.value, variational.bernoulli_reconstruction(logits, batch["image"])
    )
    assert torch.allclose(kl.value, variational.gaussian_divergence(mean, log_variance))
    assert (reconstruction.name, kl.name) == ("reconstruction", "kl")


def test_a_denoising_model_sees_noise_and_answers_for_the_clean_image() -> None:
    task, batch = task_of("dvae")
    drawn = {
        **batch,
        "posterior": torch.zeros(16, 4),
        "corruption": torch.zeros_like(batch["image"]),
    }
    clean = task.bound(drawn)[0]
    noisy = task.bound({**drawn, "corruption": 10 * torch.ones_like(batch["image"])})[0]
    assert clean != noisy


def test_a_conditional_model_uses_the_label_on_both_sides() -> None:
    task, batch = task_of("cvae")
    other = (batch["label"] + 1) % 10
    assert not torch.equal(
        task.encode(batch["image"], batch["label"]), task.encode(batch["image"], other)
    )
    assert not torch.equal(
        task.reconstruct(batch["image"], batch["label"]), task.reconstruct(batch["image"], other)
    )


@torch.no_grad()
def test_evaluation_weighs_batches_by_their_size() -> None:
    task, batch = task_of("vae")
    small = {name: value[:4] for name, value in batch.items()}
    figures = task.conclude(
        [*map(task.evaluate_batch, (batch, small)), task.evaluate_samples(0, 64)]
    )
    both = [task.evaluate_batch(one)["divergence"].mean() for one in (batch, small)]
    assert figures["divergence"] == pytest.approx(float(16 * both[0] + 4 * both[1]) / 20, rel=1e-5)
    assert figures["negative_elbo"] == pytest.approx(
        figures["reconstruction"] + figures["divergence"]
    )
    assert {"frechet_distance", "diversity"} < set(figures)


@torch.no_grad()
def test_inference_encodes_and_reconstructs_inputs_and_samples_without_them() -> None:
    task, batch = task_of("vae")
    rebuilt = task.infer({"image": batch["image"][:3]}, 3, 0)
    assert rebuilt.tiles is not None
    assert rebuilt.tiles.shape == (6, 1, 8, 8)
    assert torch.equal(rebuilt.tiles[0], batch["image"][0])
    assert len(rebuilt.rows) == 3
    assert len(str(rebuilt.rows[0]["code"]).split()) == 4
    sampled = task.infer(None, 5, 0)
    assert sampled.tiles is not None
    assert sampled.tiles.shape == (5, 1, 8, 8)
    assert "interpolation" in sampled.figures


@torch.no_grad()
def test_images_without_labels_are_taken_for_the_class_that_suits_them_best() -> None:
    task, _ = task_of("cvae")
    with torch.no_grad():  # class n is drawn as n tenths of grey, whatever the code
        for parameter in task.decoder.parameters():
            parameter.zero_()
        first, last = task.decoder.decode.layers[0], task.decoder.decode.layers[2]
        first.weight[0, task.latent_size :] = torch.arange(10) / 10
        last.weight[:, 0] = 4.0
        last.bias.fill_(-2.0)
    grey = (torch.tensor([0.3, 0.7]) * 4 - 2).sigmoid().reshape(2, 1, 1, 1).expand(2, 1, 8, 8)
    shown = task.infer({"image": grey}, 2, 0)
    assert [row["class"] for row in shown.rows] == ["3", "7"]
    assert shown.outputs is not None
    assert torch.allclose(shown.outputs, grey, atol=1e-6)
    assert not shown.outputs.requires_grad
    named = task.infer({"image": grey, "label": torch.tensor([1, 2])}, 2, 0)
    assert [row["class"] for row in named.rows] == ["1", "2"]
    assert "class" not in task_of("vae")[0].infer({"image": grey}, 2, 0).rows[0]


@torch.no_grad()
def test_the_preview_shows_inputs_reconstructions_and_samples_the_same_each_time() -> None:
    task, batch = task_of("vae")
    first, again = task.preview(batch), task.preview(batch)
    assert first is not None
    assert again is not None
    assert torch.equal(first, again)
    assert torch.equal(first[:8], batch["image"][:8])
    assert first.shape == (8 + 8 + 4, 1, 8, 8)


@torch.no_grad()
def test_the_preview_of_a_conditional_model_has_a_column_for_each_class() -> None:
    task, batch = task_of("cvae")
    shown = task.preview(batch)
    assert shown is not None
    assert task.preview_columns == 10
    assert torch.equal(shown[:10], batch["image"][:10])
    assert shown.shape[0] == 10 + 10 + 4


def test_an_unused_code_is_told_once() -> None:
    task, _ = task_of("vae")
    assert task.advise({"divergence": 0.01}) == []  # too early to say
    task.after_step(FIRST_STEPS, 16 * FIRST_STEPS)
    assert task.advise({"divergence": 3.0}) == []
    assert "ignores the code" in task.advise({"divergence": 0.01})[0]
    assert task.advise({"divergence": 0.01}) == []


def test_micro_batches_change_nothing() -> None:
    finals = []
    for size in (None, 3):
        model = {"name": "vae", "image_size": 8, "hidden": 16, "latent_size": 4}
        run = build(model, optimizer={"name": "sgd", "lr": 0.01})
        run.adaptation.micro_batch_size = size
        torch.manual_seed(3)
        take_step(run)
        finals.append(
            torch.cat([p.detach().flatten() for p in run.task.trainable["vae"].parameters()])
        )
    assert torch.allclose(finals[0], finals[1], atol=1e-6)  # sums in another order


def test_a_missing_feature_file_is_met_before_training(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        build("vae", task={"inception_weights": str(tmp_path / "none.pth")})
