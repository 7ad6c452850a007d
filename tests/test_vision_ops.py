import os
import subprocess
import sys
from pathlib import Path

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


def run(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own that finds packages in `folders` first."""
    path = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )


def pretend_torchvision(folder: Path, binary: str) -> Path:
    """Write a package as torchvision is built: its binary declares operators, its Python half adds to them."""
    package = folder / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from . import extension\n"
        "import torch\n"
        "for name in ('nms', 'qnms'):\n"
        "    torch.library.register_fake(f'torchvision::{name}')(lambda dets, scores, iou_threshold: dets)\n"
    )
    (package / "extension.py").write_text(binary)
    return folder


DECLARED = (
    "import torch\n"
    "library = torch.library.Library('torchvision', 'DEF')\n"
    "for name in ('nms', 'qnms'):\n"
    "    library.define(f'{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n"
)


def test_importing_the_module_does_not_import_torchvision():
    code = "import sys; from mpt import vision_ops; sys.exit('torchvision' in sys.modules)"
    assert run(code).returncode == 0


def test_operators_of_a_binary_under_any_name_are_never_declared_before_it(tmp_path):
    """A second declaration by a compiled library ends the process; torchvision 0.29 renamed the file."""
    folder = pretend_torchvision(tmp_path, DECLARED)
    code = "from mpt import vision_ops; import torchvision; print(torchvision.__file__, len(vision_ops._libraries))"
    done = run(code, folder)
    assert done.stdout.split() == [str(folder / "torchvision" / "__init__.py"), "0"], done.stderr[
        -2000:
    ]


def test_without_a_binary_the_operators_are_declared_and_the_import_repeated(tmp_path):
    folder = pretend_torchvision(tmp_path, "")
    code = (
        "from mpt import vision_ops; import torch, torchvision; boxes = torch.tensor([[0.0, 0, 2, 2]] * 2)\n"
        "print(vision_ops.nms(boxes, torch.tensor([0.1, 0.2]), 0.5).tolist(), type(torchvision.__loader__).__name__)"
    )
    assert run(code, folder).stdout.split() == ["[1]", "SourceFileLoader"]
    assert "torchvision::nms does not exist" in run("import torchvision", folder).stderr


def test_another_fault_of_torchvision_is_passed_on(tmp_path):
    folder = pretend_torchvision(
        tmp_path, DECLARED + "raise RuntimeError('different CUDA major versions')\n"
    )
    done = run("from mpt import vision_ops; import torchvision", folder)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("RuntimeError: different CUDA major versions")


def test_the_installed_torchvision_uses_its_binary_where_it_loads():
    """On a matching pair of wheels, of the CPU or of CUDA, nothing is declared; `import torchvision` alone is asked."""
    alone = run("import torchvision, torch; print(torch.ops.torchvision.nms.default)")
    code = "from mpt import vision_ops; vision_ops.import_torchvision(); print(len(vision_ops._libraries))"
    below = run(code)
    assert below.returncode == 0, below.stderr[-2000:]
    assert below.stdout.split() == ["0" if alone.returncode == 0 else "1"]


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nms_equals_a_plain_greedy_loop(threshold, dtype):
    generator = torch.Generator().manual_seed(3)
    corner = torch.rand(200, 2, generator=generator, dtype=dtype) * 20
    boxes = torch.cat(
        [corner, corner + 1 + torch.rand(200, 2, generator=generator, dtype=dtype) * 8], dim=1
    )
    scores = torch.rand(200, generator=generator, dtype=dtype)
    kept = vision_ops.nms(boxes, scores, threshold)
    assert kept.dtype == torch.int64
    assert kept.tolist() == greedy_reference(boxes.tolist(), scores.tolist(), threshold)
    assert vision_ops.suppress(boxes, scores, threshold).tolist() == kept.tolist()


def test_nms_of_nothing_is_empty_and_large_half_precision_boxes_do_not_overflow():
    assert vision_ops.nms(torch.empty(0, 4), torch.empty(0), 0.5).shape == (0,)
    boxes = torch.tensor(
        [[0.0, 0, 1000, 1000], [0, 0, 1000, 990], [1000, 1000, 2000, 2000]], dtype=torch.float16
    )
    assert vision_ops.suppress(boxes, torch.tensor([0.5, 0.9, 0.1]), 0.5).tolist() == [1, 2]


# torchvision 0.28's own fake kernel
@pytest.mark.filterwarnings("ignore:`create_unbacked_symint` is deprecated")
def test_nms_on_fake_tensors_does_not_run_the_kernel():
    vision_ops.import_torchvision()
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()):
        kept = torch.ops.torchvision.nms(torch.empty(5, 4), torch.empty(5), 0.5)
    assert kept.dtype == torch.int64
