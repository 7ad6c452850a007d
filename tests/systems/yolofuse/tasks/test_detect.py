"""The detection task in the engine's step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mpt.engine.building.build import build_datasets
from mpt.engine.state.evaluation import evaluate, infer, preview
from mpt.engine.state.moving_averages import follow, follow_step
from mpt.engine.step.step import back_propagate, update
from mpt.errors import ConfigError, DataError
from mpt.seams import Batch, DataSpec, FieldSpec, Run
from mpt.seams.phase_losses import draw_batch
from mpt.systems.yolofuse.losses.shared.detection import detection_sums
from tests.systems.yolofuse.published import read_json
from tests.systems.yolofuse.tasks.small import build, config


def gradients(run: Run, batch: Batch) -> list[torch.Tensor]:
    phase = run.phases[0]
    back_propagate(run, phase, draw_batch(run, phase, batch))
    return [p.grad.clone() for p in run.task.trainable["net"].parameters() if p.grad is not None]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_lowers_the_loss_and_leaves_it_finite(precision: str) -> None:
    run, batch = build(precision)
    losses = []
    for step in range(3):
        outcome = update(run, run.phases[0], batch)
        follow_step(run, step)
        assert list(outcome.losses) == ["box", "class", "distribution"]
        losses.append(float(sum(outcome.losses.values())))
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]


def test_losses_assignment_and_decoding_are_computed_in_float32_under_autocast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[torch.dtype] = []

    def watch(raw: Any, *rest: Any) -> Any:
        seen.extend(level.dtype for level in raw)
        assert not torch.is_autocast_enabled("cpu")
        return detection_sums(raw, *rest)

    monkeypatch.setattr("mpt.systems.yolofuse.tasks.detect.detection_sums", watch)
    run, batch = build("bf16")
    update(run, run.phases[0], batch)
    assert seen == [torch.float32] * 3


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    """Exactly but for rounding: in float64, with BatchNorm's statistics fixed, which are a batch's own."""
    results = []
    for size in (None, 1, 3):
        run, batch = build()
        run.adaptation.micro_batch_size = size
        run.task.trainable["net"].double().eval()
        batch = {
            name: value.double() if value.is_floating_point() else value
            for name, value in batch.items()
        }
        run.task.sums = lambda raw, boxes, classes, mask, run=run: detection_sums(
            raw, run.task.net.strides, boxes, classes, mask
        )
        results.append(gradients(run, batch))
    for other in results[1:]:
        for whole, parts in zip(results[0], other, strict=True):
            torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-9)


def test_a_step_of_the_warm_up_is_that_of_the_samples_it_takes() -> None:
    """Half the batch, whole or in micro-batches, and the whole of it once the warm-up is over."""
    growing = {"name": "sgd_warmup", "warmup": 4, "accumulation": 2}
    found = []
    for optimizer, count, size in (
        (growing, 4, None),
        (growing, 4, 1),
        ({"name": "sgd_warmup"}, 2, None),
    ):
        run, batch = build(optimizer=optimizer)
        run.adaptation.micro_batch_size = size
        run.task.trainable["net"].eval()
        batch = {name: value[:count] for name, value in batch.items()}
        found.append(gradients(run, batch))
    for cut, parts, alone in zip(*found, strict=True):
        assert torch.equal(cut, alone)
        # float32, summed in another order
        torch.testing.assert_close(parts, alone, rtol=1e-3, atol=1e-4)
    run, batch = build(optimizer=growing)
    sizes = []
    for _ in range(4):
        sizes.append(len(draw_batch(run, run.phases[0], batch)["rgb"]))
        run.phases[0].optimizer.step()
    assert sizes == [2, 2, 4, 4]


def test_a_batch_without_boxes_trains() -> None:
    run, batch = build()
    outcome = update(run, run.phases[0], {**batch, "box_mask": torch.zeros_like(batch["box_mask"])})
    assert outcome.finite
    assert all(math.isfinite(float(loss)) for loss in outcome.losses.values())


def test_the_average_follows_with_the_published_decay_and_takes_the_statistics_along() -> None:
    for steps, decay in read_json("recipe.json.gz")["ema_decay"].items():
        assert 0.9999 * (1 - math.exp(-int(steps) / 2000)) == pytest.approx(decay, rel=1e-9)
    run, batch = build()
    net, twin = run.task.modules["net"], run.task.modules["net_ema"]
    update(run, run.phases[0], batch)
    before = {name: value.clone() for name, value in twin.state_dict().items()}
    follow(twin, net, 0.75, averages_buffers=True)
    now = net.state_dict()
    for name, value in twin.state_dict().items():
        new = now[name]
        expected = torch.lerp(before[name], new, 0.25) if value.is_floating_point() else new
        torch.testing.assert_close(value, expected)


def test_another_size_at_each_step_moves_the_boxes_along() -> None:
    run, batch = build(task={"multi_scale": 0.5})
    sizes = set()
    for step in range(12):
        run.task.after_step(step, 0)
        resized = run.task.draw(batch, run.phases[0])
        height, width = resized["rgb"].shape[2:]
        assert height % 32 == width % 32 == 0
        torch.testing.assert_close(resized["boxes"] / width, batch["boxes"] / 64)
        sizes.add(width)
    assert sizes <= {32, 64, 96}
    assert len(sizes) > 1
    again = run.task.draw(batch, run.phases[0])
    assert torch.equal(again["rgb"], resized["rgb"])


def test_evaluation_counts_every_picture_once_in_batches_of_any_size() -> None:
    settings = config()
    run, _ = build()
    test = build_datasets(settings)[1]
    first, second = evaluate(run, test, 6), evaluate(run, test, 4)
    assert first == second
    assert {"map50", "map50_95", "precision", "recall", "map50_article"} <= set(first)


def test_the_best_is_by_the_figure_of_the_settings_and_of_no_other_after_a_resume() -> None:
    plain, strict = build()[0].task, build(task={"best_by": "map50_95"})[0].task
    assert (plain.metric, strict.metric) == ("map50", "map50_95")
    plain.load_state_dict({"updates": 3, "samples_seen": 12})  # of a run from before that setting
    strict.load_state_dict({**strict.state_dict(), "updates": 3})
    assert strict.state_dict() == {"updates": 3, "samples_seen": 0, "best_by": "map50_95"}
    with pytest.raises(
        ConfigError, match=r"task.best_by: this run's best is by map50, not map50_95"
    ):
        strict.load_state_dict(plain.state_dict())


def test_perfect_detections_are_worth_one() -> None:
    run, batch = build()
    rows = torch.cat(
        (
            batch["boxes"],
            batch["box_mask"][..., None].float() * 0.9,
            batch["classes"][..., None].float(),
        ),
        2,
    )
    evidence = {"found": rows, **{name: batch[name] for name in ("boxes", "classes", "box_mask")}}
    assert run.task.conclude([evidence])["map50_95"] == pytest.approx(1.0)


def test_inference_draws_and_lists_what_is_found() -> None:
    run, batch = build(task={"confidence": 0.0001})
    made = infer(run, batch, 4)
    assert len(made.rows) == 4
    assert made.rows[0]["boxes"].startswith("person ")
    assert set(made.figures) == {f"detected-{n:04d}" for n in range(4)}
    tiles = preview(run, batch)
    assert tiles is not None
    assert tiles.shape[1] == 3
    assert tiles.shape[3] == 2 * tiles.shape[2]


def test_a_data_set_of_one_camera_is_refused_for_two() -> None:
    with pytest.raises(DataError, match="it needs 'ir' of each sample"):
        build(dataset={"name": "rgb_ir_scenes", "count": 4, "test_count": 1, "cameras": "rgb"})


def test_one_camera_trains_alone() -> None:
    run, batch = build(
        model={"name": "yolofuse", "fusion": "ir", "image_size": 64},
        dataset={"name": "rgb_ir_scenes", "count": 4, "test_count": 1, "cameras": "ir"},
    )
    assert run.task.inputs == ("ir",)
    assert update(run, run.phases[0], batch).finite


def test_the_task_needs_boxes() -> None:
    from mpt.systems.yolofuse.tasks.detect import build as build_task

    with pytest.raises(DataError, match="task detect: it needs 'boxes'"):
        build_task(
            None, None, {}, DataSpec({"rgb": FieldSpec((3, 64, 64), torch.float32)}, 1), None
        )


def test_boxes_are_judged_as_they_are_given_out_cut_at_the_edges_of_the_picture() -> None:
    run, batch = build(dataset={"name": "rgb_ir_scenes", "count": 8, "test_count": 6})
    found = torch.tensor([[[-5.0, 3, 40, 80, 0.9, 0], [0, 0, 0, 0, 0, 0]]]).repeat(4, 1, 1)
    shown = torch.tensor([[0.0, 8, 64, 56]] * 4)
    evidence = run.task.evidence({**batch, "shown": shown}, found)
    assert evidence["found"][0].tolist()[0] == pytest.approx([0, 8, 40, 56, 0.9, 0])
    assert evidence["found"][0, 1, 4] == 0
    # data without a border, or of your own, are cut nowhere
    assert torch.equal(run.task.evidence(batch, found)["found"], found)
    _, test = build_datasets(config())
    assert test.fetch([0, 1], 0)["shown"].tolist() == [[0, 0, 64, 64]] * 2
