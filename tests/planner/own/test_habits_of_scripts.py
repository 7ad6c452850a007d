"""Whole scripts that do as those of large libraries: their metrics, transforms, samplers and copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mpt.planner.client.session import Session
from tests.planner.own.own_plans import plan_of
from tests.planner.own.test_scripts import planned, script_of

HEAD = """
import torch
layer = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for _ in range(9):
    optimizer.zero_grad()
    found = layer(torch.rand(2, 64, device="cuda"))
    found.sum().backward()
    optimizer.step()
"""
WEIGHTS = 4 * 64 * 64 + 512

ACCURACY = """
    with torch.inference_mode():
        places = found.topk(5, 1)[1].t()
        right = places.eq(torch.zeros(2, dtype=torch.long, device="cuda")[None])
        share = right[:1].flatten().sum(dtype=torch.float32)
    print(share.item(), float(share), share.cpu().numpy())
"""
CHOICE = """
    sizes = [640, 672, 704]
    print(sizes[int(torch.empty(1).uniform_(0.0, float(len(sizes))).item())])
"""

BY_KIND = """
    kind = type(layer.weight)
    layer.weight = kind(layer.weight.detach(), requires_grad=True)
    frozen = kind(torch.empty(0, device="meta"), requires_grad=False)
    assert isinstance(layer.weight, torch.nn.Parameter) and not frozen.requires_grad
    assert isinstance(frozen, torch.nn.Parameter)
"""
SIGNED = """
    import inspect
    assert "set_to_none" in inspect.signature(optimizer.zero_grad).parameters
    assert "set_to_none" in inspect.signature(layer.zero_grad).parameters
"""

MODULE = """
    module = torch.get_device_module(layer.weight.device)
    print(module.memory_reserved(), module.get_device_properties(layer.weight.device).total_memory)
    assert module is torch.get_device_module("cuda") is torch.cuda
"""

COUNTED = """
    valid = torch.rand(2, 64, device="cuda") > 0.5
    count, chunks = valid.sum(), []
    if count == 0:
        raise ValueError("there is none")
    for start in range(0, (count / 32).ceil().to(torch.int64), 1):
        chunks.append(start)
    assert len(chunks) == 4 and 1 / count.item() == 1 / 128, chunks
"""

WRITTEN = """
    tokens = torch.zeros(4, 1, dtype=torch.long, device="cuda")
    left, is_done = torch.ones(4, dtype=torch.long, device="cuda"), torch.tensor(False)
    while not is_done:
        following = torch.multinomial(torch.rand(4, 64, device="cuda"), 1)
        tokens = torch.cat([tokens, following], 1)
        ends = torch.full((4,), False, device="cuda", dtype=torch.bool)
        ends = ends | torch.isin(tokens[:, -1], torch.tensor([1, 2], device="cuda"))
        ends = ends | torch.full((4,), tokens.shape[1] >= 12, device="cuda", dtype=torch.bool)
        left = left & ~ends
        is_done = left.max() == 0
    assert tokens.shape == (4, 12)
"""

PICKLED = """
    import copy, pickle
    kept = pickle.loads(pickle.dumps([layer, torch.tensor([1.5])]))
    assert kept[0].weight.is_cuda and isinstance(kept[0].weight, torch.nn.Parameter)
    assert kept[0].weight.requires_grad and kept[1].tolist() == [1.5]
    same, memory = copy.copy(layer.weight), layer.weight.untyped_storage()._cdata
    assert isinstance(same, torch.nn.Parameter) and same is not layer.weight
    assert same.untyped_storage()._cdata == memory != kept[0].weight.untyped_storage()._cdata
    del kept, same
