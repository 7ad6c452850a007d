"""Training scripts planned as they stand: `mpt plan FILE.py -- WORDS`."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpt.commands.planning import plan_step
from mpt.errors import MemoryBudgetError, MptError
from mpt.planner.answers.own_plan import OwnPlan
from mpt.planner.client.session import Session
from mpt.planner.own.execution.source import Source
from mpt.planner.own.trace import trace_on_cpu
from mpt.planner.recipes.own_step import find_source
from scripts.plans.live_bytes import live_bytes
from tests.planner.made_plans import make_plan
from tests.planner.own import script_gan
from tests.programs import run_mpt

GAN = Path(script_gan.__file__)
BOXES = GAN.with_name("script_boxes.py")


def planned(session: Session, path: Path, *words: str, **arguments: Any) -> OwnPlan:
    found: OwnPlan = session.plan_own(find_source(str(path), (), words), arguments).get()
    return found


def script_of(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_live_bytes_of_a_script_are_those_of_the_same_script_on_real_tensors(
    tmp_path: Path,
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "old.txt").write_text("old", encoding="utf-8")
    (tmp_path / "runs" / "log.txt").write_text("earlier", encoding="utf-8")
    spoken = [[], ["--every", "3"], ["--width=96"]]
    calls = [({"where": str(GAN), "words": words}, {}) for words in spoken]
    for planned, measured in live_bytes(*calls, folder=tmp_path):
        assert measured == planned > 0


def test_sizes_that_follow_from_data_are_those_of_the_first_batches() -> None:
    spoken = [[], ["--stream"], ["--lengths"]]
    calls = [({"where": str(BOXES), "words": words}, {}) for words in spoken]
    for planned, measured in live_bytes(*calls):
        assert measured == planned > 0


def test_a_plan_says_that_sizes_follow_from_data(session: Session) -> None:
    found = planned(session, BOXES)
    assert any("another batch may need more" in note for note in found.plan.notes)


def test_a_script_is_planned_with_both_networks_of_a_step(session: Session) -> None:
    found = planned(session, GAN, "--every", "3", "--batch-size", "64")
    held = found.plan.by_category
    block = 4 * 64 * 64 + 512  # the allocator gives a bias 512 bytes
    generator, critic = 4 * 16 * 64 + 512 + 3 * block, block + 512 + 512
    assert held["parameters"] == 2 * generator + critic
    assert held["optimizer state"] == 2 * (generator + critic)
    assert any(name.startswith("self.generator.1") for name, _ in found.plan.by_module)
    assert found.name == "script_gan.py --every 3 --batch-size 64"
    assert found.plan.batch_size == 64


def test_a_scripts_batch_is_varied(session: Session) -> None:
    few, many = (
        planned(session, GAN, "--batch-size", "128", "--samples=2000", batch_size=size).plan
        for size in (128, 256)
    )
    assert many.batch_size == 256
    assert many.by_category["activations"] == pytest.approx(
        2 * few.by_category["activations"], rel=0.01
    )


HEAD = """
import torch
layer = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
"""


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("import argparse\nargparse.ArgumentParser().parse_args()", ("--x",), "unrecognized arguments: --x"),
        ("raise SystemExit('there is no data')", (), "it ends the program: there is no data"),
        (HEAD + "print('no cards')", (), "it came to its end after no training step.*It said last: no cards"),
        ("raise OSError('\\x1b[1mtrust\\x1b[0m it')", (), "OSError: trust it, at"),
        ("assert 'timm' == '0.3'", (), r"AssertionError: assert 'timm' == '0.3', at .*train\.py:1"),
        ("from urllib.error import URLError\nraise URLError('no name')", (), r"which failed \(no name\): a file"),
        ("import mystery", (), r"No module named 'mystery', at .*train\.py:1"),
        (HEAD + "layer(torch.rand(2, 8)).sum().backward()\noptimizer.step()\n", (), "after 1 training step;"),
        ("import os\nos.environ['LOCAL_RANK']", (), r"torchrun starts write WORLD_SIZE=2.*train\.py:2"),
        (HEAD + "layer(torch.rand(2, 7))\n", (), r"reduction dim.*at layer \(.*train\.py:5"),
    ],
)  # fmt: skip
def test_a_script_that_cannot_be_planned_is_one_line(
    session: Session, tmp_path: Path, text: str, words: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(MptError, match=expected):
        planned(session, script_of(tmp_path, text), *words)


LOOP = """
for _ in range({steps}):
    optimizer.zero_grad()
    layer(torch.rand(2, 8)).sum().backward()
    optimizer.step()
