"""The task: every objective trains in every mode, conditions are left out, samplers agree with one another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.engine.state.evaluation import evaluate_batches, infer, preview
from mpt.engine.state.state import capture, restore
from mpt.engine.step.step import update
from mpt.errors import ConfigError
from mpt.seams import Batch, DataSpec, FieldSpec, Run
from mpt.systems.diffusion.nn.shared.embedding import from_ticks, to_ticks
from mpt.systems.diffusion.tasks.diffusion import Diffusion

FIELDS = {"image": FieldSpec((1, 8, 8), torch.float32), "label": FieldSpec((), torch.int64)}
SMALL = {"name": "small_denoiser", "features": 8, "blocks": 1, "embedding": 16}


def build(precision: Any = "fp32", model: Any = SMALL, **task: Any) -> Run:
    config = {
        "model": dict(model),
        "dataset": "digits",
        "precision": precision,
        "train": {"steps": 4, "batch_size": 8},
        "task": {"metric_samples": 32, "preview_count": 4, "sampling_steps": 3, **task},
    }
    return build_run(
        load_config(config), torch.device("cpu"), DataSpec(FIELDS, 64, tuple("0123456789"))
    )


def a_batch(size: int = 8) -> Batch:
    numbers = torch.Generator().manual_seed(0)
    return {"image": torch.rand(size, 1, 8, 8, generator=numbers), "label": torch.arange(size) % 10}


def task_of(run: Run) -> Diffusion:
    assert isinstance(run.task, Diffusion)
    return run.task


@pytest.mark.parametrize("mode", ["fp32", "amp", "O1", "O2", "bf16-pure"])
@pytest.mark.parametrize("objective", ["flow", "epsilon", "v", "edm"])
def test_every_objective_trains_and_samples_in_every_mode(objective: str, mode: str) -> None:
    run = build(mode, objective=objective)
    before = [p.clone() for p in task_of(run).net.parameters()]
    for _ in range(3):  # the last layer begins at zero, and nothing before it has a gradient
        assert update(run, run.phases[0], a_batch()).finite
    after = list(task_of(run).net.parameters())
    assert sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) > 0.9 * len(after)
    tiles = preview(run, a_batch())
    assert tiles is not None
    assert tiles.dtype == torch.float32
    assert tiles.isfinite().all()


def test_the_network_sees_levels_in_float32_whatever_the_mode() -> None:
    """In bfloat16 the levels 801 and 803 would be one."""
    times = torch.tensor([801.0, 803.0, 0.1, 999.9])
    torch.testing.assert_close(from_ticks(to_ticks(times)), times, rtol=0, atol=1e-6)
    run = build("bf16-pure")
    seen = []
    task_of(run).net.time.first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    task_of(run).net(torch.zeros(2, 1, 8, 8), to_ticks(times[:2]), torch.zeros(2, dtype=torch.long))
    assert not torch.equal(seen[0][0], seen[0][1])


def test_the_loss_counts_by_mask_and_by_weight() -> None:
    run = build(unmasked_weight=0.25)
    numbers = torch.Generator().manual_seed(1)
    mask = (torch.rand(8, 1, 8, 8, generator=numbers) > 0.5).float()
    weight = torch.tensor([1.0] * 4 + [0.5] * 4)
    batch = task_of(run).draw({**a_batch(), "mask": mask, "weight": weight}, run.phases[0])
    (loss,) = task_of(run).losses(batch)
    clean, level, task = 2 * batch["image"] - 1, batch["level"], task_of(run)
    with torch.no_grad():
        answer = task.answer_to(clean, batch["noise"], level, task.conditions(batch))
    places = (answer - (batch["noise"] - clean)).square() * torch.where(mask > 0, 1.0, 0.25)
    torch.testing.assert_close(loss.value, (places.flatten(1).mean(1) * weight).mean())


def test_conditions_are_left_out_for_a_share_of_the_samples() -> None:
    run = build(condition_dropout=0.25)
    batch = task_of(run).draw(a_batch(400), run.phases[0])
    (seen,) = task_of(run).conditions(batch)
    left_out = seen == 10
    assert 0.15 < left_out.float().mean() < 0.35
    assert torch.equal(seen[~left_out], batch["label"][~left_out])


def test_random_inputs_are_drawn_before_a_batch_is_split() -> None:
    whole, parts = build(), build()
    config = load_config({**parts.config.to_data(), "memory": {"micro_batch": 4}})
    parts = build_run(config, torch.device("cpu"), DataSpec(FIELDS, 64, tuple("0123456789")))
    losses = []
    for run in (whole, parts):
        torch.manual_seed(1)
        losses.append(float(update(run, run.phases[0], a_batch()).losses["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_euler_and_heun_agree_in_many_steps() -> None:
    made = []
    for sampler in ("euler", "heun"):
        run = build(sampler=sampler, sampling_steps=400)
        torch.manual_seed(2)
        torch.nn.init.normal_(task_of(run).net.output.weight, std=0.05)
        made.append(preview(run, a_batch()))
    torch.testing.assert_close(made[0], made[1], rtol=0, atol=0.01)


def test_guidance_of_one_is_the_conditional_answer_and_of_zero_the_unconditional() -> None:
    answers = {}
    label = torch.tensor([1, 2])
    for scale in (0.0, 0.5, 1.0):
        run = build(guidance=scale)
        torch.manual_seed(2)
        torch.nn.init.normal_(task_of(run).net.output.weight)
        torch.nn.init.normal_(task_of(run).net.label.weight)
        noise, ticks = torch.randn(2, 1, 8, 8), to_ticks(torch.tensor([500.0, 500.0]))
        with torch.no_grad():
            answers[scale] = task_of(run).guided(noise, ticks, (label,))
            without = task_of(run).net(noise, ticks, torch.tensor([10, 10]))
    torch.testing.assert_close(answers[0.0], without)
    torch.testing.assert_close(answers[0.5], (answers[0.0] + answers[1.0]) / 2)
    assert not torch.allclose(answers[0.0], answers[1.0])


def test_an_evaluation_has_figures_and_a_table_by_level() -> None:
    run = build()
    figures = evaluate_batches(run, [a_batch(8), a_batch(4)], 8)
    assert {"test_loss", "frechet_distance", "diversity"} <= set(figures)
    assert run.task.details is not None
    section = run.task.details["section"]
    assert len(section["table"]["rows"]) == 10
    # it answers 0 still
    assert all(share == pytest.approx(1.0) for share in section["charts"][0]["lines"][0]["y"])


def test_inference_shows_samples_ways_and_what_was_seen_over_time() -> None:
    made = infer(build(), None, 5)
    assert made.tiles is not None
    assert made.tiles.shape == (5, 1, 8, 8)
    assert made.figures["over_time"].shape == (5 * 8, 1, 8, 8)
    assert set(made.figures) == {"truncated", "interpolation", "over_time"}


def test_training_goes_on_from_a_checkpoint_bit_for_bit() -> None:
    run = build(model={**SMALL, "labels": "ignore"}, objective="edm")
    update(run, run.phases[0], a_batch())
    saved = copy.deepcopy(capture(run))
    random = torch.get_rng_state()
    update(run, run.phases[0], a_batch())
    after = [p.clone() for p in task_of(run).net.parameters()]
    other = build(model={**SMALL, "labels": "ignore"}, objective="edm")
    restore(other, saved)
    torch.set_rng_state(random)
    update(other, other.phases[0], a_batch())
    assert all(
        torch.equal(a, b) for a, b in zip(after, task_of(other).net.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"min_snr": 5.0}, "task.min_snr: flow has no such weighting"),
        ({"sampler": "DDIMScheduler"}, "task.sampler: DDIMScheduler does not fit this objective"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(task: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(**task)
