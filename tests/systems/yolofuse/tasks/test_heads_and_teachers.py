"""A network with two heads (yolo26) under the task, and a network that learns a teacher's answers."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mpt.api import train
from mpt.config.load import load_config
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.state.state import capture, restore
from mpt.engine.step.step import back_propagate, update
from mpt.errors import CheckpointError, ConfigError
from mpt.inference.trained import open_trained
from mpt.seams.phase_losses import draw_batch
from mpt.systems.yolofuse.losses.shared.detection import ONE_TO_MANY, ONE_TO_ONE, detection_sums
from mpt.systems.yolofuse.losses.shared.distillation import teacher_sums
from mpt.systems.yolofuse.tasks.detect import Detect
from tests.systems.yolofuse.tasks.small import build, config

STACKED = {"name": "yolofuse", "fusion": "data", "family": "yolo26", "image_size": 64}
STRIDES = (8, 16, 32)


def built(**sections: Any) -> tuple[Detect, dict[str, Tensor]]:
    run, batch = build(**sections)
    assert isinstance(run.task, Detect)
    return run.task, run.task.draw(batch, run.phases[0])


def test_both_heads_are_trained_by_shares_that_change_from_epoch_to_epoch() -> None:
    task, batch = built(model=STACKED, task={"name": "detect", "one_to_many_epochs": 11})
    raw = [level.detach() for level in task.net(*task.pictures(batch))]
    truth = batch["boxes"], batch["classes"], batch["box_mask"]
    many = detection_sums(raw[:3], STRIDES, *truth, ONE_TO_MANY._replace(least_side=16.0), 1)
    once = detection_sums(raw[3:], STRIDES, *truth, ONE_TO_ONE._replace(least_side=16.0), 1)
    for epoch, share in ((0, 0.8), (4, 0.52), (30, 0.1)):
        task.after_step(epoch * 2, epoch * 8)
        losses = task.losses(batch)
        divisor = losses[0].weight.clamp(min=1)
        found = float(sum(loss.value.detach() for loss in losses) / divisor)
        gains = (7.5, 0.5, 1.5)
        sides = [sum(g * float(v) for g, v in zip(gains, s[:3], strict=True)) / max(1, float(s.normaliser))
                 for s in (many, once)]  # fmt: skip
        assert found == pytest.approx(4 * (share * sides[0] + (1 - share) * sides[1]), rel=1e-4)


def test_the_epoch_of_the_shares_is_saved_and_restored() -> None:
    task, _ = built(model=STACKED)
    task.after_step(9, 80)
    other, _ = built(model=STACKED)
    other.load_state_dict(task.state_dict())
    assert other.share_of_many == task.share_of_many < 0.8


def test_a_one_to_one_head_answers_without_suppression_unless_it_is_switched_off() -> None:
    task, batch = built(model=STACKED, task={"name": "detect", "confidence": 1e-6, "iou": 0.01})
    other, _ = built(
        model=STACKED, task={"name": "detect", "confidence": 1e-6, "iou": 0.01, "one_to_one": False}
    )
    with torch.no_grad():
        task.net.head.one2one_cv3[0][-1].bias += 0.1  # both heads begin alike
        other.net.load_state_dict(task.net.state_dict())
        task.net.eval(), other.net.eval()
        ours, theirs = task.detections(batch), other.detections(batch)
    places = 8 * 8 + 4 * 4 + 2 * 2
    assert int((ours[0, :, 4] > 0).sum()) == places  # overlapping boxes stay
    assert 0 < int((theirs[0, :, 4] > 0).sum()) < places
    assert not torch.equal(task.predict(batch)[1], other.predict(batch)[1])


def trained(folder: Path, name: str, **sections: Any) -> str:
    """Train for a step and return the run's path."""
    optimizer = {"name": "sgd_warmup", "warmup": 0, "lr": 1e-3}
    settings = config(
        train={"steps": 1, "batch_size": 4, "threads": 1}, optimizer=optimizer, **sections
    )
    settings = load_config({**yaml.safe_load(settings.to_yaml()), "name": name})
    return str(train(settings, runs=folder).path)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained(tmp_path_factory.mktemp("runs"), "teacher", model=STACKED)


@pytest.mark.parametrize("family", ["yolov8", "yolo26"])
def test_a_teacher_adds_a_loss_and_is_no_part_of_what_is_saved(teacher: str, family: str) -> None:
    task, batch = built(
        model={**STACKED, "family": family, "fusion": "rgb"},
        task={"name": "detect", "teacher": teacher},
    )
    losses = {loss.name: loss for loss in task.losses(batch)}
    losses["teacher"].value.backward()
    head = task.net.head
    assert all(branch[-1].bias.grad.abs().sum() > 0 for branch in (*head.cv2, *head.cv3))
    assert set(task.modules) == {"net", "net_ema"}
    assert task.teacher is not None
    assert not any(parameter.requires_grad for parameter in task.teacher.network.parameters())
    without = [loss for loss in losses.values() if loss.name != "teacher"]
    plain, _ = built(model={**STACKED, "family": family, "fusion": "rgb"})
    plain.net.load_state_dict(task.net.state_dict())
    assert [loss.name for loss in plain.losses(batch)] == [loss.name for loss in without]