"""


def test_an_optimizer_that_does_not_step_is_not_waited_for_without_end(
    session: Session, tmp_path: Path
) -> None:
    late = "late = torch.optim.Adam(torch.nn.Linear(8, 8).parameters())\n"
    found = planned(session, script_of(tmp_path, HEAD + late + LOOP.format(steps=100)))
    assert any("1 optimizers did not step" in note for note in found.plan.notes)
    with pytest.raises(MptError, match="after 1 training step"):
        planned(session, script_of(tmp_path, HEAD + late + LOOP.format(steps=20)))


def test_a_script_that_updates_its_weights_itself_is_planned(
    session: Session, tmp_path: Path
) -> None:
    text = (
        "import torch\nlayer = torch.nn.Linear(8, 8)\nfor _ in range(9):\n    layer.zero_grad()\n"
        "    layer(torch.rand(2, 8)).sum().backward()\n"
        "    for one in layer.parameters():\n        one.data.add_(one.grad, alpha=-0.1)\n"
    )
    held = planned(session, script_of(tmp_path, text)).plan.by_category
    assert held["parameters"] == held["gradients"] == 1024


@pytest.mark.parametrize("count", ["", "4"])
def test_a_script_that_starts_processes_is_planned_as_the_first_of_them(
    session: Session, tmp_path: Path, count: str
) -> None:
    text = (
        "import os, torch\nimport torch.multiprocessing as mp\nfrom torch import distributed\n"
        "def main(rank, world):\n"
        "    distributed.init_process_group('nccl', rank=rank, world_size=world)\n"
        "    assert distributed.get_world_size() == world == {world} and not rank\n"
        "    layer = torch.nn.Linear(256, 256).to(rank)\n"
        "    layer = torch.nn.parallel.DistributedDataParallel(layer, device_ids=[rank])\n"
        "    optimizer = torch.optim.SGD(layer.parameters(), 0.1)\n"
        "    for _ in range(9):\n        optimizer.zero_grad()\n"
        "        layer(torch.rand(2, 256)).sum().backward()\n        optimizer.step()\n"
        "if __name__ == '__main__':\n    world = {asked}\n    mp.spawn(main, args=(world,), nprocs=world)\n"
    ).format(world=count or 1, asked=count or "torch.cuda.device_count()")
    held = planned(session, script_of(tmp_path, text)).plan.by_category
    assert held["reduce buffers"] == pytest.approx(held["gradients"], rel=0.01)


def test_a_script_of_arrays_on_the_host_is_planned_as_if_all_were_on_the_card(
    session: Session, tmp_path: Path
) -> None:
    text = HEAD + LOOP.replace("torch.rand(2, 8)", "torch.from_numpy(numpy.zeros((2, 8), 'f'))")
    found = planned(session, script_of(tmp_path, "import numpy\n" + text.format(steps=9)))
    assert found.plan.by_category["parameters"] == 1024


def test_samples_are_made_on_the_host_where_all_else_is_on_the_card(
    session: Session, tmp_path: Path
) -> None:
    text = (
        "import numpy, torch\nfrom torch.utils.data import DataLoader, Dataset\nclass Data(Dataset):\n"
        "    def __len__(self):\n        return 64\n"
        "    def __getitem__(self, place):\n"
        "        one = torch.from_numpy(numpy.zeros(8, 'f'))\n"
        "        assert one.device.type == 'cpu' and isinstance(one, torch.FloatTensor)\n"
        "        return one - torch.as_tensor([0.5] * 8, device=one.device)\n"
    ) + HEAD + (
        "for batch in DataLoader(Data(), 4):\n    optimizer.zero_grad()\n    layer(batch).sum().backward()\n"
        "    optimizer.step()\n"
    )  # fmt: skip
    assert planned(session, script_of(tmp_path, text)).plan.by_category["parameters"] == 1024


def test_a_script_in_a_package_imports_from_it(session: Session, tmp_path: Path) -> None:
    inner = tmp_path / "mine" / "deep"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    (inner.parent / "sizes.py").write_text("WIDTH = 8\n", encoding="utf-8")
    (inner / "rates.py").write_text("RATE = 0.1\n", encoding="utf-8")
    text = "from ..sizes import WIDTH\nimport rates\nfrom .rates import RATE\n" + HEAD
    found = planned(session, script_of(inner, text + LOOP.format(steps=5)))
    assert found.plan.by_category["parameters"] == 1024


def test_evaluations_before_the_first_step_are_executed_until_they_repeat_themselves(
    session: Session, tmp_path: Path
) -> None:
    text = HEAD + (
        "calls = []\nlayer.register_forward_hook(lambda *given: calls.append(given[1][0].shape))\n"
        "with torch.no_grad():\n    for size in (4, 8) * {count}:\n"
        "        found = layer(torch.rand(size, 8))\n        assert found.shape == (size, 8)\n"
        "        assert not found.requires_grad\n"
        "assert len(calls) == {seen}, len(calls)\ncalls.clear()\n"
    )
    few, many = (
        planned(
            session, script_of(tmp_path, text.format(count=count, seen=seen) + LOOP.format(steps=5))
        ).plan
        for count, seen in ((2, 4), (50, 6))
    )
    assert many.allocated == few.allocated
    assert any("94 evaluations before the first step" in note for note in many.notes)
    assert not any("evaluations" in note for note in few.notes)


def test_pictures_of_a_frozen_copy_before_the_first_step_are_evaluations(
    session: Session, tmp_path: Path
) -> None:
    text = HEAD + (
        "import copy\ncalls, average = [], copy.deepcopy(layer).requires_grad_(False)\n"
        "average.register_forward_hook(lambda *given: calls.append(1))\n"
        "for _ in range(50):\n    average(torch.rand(4, 8))\n"
        "assert len(calls) == 3, len(calls)\n"
    )
    plan = planned(session, script_of(tmp_path, text + LOOP.format(steps=5))).plan
    assert any("47 evaluations before the first step" in note for note in plan.notes)


def test_two_steps_are_enough(session: Session, tmp_path: Path) -> None:
    short, long = (
        planned(session, script_of(tmp_path, HEAD + LOOP.format(steps=steps))).plan
        for steps in (2, 9)
    )
    assert short.by_category == long.by_category
    assert short.allocated == long.allocated


def test_what_a_script_sets_and_imports_is_its_own(session: Session, tmp_path: Path) -> None:
    (tmp_path / "sizes.py").write_text("WIDTH = 8\n", encoding="utf-8")
    beginning = (
        "import os, signal, sys\nsys.path.append('further')\nimport sizes\nimport torch.multiprocessing\n"
        "assert 'SEEN' not in os.environ\nos.environ['SEEN'] = '1'\n"
        "torch.multiprocessing.set_start_method('spawn')\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "assert sys.modules['__main__'].sizes is sizes and sizes.WIDTH == {width}\n"
    )
    kept = "assert os.environ['SEEN'] and 'further' in sys.path; "
    loop = LOOP.format(steps=9).replace("optimizer.zero", kept + "optimizer.zero")
    text = beginning + HEAD + loop
    planned(session, script_of(tmp_path, text.replace("{width}", "8")))
    (tmp_path / "sizes.py").write_text("WIDTH = 16\n", encoding="utf-8")
    planned(session, script_of(tmp_path, text.replace("{width}", "16")))


def test_a_script_finds_modules_in_the_current_folder_last(
    session: Session, tmp_path: Path
) -> None:
    text = "import os, sys\nassert sys.path[-1] == os.getcwd() and sys.path[0] == {folder!r}\n"
    text = text.format(folder=str(tmp_path)) + HEAD + LOOP.format(steps=5)
    assert planned(session, script_of(tmp_path, text)).plan.by_category["parameters"] == 1024


def test_the_command_plans_a_script_and_leaves_its_folder_alone(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    temporary = tmp_path_factory.mktemp("temporary")
    (tmp_path / "runs").mkdir()
    for name in ("old.txt", "log.txt"):
        (tmp_path / "runs" / name).write_text("earlier", encoding="utf-8")
    words = ("plan", GAN, "--gpu", "rtx3060", "--", "--batch-size", 16, "--workers", 2)
    done = run_mpt(*words, cwd=tmp_path, env={**os.environ, "TMPDIR": str(temporary)})
    assert done.returncode == 0, done.stderr
    assert "script_gan.py --batch-size 16 --workers 2, batch 16" in done.stdout
    assert "was kept apart" in " ".join(done.stdout.split())
    kept = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert kept == ["runs", "runs/log.txt", "runs/old.txt"]
    assert all((tmp_path / "runs" / one).read_text() == "earlier" for one in ("old.txt", "log.txt"))
    assert not list(temporary.glob("mpt-plan-*"))


@pytest.mark.parametrize(
    ("batch", "largest", "said"),
    [(8, False, "; --largest looks for a smaller batch"), (8, True, ""), (0, False, "")],
)
def test_what_does_not_fit_is_told_that_a_batch_can_be_looked_for(
    monkeypatch: pytest.MonkeyPatch, batch: int, largest: bool, said: str
) -> None:
    plan = make_plan(batch_size=batch, fits=False, budget_bytes=2**30)
    found = SimpleNamespace(plan=plan, ways=[])
    monkeypatch.setattr(plan_step, "plan_own_step", lambda *args, **kwargs: found)
    monkeypatch.setattr(plan_step, "as_data", lambda planned: {})
    command = plan_step.Command(factory="train.py", json=True, largest=largest)
    with pytest.raises(MemoryBudgetError) as caught:
        plan_step.run(command)
    assert str(caught.value).startswith("nothing that was tried fits in 1,024 MiB")
    assert said in str(caught.value)
    assert ("--largest" in str(caught.value)) == bool(said)


GENERATED = '''
import torch
from torch import nn

text = """
def make():
\tnet = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)]).cuda()
\treturn net, torch.optim.SGD(net.parameters())