"""

RECORDED = """
    pictures = torch.rand(2, 64, device="cuda")
    halves = torch.jit.trace(lambda one: one.view(one.shape[0], one.shape[1] // 2, 2), pictures)
    with torch.no_grad():
        recorded = torch.jit.trace(layer, (pictures,), strict=False)
        assert halves(recorded(pictures)).shape == (2, 32, 2)
    torch._C._jit_pass_inline(recorded.graph)
    assert recorded.weight is layer.weight and isinstance(recorded, torch.nn.Linear)
    assert [*recorded.state_dict()] == ["weight", "bias"] and not [*recorded.graph.nodes()]
    torch.jit.save(recorded, "recorded.pt")
    del pictures
"""

DRIVER = """
    import os, subprocess
    assert "rtx3060" in subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout
    query = "nvidia-smi --query-gpu=index,memory.used,memory.free --format=csv,noheader,nounits"
    index, used, free = map(int, subprocess.check_output(query.split(), text=True).split(","))
    assert index == used == 0 and free > 11_000
    lines = os.popen("nvidia-smi -q -d Memory | grep -A5 GPU | grep Free").readlines()
    assert [int(line.split()[2]) for line in lines] == [free]
"""


@pytest.mark.parametrize(
    "further",
    [ACCURACY, CHOICE, BY_KIND, SIGNED, MODULE, COUNTED, WRITTEN, PICKLED, RECORDED, DRIVER],
    ids=[
        "inferred",
        "chosen",
        "made by its kind",
        "asked for its words",
        "of a device",
        "counted",
        "written to its end",
        "pickled",
        "recorded by jit",
        "asked of the driver",
    ],
)
def test_a_step_with_more_than_a_step_is_planned(
    session: Session, tmp_path: Path, further: str
) -> None:
    held = planned(session, script_of(tmp_path, HEAD + further)).plan.by_category
    assert held["parameters"] == held["gradients"] == WEIGHTS


def test_weights_are_read_from_a_file_of_safetensors(session: Session, tmp_path: Path) -> None:
    weights = {"weight": torch.rand(64, 64), "bias": torch.rand(64)}
    save_file(weights, tmp_path / "model.safetensors")
    text = HEAD.replace(
        "optimizer =",
        "from safetensors import safe_open\nfrom safetensors.torch import load_file\n"
        "found = load_file('{file}')\nassert found['weight'].shape == (64, 64)\n"
        "layer.load_state_dict(found)\n"
        "with safe_open('{file}', 'pt', device='cpu') as file:\n"
        "    assert file.get_slice('weight')[:2].shape == (2, 64)\n"
        "    assert file.get_tensor('bias').dtype == torch.float32\n"
        "optimizer =",
    ).replace("{file}", str(tmp_path / "model.safetensors"))
    held = planned(session, script_of(tmp_path, text)).plan.by_category
    assert held["parameters"] == held["gradients"] == WEIGHTS


@pytest.mark.parametrize(
    "read",
    [
        "torch.load(f'{folder}/model.pt', map_location='cuda')",
        "torch.load(f'{folder}/model.pt', map_location=lambda storage, place: storage.cuda())",
        "torch.load(f'{folder}/model.pt', map_location={'cpu': 'cuda:0'})",
        "torch.load(f'{folder}/whole.pt', map_location='cuda', weights_only=False).state_dict()",
        "load_file(f'{folder}/model.safetensors', device='cuda')",
        "load_file(f'{folder}/model.safetensors', device=0)",
    ],
)
def test_weights_that_are_read_to_the_card_take_its_memory(
    read: str, session: Session, tmp_path: Path
) -> None:
    layer = torch.nn.Linear(64, 64)
    torch.save(layer.state_dict(), tmp_path / "model.pt")
    torch.save(layer, tmp_path / "whole.pt")
    save_file(layer.state_dict(), tmp_path / "model.safetensors")
    peaks = []
    for way in ("torch.load(f'{folder}/model.pt', map_location='cpu')", read):
        text = HEAD.replace(
            "optimizer =",
            f"from safetensors.torch import load_file\nfolder = {str(tmp_path)!r}\nfound = {way}\n"
            "layer.load_state_dict(found)\noptimizer =",
        )
        peaks.append(planned(session, script_of(tmp_path, text)).plan.allocated)
    assert peaks[1] - peaks[0] == 64 * 64 * 4 + 512


def test_nothing_is_written_by_safetensors(session: Session, tmp_path: Path) -> None:
    text = HEAD.replace(
        "import torch\n", "import torch\nfrom safetensors.torch import save_file\n", 1
    )
    text += "    save_file(layer.state_dict(), 'last.safetensors')\n"
    held = planned(session, script_of(tmp_path, text)).plan.by_category
    assert held["parameters"] == WEIGHTS
    assert not list(tmp_path.rglob("*.safetensors"))


def test_states_of_the_cards_random_numbers_are_saved_and_restored(
    session: Session, tmp_path: Path
) -> None:
    text = HEAD + (
        "    kept = {'all': torch.cuda.get_rng_state_all(), 'one': torch.cuda.random.get_rng_state()}\n"
        "    torch.save(kept, 'random.pt')\n"
        "    torch.cuda.set_rng_state_all(kept['all'])\n"
        "    torch.cuda.random.set_rng_state(kept['one'])\n"
        "    torch.cuda.manual_seed(torch.cuda.initial_seed())\n"
    )
    held = planned(session, script_of(tmp_path, text)).plan.by_category
    assert held["parameters"] == WEIGHTS


def test_a_tensor_of_a_library_that_was_imported_before_moves_to_the_card(
    session: Session, tmp_path: Path
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "boxes.py").write_text(
        "import torch\nclass Head:\n    anchors = torch.empty(0)\n    strides = torch.ones(3)\n",
        encoding="utf-8",
    )
    text = HEAD.replace(
        "optimizer =",
        "import sys\nsys.path.append('{folder}')\nimport boxes\n"
        "assert not hasattr(boxes.Head.anchors, 'fake_device')\n"
        "assert boxes.Head.anchors.cuda().is_cuda and boxes.Head.strides.to('cuda').is_cuda\noptimizer =",
    ).replace("{folder}", str(folder))
    assert planned(session, script_of(tmp_path, text)).plan.by_category["parameters"] == WEIGHTS


OWN_OPTIMIZER = """
import torch
from torch.utils.data import dataloader

class Descent:
    def __init__(self, weights):
        self.states = [(one, torch.zeros_like(one)) for one in weights]

    def step(self):
        for one, speed in self.states:
            one.data.sub_(speed.mul_(0.9).add_(one.grad))

    def zero_grad(self):
        for one, _ in self.states:
            one.grad = None

class Batches(torch.utils.data.DataLoader):
    def __iter__(self):
        return (one for one in dataloader._MultiProcessingDataLoaderIter(self))

layer = torch.nn.Linear(64, 64).cuda()
descent = Descent(list(layer.parameters()))
for batch in Batches(torch.zeros(64, 64), 2, num_workers=2):
    layer(batch.cuda()).sum().backward()
    descent.step()
    descent.zero_grad()
"""


def test_a_script_with_an_optimizer_and_a_loader_of_its_own_is_planned(
    session: Session, tmp_path: Path
) -> None:
    plan = planned(session, script_of(tmp_path, OWN_OPTIMIZER)).plan
    assert plan.by_category["parameters"] == plan.by_category["gradients"] == WEIGHTS


BY_TORCHSCRIPT = """
import math
import torch

@torch.jit.script
class Bounded:
    def __init__(self, most: float = math.log(2.0)):
        self.most = most

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return torch.clamp(x, max=self.most + math.exp(1.0))

class Scripted(torch.jit.ScriptModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    @torch.jit.script_method
    def forward(self, x):
        batch, size = x.size()
        return torch.sigmoid(self.layer(x)).view(batch, size)

def build():
    model = torch.nn.Sequential(Scripted(), torch.jit.script(torch.nn.Linear(64, 64))).cuda()
    assert isinstance(model[0], torch.jit.ScriptModule)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        optimizer.zero_grad()
        Bounded().apply(model(torch.rand(2, 64, device="cuda"))).sum().backward()
        optimizer.step()

    return step
"""
LOOP = """
step = build()
for _ in range(9):
    step()
"""


@pytest.mark.parametrize("is_script", [True, False])
def test_networks_that_torchscript_compiles_are_executed_by_python(
    session: Session, tmp_path: Path, is_script: bool
) -> None:
    path = script_of(tmp_path, BY_TORCHSCRIPT + is_script * LOOP)
    plan = planned(session, path).plan if is_script else plan_of(session, path, "build", {})
    assert plan.by_category["parameters"] == plan.by_category["gradients"] == 2 * WEIGHTS


SPLIT = """
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

samples = TensorDataset(torch.arange(20_000))
order = torch.randperm(20_000).tolist()
assert sorted(order) == list(range(20_000))
layer = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for (numbers,) in DataLoader(Subset(samples, order[:16_000]), batch_size=4):
    optimizer.zero_grad()
    layer(torch.rand(len(numbers), 64, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_the_order_by_which_samples_are_split_is_known_at_once(
    session: Session, tmp_path: Path
) -> None:
    notes = planned(session, script_of(tmp_path, SPLIT)).plan.notes
    assert not any("loads and draws" in note or "while it was built" in note for note in notes)