def test_a_taught_training_adds_up_over_micro_batches_and_resumes_to_the_bit(teacher: str) -> None:
    sections: dict[str, Any] = {
        "model": {**STACKED, "family": "yolov8", "fusion": "rgb"},
        "task": {"name": "detect", "teacher": teacher},
        "optimizer": {"name": "sgd_warmup", "warmup": 0, "lr": 1e-3},
    }
    run, batch = build(**sections)
    phase = run.phases[0]
    update(run, phase, batch)
    saved = copy.deepcopy(capture(run))
    assert set(saved["modules"]) == {"net", "net_ema"}
    resumed, _ = build(**sections)
    restore(resumed, saved)
    for one in (run, resumed):
        update(one, one.phases[0], batch)
    found = [one.task.modules["net"].state_dict() for one in (run, resumed)]
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    gradients = []
    for size in (None, 1):
        run.adaptation.micro_batch_size = size
        run.task.modules["net"].zero_grad()
        run.task.modules["net"].eval()  # a batch has statistics of its own
        back_propagate(run, phase, draw_batch(run, phase, batch))
        gradients.append(
            [p.grad.clone() for p in run.task.modules["net"].parameters() if p.grad is not None]
        )
    for whole, parts in zip(*gradients, strict=True):
        # float32, summed in another order
        torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-3)


def test_the_distance_from_a_teacher_is_zero_at_its_own_answers_only() -> None:
    raw = [torch.randn(2, 66, side, side) for side in (8, 4, 2)]
    sums = teacher_sums(raw, raw, STRIDES, 16, 16)
    assert float(sums.kind) == pytest.approx(0, abs=1e-3)
    assert float(sums.box) == pytest.approx(0, abs=1e-4)
    other = [level.clone() for level in raw]
    other[1][:, 3] += 1
    other[2][:, 65] += 1
    sums = teacher_sums(other, raw, STRIDES, 16, 16)
    assert float(sums.kind) > 0.01
    assert float(sums.box) > 0.01


def test_a_teachers_box_counts_by_its_likeliest_class_and_as_the_mean_of_four_sides() -> None:
    """Of two bins at each side the teacher says a half each, the network .9 and .1: .5 ln(.5 / .9) + .5 ln(.5 / .1)."""
    kinds = torch.tensor([-20.0, 1.0986123])  # the second class, with a probability of .75
    raw = torch.cat([torch.tensor([0.9, 0.1]).log().repeat(4), kinds]).view(1, 10, 1, 1)
    taught = torch.cat([torch.tensor([0.5, 0.5]).log().repeat(4), kinds]).view(1, 10, 1, 1)
    sums = teacher_sums([raw], [taught], (8,), 2, 2)
    assert float(sums.box) == pytest.approx(0.5108256 * 0.75, rel=1e-5)
    assert float(sums.kind) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("trick", [{"lora": {"rank": 2, "full": []}}, {"prune": 0.5}])
def test_a_teacher_that_was_trained_with_other_weights_in_its_network_teaches_as_it_infers(
    tmp_path: Path, trick: dict[str, Any]
) -> None:
    path = trained(tmp_path, "teacher", model=STACKED, memory=trick)
    task, batch = built(task={"name": "detect", "teacher": path})
    assert task.teacher is not None
    run = open_trained(path, tmp_path, "cpu").run
    network = run.task.modules["net"].eval()
    network.head.answers_once = False
    with torch.no_grad():
        pictures = task.pictures(batch)
        for own, taught in zip(network(*pictures), task.teacher(batch), strict=True):
            assert torch.allclose(own, taught, atol=1e-4)


def test_a_planned_student_reads_no_weights_of_its_teacher(teacher: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(teacher, copy)
    shutil.rmtree(copy / "checkpoints")
    settings = config(task={"name": "detect", "teacher": str(copy)})
    data = build_datasets(settings)[0].spec
    with FakeTensorMode():
        task = build_run(settings, torch.device("cpu"), data, fake=True).task
    assert isinstance(task, Detect)
    assert task.teacher is not None
    assert all(isinstance(weight, FakeTensor) for weight in task.teacher.network.parameters())
    with pytest.raises(CheckpointError, match="checkpoint"):
        built(task={"name": "detect", "teacher": str(copy)})


def test_who_cannot_teach_is_refused(teacher: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sees rgb and ir, and the data hold rgb"):
        built(
            model={**STACKED, "fusion": "rgb"},
            dataset={"name": "rgb_ir_scenes", "count": 8, "test_count": 6, "cameras": "rgb"},
            task={"name": "detect", "teacher": teacher},
        )
    with pytest.raises(ConfigError, match="answers at strides"):
        built(
            model={"name": "yolofuse", "fusion": "decision", "image_size": 64},
            task={"name": "detect", "teacher": teacher},
        )
    with pytest.raises(CheckpointError, match="no run or checkpoint"):
        built(task={"name": "detect", "teacher": str(tmp_path / "nothing")})