def run(net, optimizer):
\twhile True:
\t\toptimizer.zero_grad()
\t\tloss = net(torch.randn(4096, 256, device="cuda")).square().mean()
\t\tloss.backward()
\t\toptimizer.step()
"""
'''


def test_code_that_has_no_file_is_planned_with_changes_that_have_no_place(
    session: Session, tmp_path: Path
) -> None:
    path = script_of(
        tmp_path, GENERATED + 'exec(compile(text, "generated.py", "exec"))\nrun(*make())\n'
    )
    ways = planned(session, path).ways
    assert ways
    assert not any(way.edits for way in ways)


def test_lines_are_put_around_lines_that_are_indented_by_tabs(
    session: Session, tmp_path: Path
) -> None:
    text = GENERATED.replace('text = """', "").replace('"""', "")
    ways = planned(session, script_of(tmp_path, f"{text}\nrun(*make())\n")).ways
    (around,) = {edit for way in ways for edit in way.edits if edit.how == "around"}
    assert around.place == "around train.py:13"


STOPPING = """
import torch
from torch.utils.data import DataLoader, TensorDataset

net = torch.nn.Linear(8, 8, device="cuda")
optimizer = torch.optim.SGD(net.parameters())
for numbers, in DataLoader(TensorDataset(torch.randint(3, 65, (64,))), batch_size=4):
    if int(numbers.max()) > 2:
        break
    optimizer.zero_grad()
    net(torch.rand(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_a_script_that_its_data_end_early_is_planned_as_if_they_were_zero(
    session: Session, tmp_path: Path
) -> None:
    plan = planned(session, script_of(tmp_path, STOPPING)).plan
    assert any("integers that are read" in note for note in plan.notes)


IN_FOLDER = """
import builtins
import os

import torch

shown, builtins.print = print, lambda *words: None
os.makedirs("out", exist_ok=True)
os.chdir("out")
with open("log.txt", "w") as file:
    file.write("begun")
os.chdir(os.path.join(HERE, "data"))
with open("rows.txt") as file:
    rows = int(file.read())
device = "cuda" if torch.cuda.is_available() else "cpu"
network = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)]).to(device)
optimizer = torch.optim.Adam(network.parameters())
for _ in range(3):
    optimizer.zero_grad()
    network(torch.rand(rows, 512, device=device)).mean().backward()
    optimizer.step()
    os.chdir("..")
    os.chdir("data")
    assert builtins.print is not shown
    builtins.print = lambda *words: None
"""


def test_a_script_that_changes_its_folder_and_print_begins_again_with_the_first_ones(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.txt").write_text("512")
    monkeypatch.chdir(tmp_path)
    path = script_of(tmp_path, f"HERE = {str(tmp_path)!r}\n{IN_FOLDER}")
    assert planned(session, path).ways  # each is executed anew
    assert not (tmp_path / "out").exists()
    source = Source.of(find_source(str(path), ()))
    for is_fake in (True, False):
        trace_on_cpu(source, {}, is_fake)
        assert Path.cwd() == tmp_path
        assert print.__module__ == "builtins"
