"""One task for every adversarial model: in every mode, exact under micro-batches, and heard when it goes wrong."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from mpt.config.options import ModelOptions
from mpt.engine.state.evaluation import apart_from_training, evaluate_batches, infer, preview
from mpt.engine.step.step import update
from mpt.errors import ConfigError
from mpt.seams import Batch, Precision
from mpt.tasks import gan
from mpt.tasks.gan import Gan
from mpt.tasks.shared.advice import FIRST_STEPS
from mpt.tasks.shared.samples import PATH_STEPS, PATHS, interpolate
from tests.tasks.generative import ADVERSARIAL, build, make_batch, take_step, weights


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("mode", ["fp32", "amp", "O1", "O2"])
def test_every_model_trains_every_network_in_every_mode(name: str, mode: str) -> None:
    run = build(name, mode)
    before = weights(run)
    for step in range(2):
        for done in take_step(run, step).values():
            assert done.finite
            assert all(torch.isfinite(loss) for loss in done.losses.values())
    after = weights(run)
    for module, old in before.items():
        moved = [not torch.equal(a, b) for a, b in zip(old, after[module], strict=True)]
        # A critic's last bias cancels out of real minus fake; all else must have a gradient.
        assert sum(moved) >= len(moved) - 1


def test_a_step_is_a_critics_step_and_the_generator_follows_every_fifth() -> None:
    run = build("wgan")
    assert {phase.name: phase.every for phase in run.phases} == {"disc": 1, "gen": 5}
    assert {
        phase.name: phase.every for phase in build("wgan", task={"critic_steps": 2}).phases
    } == {
        "disc": 1,
        "gen": 2,
    }


@pytest.mark.parametrize("mode", ["fp32", "O2"])
def test_critic_weights_stay_within_the_clip(mode: str) -> None:
    run = build("wgan", mode)
    take_step(run)
    disc = run.task.trainable["disc"]
    largest = max(
        p.abs().max().item() for p in [*disc.parameters(), *run.precision.parameters(disc)]
    )
    assert largest <= 0.0101  # half precision rounds 0.01


@pytest.mark.parametrize("mode", ["amp", "O1"])
def test_the_gradient_penalty_runs_in_float32_where_scores_run_in_half(mode: str) -> None:
    run = build("wgan_gp", mode)
    seen: list[torch.dtype] = []
    first = next(m for m in run.task.trainable["disc"].modules() if isinstance(m, nn.Linear))
    first.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    update(run, run.phases[0], make_batch(run))
    assert seen == [torch.bfloat16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("mode", ["amp", "O1", "O2"])
def test_penalised_float16_losses_are_scaled_and_their_step_is_close_to_float32(mode: str) -> None:
    def gradient(precision: Any) -> Tensor:
        run = build("wgan_gp", precision)
        torch.manual_seed(5)
        caught: list[Tensor] = []
        disc = run.task.trainable["disc"]

        def keep(*_: Any) -> None:
            caught.append(
                torch.cat(
                    [p.grad.flatten() for p in run.precision.parameters(disc) if p.grad is not None]
                )
            )

        run.optimizers["disc"].register_step_pre_hook(keep)
        update(run, run.phases[0], make_batch(run))
        return caught[0]

    exact = gradient("fp32")
    half = gradient({"mode": mode, "dtype": "float16", "init_scale": 256.0})
    # Ten bits of mantissa, squared once in the penalty.
    assert (half - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("name", ["lsgan", "wgan_gp", "began", "bigan", "aae"])
def test_micro_batches_change_nothing(name: str) -> None:
    results = []
    for size in (None, 3):
        run = build(name, optimizer={"name": "sgd", "lr": 0.1})
        run.adaptation.micro_batch_size = size
        torch.manual_seed(7)
        take_step(run)
        results.append((weights(run), run.task.state_dict()))
    (whole, state), (split, split_state) = results
    for module in whole:
        for a, b in zip(whole[module], split[module], strict=True):
            assert torch.allclose(a, b, atol=1e-5)  # sums in another order
    assert torch.allclose(state["balance"], split_state["balance"], atol=1e-5)


def test_the_balance_moves_and_is_saved() -> None:
    run = build("began", task={"balance_rate": 0.1, "balance": 5.0})
    take_step(run)
    saved = run.task.state_dict()
    assert saved["balance"] > 0
    other = build("began")
    other.task.load_state_dict(saved)
    assert other.task.state_dict()["balance"] == saved["balance"]


def test_the_task_may_change_the_models_objective() -> None:
    model = {"name": "dcgan", "image_size": 16, "features": 4, "latent_size": 8}
    plain, least = build(model), build(model, task={"objective": "least_squares"})
    assert isinstance(plain.task, Gan)
    assert isinstance(least.task, Gan)
    score = torch.tensor([1.0, 1.0])
    assert least.task.parts.real(score) == 0 < plain.task.parts.real(score)
    assert all(done.finite for done in take_step(least).values())


@pytest.mark.parametrize(
    ("model", "objective", "way_out"),
    [
        ("dcgan", "balanced", "began or ebgan"),
        ("lsgan", "energy", "began or ebgan"),
        ("began", "nonsaturating", "energy or balanced, or set model.critic=scorer"),
    ],
)
def test_an_objective_on_energies_wants_a_critic_that_gives_them(
    model: str, objective: str, way_out: str
) -> None:
    with pytest.raises(ConfigError, match=rf"task\.objective: {objective}.*{way_out}"):
        build({"name": model, "image_size": 16}, task={"objective": objective})


@torch.no_grad()
@pytest.mark.parametrize("name", ["cgan", "acgan", "infogan"])
def test_conditional_samples_go_through_the_classes(name: str) -> None:
    task = build(name).task
    assert isinstance(task, Gan)
    latent = task.sampler.latents(1, seed=0).expand(3, -1)
    images = task.generate(latent, first=4)
    assert not torch.equal(images[0], images[1])
    # class 5 again
    assert torch.allclose(images[1], task.generate(latent[:1], first=15)[0], atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", ["cgan", "infogan"])
def test_grids_have_a_column_and_paths_a_row_for_each_class(name: str) -> None:
    task = build(name).task
    assert isinstance(task, Gan)
    made = task.infer(None, 20, seed=3)
    assert made.columns == made.figure_columns["truncated"] == task.preview_columns == 10
    assert made.figure_columns["interpolation"] == PATH_STEPS
    paths = made.figures["interpolation"].unflatten(0, (-1, PATH_STEPS))
    assert len(paths) == 10
    end = task.sampler.latents(20, 3)[18:19]
    assert torch.allclose(paths[9, 0], task.generate(end, first=9)[0], atol=1e-5)
    many = dataclasses.replace(task.sampler, classes=100)
    assert many.columns is None


def test_previews_and_inference_depend_on_weights_alone() -> None:
    run = build("vanilla_gan")
    batch = make_batch(run)
    first, again = preview(run, batch), preview(run, batch)
    assert first is not None
    assert again is not None
    assert torch.equal(first, again)
    made = infer(run, None, 5)
    assert made.tiles is not None
    assert made.tiles.shape == (5, 1, 8, 8)
    assert made.figures["interpolation"].shape[0] == PATHS * PATH_STEPS
    assert not torch.equal(made.figures["truncated"], made.tiles)


@pytest.mark.parametrize("name", ["aae", "bigan"])
def test_models_with_an_encoder_reconstruct_inputs(name: str) -> None:
    run = build(name, "amp")
    task = run.task
    assert isinstance(task, Gan)
    assert task.inputs == ("image",)
    assert task.optional_inputs
    assert build("lsgan").task.inputs == ()
    image = make_batch(run, 3)["image"]
    made = infer(run, {"image": image}, 3)
    assert made.tiles is not None
    assert torch.equal(made.tiles[::2], image)
    assert len(str(made.rows[0]["code"]).split()) == task.latent_size
    assert made.outputs is not None
    assert made.outputs.dtype == torch.float32


def test_paths_keep_the_length_of_normal_latents_and_end_where_they_should() -> None:
    numbers = torch.Generator().manual_seed(0)
    first, last = torch.randn(2, 64, generator=numbers)
    last = last * first.norm() / last.norm()
    way = interpolate(first, last, 9, "normal")
    assert torch.allclose(way[0], first, atol=1e-5)
    assert torch.allclose(way[-1], last, atol=1e-5)
    assert torch.allclose(way.norm(dim=1), first.norm().expand(9), rtol=1e-4)
    assert torch.allclose(interpolate(first, last, 3, "uniform")[1], (first + last) / 2)


def test_evaluation_gives_a_distance_and_a_diversity() -> None:
    run = build("vanilla_gan")
    figures = evaluate_batches(run, [make_batch(run, 32), make_batch(run, 32, seed=1)], chunk=32)
    assert set(figures) == {"frechet_distance", "diversity"}
    assert figures["frechet_distance"] > 0


def test_what_the_distance_is_measured_in_is_said() -> None:
    digits, colour = build("vanilla_gan").task, build("stylegan2").task
    assert isinstance(digits, Gan)
    assert isinstance(colour, Gan)
    assert "digit-classifier-32" in digits.metric_note
    assert "random-conv-48" in colour.metric_note


def test_a_won_discriminator_and_a_collapse_are_told_once() -> None:
    task = build("vanilla_gan").task
    assert isinstance(task, Gan)
    assert task.advise({"disc/real": 0.5, "disc/fake": 0.5, "gen/loss": 1.0}) == []
    assert task.advise({"disc/real": 0.002, "disc/fake": 0.003}) == []  # too early to say
    assert task.advise({"frechet_distance": 150.0, "diversity": 0.001}) == []
    task.after_step(FIRST_STEPS, 64 * FIRST_STEPS)
    (won,) = task.advise({"disc/real": 0.002, "disc/fake": 0.003})
    assert "it has won" in won
    assert "Try" in won
    assert task.advise({"disc/real": 0.002, "disc/fake": 0.003}) == []
    (collapsed,) = task.advise({"frechet_distance": 40.0, "diversity": 0.1})
    assert "collapsed" in collapsed
    assert "task.objective=wasserstein" in collapsed
    balanced = build("began").task
    assert isinstance(balanced, Gan)
    balanced.after_step(FIRST_STEPS, 0)
    # its critic bars the other
    assert "task.balance nearer to 1" in balanced.advise({"diversity": 0.1})[0]
    critic = build("wgan").task
    assert isinstance(critic, Gan)
    critic.after_step(FIRST_STEPS, 64 * FIRST_STEPS)
    # a critic's loss may be anything
    assert critic.advise({"disc/real": 0.0, "disc/fake": 0.0}) == []


@pytest.mark.parametrize("name", [*ADVERSARIAL, "dcgan"])
def test_advice_can_be_followed_and_then_says_something_else(name: str) -> None:
    small = {
        "name": name,
        "image_size": 16,
        **({"features": 4} if name == "dcgan" else {"hidden": 16}),
    }
    task = build(small).task
    assert isinstance(task, Gan)
    advice = task.remedy()
    if name == "began":
        assert advice == "a task.balance nearer to 1"
        return
    wishes = {
        key: yaml.safe_load(value) for key, value in re.findall(r"task\.(\w+)=([\w.]+)", advice)
    }
    assert wishes
    followed = build(small, task=wishes).task
    assert isinstance(followed, Gan)
    assert followed.remedy() != advice


def test_a_generator_that_does_not_say_how_long_its_latents_are_is_named() -> None:
    data = build("wgan").data
    networks = {"gen": nn.Identity(), "disc": nn.Identity()}
    with pytest.raises(
        ConfigError, match=r"network 'gen' does not say how long .*self\.latent_size"
    ):
        gan.build(gan.Settings(), ModelOptions(), networks, data, Precision())


def test_pulling_codes_apart_is_refused_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match=r"task\.pull_away: 0\.1 .*ebgan"):
        build("lsgan", task={"pull_away": 0.1})


def test_the_average_is_what_is_sampled() -> None:
    run = build("vanilla_gan", task={"ema": 0.9, "metric_samples": 8})
    task = run.task
    assert isinstance(task, Gan)
    take_step(run)
    with apart_from_training(run):
        before = task.sampler.sample(2, 0)
    with torch.no_grad():
        for parameter in task.gen.parameters():
            parameter.zero_()
    with apart_from_training(run):
        assert torch.equal(task.sampler.sample(2, 0), before)


def test_a_pull_away_term_keeps_codes_apart() -> None:
    plain, apart = build("ebgan"), build("ebgan", task={"pull_away": 10.0})
    losses = []
    for run in (plain, apart):
        torch.manual_seed(1)
        losses.append(update(run, run.phases[1], make_batch(run)).losses)
    assert losses[1]["adversarial"] == losses[0]["loss"]
    assert losses[1]["pull_away"] > 0.01


@pytest.mark.parametrize(
    ("name", "disc", "gen"),
    [
        ("infogan", ["real", "fake"], ["adversarial", "code"]),
        ("acgan", ["real", "real_classes", "fake", "fake_classes"], ["adversarial", "classes"]),
        ("bigan", ["real", "fake"], ["adversarial", "encoder"]),
    ],
)
def test_each_part_of_a_loss_has_a_name(name: str, disc: list[str], gen: list[str]) -> None:
    done = take_step(build(name))
    assert (list(done["disc"].losses), list(done["gen"].losses)) == (disc, gen)


def test_labels_of_the_batch_reach_both_networks() -> None:
    run = build("cgan")
    task = run.task
    assert isinstance(task, Gan)
    batch: Batch = task.draw(make_batch(run), run.phases[0])
    other = {**batch, "label": (batch["label"] + 1) % 10}
    assert not torch.equal(task.fake_side(batch)[0], task.fake_side(other)[0])
    side = task.real_side(batch)
    assert not torch.equal(
        task.judge(side, batch, real=True).score, task.judge(side, other, real=True).score
    )


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="float16 kernels and autocast are checked on a CUDA device",
)
@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("mode", ["amp", "O1", "O2"])
def test_float16_on_a_gpu_takes_twenty_finite_steps(name: str, mode: str) -> None:
    run = build(name, {"mode": mode, "dtype": "float16", "init_scale": 1024.0}, device="cuda")
    for step in range(20):
        take_step(run, step)
    for module in run.task.trainable.values():
        assert all(torch.isfinite(parameter).all() for parameter in module.parameters())
