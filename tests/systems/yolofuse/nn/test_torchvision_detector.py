"""torchvision's detectors by name, trained by the task `detect`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mpt import vision_ops
from mpt.cli import main
from mpt.config.finding.registry import INSTALLED
from mpt.engine.building.build import build_datasets
from mpt.engine.state.evaluation import evaluate
from mpt.engine.step.step import back_propagate
from mpt.errors import ConfigError
from mpt.seams import Batch, Run
from mpt.seams.phase_losses import draw_batch
from mpt.systems.yolofuse.nn.layers.bounded_shapes import BoundedShapes, align_levels
from mpt.systems.yolofuse.nn.torchvision_detector import NAMES, TorchvisionDetector
from tests.systems.yolofuse.tasks.small import build, config

SMALL = "torchvision:ssdlite320_mobilenet_v3_large"
RCNN = "torchvision:fasterrcnn_mobilenet_v3_large_320_fpn"
DATA = {"name": "rgb_ir_scenes", "count": 8, "test_count": 4, "cameras": "rgb"}


def small(name: str, precision: str = "fp32", **sections: Any) -> tuple[Run, Batch]:
    model = {"name": name, "image_size": 96}
    return build(
        precision, **{"model": model, "dataset": DATA, "optimizer": {"name": "adam"}, **sections}
    )


def shell(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def test_every_name_is_one_of_torchvisions_detectors() -> None:
    detection = vision_ops.import_detection()
    torchvision = vision_ops.import_torchvision()
    known = torchvision.models.list_models(module=detection)
    others = {"maskrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn_v2", "keypointrcnn_resnet50_fpn"}
    assert {name.partition(":")[2] for name in NAMES} == set(known) - others


def test_a_detector_gets_the_task_detect_and_a_classifier_its_own() -> None:
    found = {name: INSTALLED.find("nn", name) for name in (SMALL, "torchvision:resnet18")}
    assert [plugin.task for plugin in found.values() if plugin] == ["detect", "classify"]


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        (SMALL, "bf16"),
        (RCNN, "fp32"),
        pytest.param("torchvision:fcos_resnet50_fpn", "fp32", marks=pytest.mark.slow),
    ],
)
def test_gradients_reach_every_parameter_and_the_evaluation_has_its_figures(
    name: str, precision: str
) -> None:
    few = {f"rpn_{when}_nms_top_n_{of}": 50 for when in ("pre", "post") for of in ("train", "test")}
    small_proposals = {"options": few}
    model = {"name": name, "image_size": 96, **(small_proposals if name == RCNN else {})}
    run, batch = small(name, precision, model=model)
    batch = {key: value[:2] for key, value in batch.items()}
    phase = run.phases[0]
    losses = back_propagate(run, phase, draw_batch(run, phase, batch))
    assert losses
    trained = list(run.task.trainable["net"].named_parameters())
    assert [key for key, parameter in trained if parameter.grad is None] == []
    assert all(
        bool(parameter.grad.isfinite().all())
        for _, parameter in trained
        if parameter.grad is not None
    )
    _, test = build_datasets(run.config)
    assert {"map50", "map50_95", "precision", "recall"} <= evaluate(run, test, 4).keys()


def test_boxes_without_area_and_pictures_without_boxes_train() -> None:
    run, batch = small(SMALL)
    net = run.task.trainable["net"]
    batch["boxes"][0] = 5.0
    batch["box_mask"][1] = False
    losses = net(batch["rgb"], batch["boxes"], batch["classes"], batch["box_mask"])
    assert all(bool(value.isfinite()) for value in losses.values())


def test_detections_are_padded_and_the_background_is_no_class() -> None:
    net = TorchvisionDetector(torch.nn.Identity(), "rgb", classes=2, most=3)
    found = {
        "boxes": torch.tensor([[0.0, 0, 1, 1], [2.0, 2, 3, 3]]),
        "labels": torch.tensor([0, 2]),
        "scores": torch.tensor([0.9, 0.8]),
    }
    boxes, scores = net.padded([found], torch.zeros(1))
    assert boxes.tolist() == [[[2, 2, 3, 3], [0, 0, 0, 0], [0, 0, 0, 0]]]
    torch.testing.assert_close(scores, torch.tensor([[[0, 0.8], [0, 0], [0, 0]]]))


def test_roi_align_in_python_averages_what_lies_under_the_box() -> None:
    vision_ops.import_detection()
    ramp = torch.arange(16.0).expand(1, 1, 16, 16)  # the value is the column
    rois = [torch.tensor([[4.0, 4.0, 8.0, 8.0]])]
    pooled = vision_ops.eager_roi_align(ramp, rois, (2, 2), 1.0, 2)
    assert pooled.shape == (1, 1, 2, 2)
    torch.testing.assert_close(pooled[0, 0, 0], torch.tensor([5.0, 7.0]))


def test_what_has_no_meaning_for_them_is_refused() -> None:
    with pytest.raises(ConfigError, match="multi_scale"):
        small(SMALL, task={"multi_scale": 0.4})
    with pytest.raises(ConfigError, match="has no 'foo'"):
        small(RCNN, model={"name": RCNN, "options": {"foo": 1}})


def test_it_trains_resumes_and_infers_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    sections = {
        "model": {"name": SMALL, "image_size": 64},
        "dataset": DATA,
        "optimizer": {"name": "adam"},
    }
    path.write_text(config("bf16", **sections).to_yaml())
    where = ("--runs", tmp_path, "--device", "cpu")
    assert shell("train", path, "--name", "one", "--quiet", *where, "train.steps=1") == 0
    assert shell("train", path, "--name", "one", "--resume", "auto", *where, "train.steps=2") == 0
    assert re.search(r"step 2/2  evaluated on \d+ test samples: map50", capsys.readouterr().err)
    assert shell("infer", tmp_path / "one", "--device", "cpu") == 0
    capsys.readouterr()
    assert shell("yolofuse", "export", tmp_path / "one", tmp_path / "x.onnx") == 2
    assert "knows model yolofuse only" in capsys.readouterr().err


def test_sizes_that_depend_on_values_are_bounded() -> None:
    """All of a mask, no condition on values, and every region pooled once, whichever level it belongs to."""
    with FakeTensorMode(), BoundedShapes():
        rows = torch.empty(6, 4)
        mask = rows[:, 0] > 0
        assert rows[mask].shape == (6, 4)
        assert rows[mask, 1:].shape == (6, 3)
        assert torch.where(mask)[0].shape == (6,)
        assert not (rows < 0).any()
        features = [torch.empty(2, 8, side, side, requires_grad=True) for side in (16, 8, 4)]
        pooled = align_levels(
            features, [torch.empty(5, 4), torch.empty(3, 4)], (7, 7), 2, None, lambda boxes: None
        )
        assert pooled.shape == (8, 8, 7, 7)
        pooled.sum().backward()
        assert all(level.grad is not None and level.grad.shape == level.shape for level in features)
