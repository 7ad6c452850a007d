import subprocess
import sys

import pytest
import torch

from mpt import vision_ops


def greedy_reference(boxes, scores, threshold):
    def area(box):
        return (box[2] - box[0]) * (box[3] - box[1])

    kept = []
    for index in sorted(range(len(scores)), key=lambda i: -scores[i]):
        for other in kept:
            a, b = boxes[index], boxes[other]
            width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
            height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
            if width * height / (area(a) + area(b) - width * height) > threshold:
                break
        else:
            kept.append(index)
    return kept


def test_torchvision_imports_and_its_models_and_transforms_work():
    torchvision = vision_ops.import_torchvision()
    transforms = vision_ops.import_torchvision("transforms.v2")
    assert transforms.CenterCrop(4)(torch.zeros(3, 8, 8)).shape == (3, 4, 4)
    boxes = torch.tensor([[0.0, 0, 2, 2], [1.0, 0, 3, 2]])
    assert torchvision.ops.box_iou(boxes, boxes)[0, 1].item() == pytest.approx(1 / 3)


def test_importing_the_module_does_not_import_torchvision():
    code = "import sys; from mpt import vision_ops; vision_ops.declare(); sys.exit('torchvision' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_declaring_twice_changes_nothing():
    before = torch.ops.torchvision.nms.default
    vision_ops.declare()
    assert torch.ops.torchvision.nms.default is before


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nms_equals_a_plain_greedy_loop(threshold, dtype):
    generator = torch.Generator().manual_seed(3)
    corner = torch.rand(200, 2, generator=generator, dtype=dtype) * 20
    boxes = torch.cat([corner, corner + 1 + torch.rand(200, 2, generator=generator, dtype=dtype) * 8], dim=1)
    scores = torch.rand(200, generator=generator, dtype=dtype)
    kept = vision_ops.nms(boxes, scores, threshold)
    assert kept.dtype == torch.int64
    assert kept.tolist() == greedy_reference(boxes.tolist(), scores.tolist(), threshold)
    assert vision_ops.suppress(boxes, scores, threshold).tolist() == kept.tolist()


def test_nms_of_nothing_is_empty_and_large_half_precision_boxes_do_not_overflow():
    assert vision_ops.nms(torch.empty(0, 4), torch.empty(0), 0.5).shape == (0,)
    boxes = torch.tensor([[0.0, 0, 1000, 1000], [0, 0, 1000, 990], [1000, 1000, 2000, 2000]], dtype=torch.float16)
    assert vision_ops.suppress(boxes, torch.tensor([0.5, 0.9, 0.1]), 0.5).tolist() == [1, 2]


@pytest.mark.filterwarnings("ignore:`create_unbacked_symint` is deprecated")  # torchvision 0.28's own fake kernel
def test_nms_on_fake_tensors_does_not_run_the_kernel():
    vision_ops.import_torchvision()
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()):
        kept = torch.ops.torchvision.nms(torch.empty(5, 4), torch.empty(5), 0.5)
    assert kept.dtype == torch.int64
