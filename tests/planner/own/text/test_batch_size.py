"""Where a script has its batch size, and the script with another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpt.planner.client.session import Session
from mpt.planner.own.text.batch_size import find_batch_size
from mpt.planner.recipes.own_step import find_source


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (("--batch-size", "32"), (1, 32)),
        (("train", "--batch_size=8"), (1, 8)),
        (("-b", "4"), (1, 4)),
        (("--train_batch_size", "2"), (1, 2)),
        (("--per_device_train_batch_size=2",), (0, 2)),
        (("--per-gpu-batch-size", "2"), (1, 2)),
        (("--device_batch_size", "2", "--total_batch_size", "8"), (1, 2)),
        (("--batch_size_per_gpu", "2"), (1, 2)),
        (("--per_device_eval_batch_size", "2"), None),
        (("--batchSize", "16"), (1, 16)),
        (("--data.batch_size", "2"), (1, 2)),
        (("data.batch_size=2",), (0, 2)),
        (("batch_size=2", "data=here"), (0, 2)),
        (("batch_size", "2"), None),
        (("test_batch_size=2",), None),
        (("--bs", "many"), None),
        (("--epochs", "3"), None),
    ],
)
def test_the_batch_size_is_found_among_a_scripts_words(
    words: tuple[str, ...], place: tuple[int, int] | None
) -> None:
    found = find_batch_size(words, {})
    assert (found and (found.word, found.size)) == place


LINES = """import torch
from torch.utils.data import DataLoader, TensorDataset
{constant}
layer = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
data = TensorDataset(torch.zeros(4096, 256))
for (inputs,) in DataLoader(data, {argument}):
    layer(inputs.cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ARGPARSE = """import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("-b", "--batch-size", type=int, default=128)
batch_size = 7
args = parser.parse_args()"""


@pytest.mark.parametrize(
    ("constant", "argument", "note"),
    [
        ("BATCH_SIZE = 128", "BATCH_SIZE", "its batch size is the 128 of train.py:3"),
        ("", "batch_size=128", "its batch size is the 128 of train.py:7"),
        ("config = {'lr': 3, 'batch_size': 128}", "config['batch_size']", "of train.py:3"),
        ("class C:\n    batch_size: int = 128", "C.batch_size", "of train.py:4"),
        ("f = lambda batch_size=128: batch_size", "f()", "of train.py:3"),
        (ARGPARSE, "args.batch_size", "its batch size is 128, the default of --batch-size"),
    ],
)
def test_a_batch_size_in_a_scripts_text_is_varied(
    constant: str, argument: str, note: str, tmp_path: Path, session: Session
) -> None:
    path = tmp_path / "train.py"
    path.write_text(LINES.format(constant=constant, argument=argument), encoding="utf-8")
    source = find_source(str(path), ())
    found = session.plan_own(
        source, {}, budget_bytes=500 << 20, largest_batch=True, with_changes=False
    ).get()
    assert found.plan.batch_size == 128
    assert any(note in one for one in found.plan.notes)
    assert found.plan.largest_batch > 8192
    twice = session.plan_own(source, {"batch_size": 256}, with_changes=False).get()
    loss = 512
    held = [one.plan.by_category["activations"] - loss for one in (found, twice)]
    assert held[1] == 2 * held[0] > 0


def test_a_script_without_a_batch_size_says_so(tmp_path: Path, session: Session) -> None:
    path = tmp_path / "train.py"
    path.write_text(LINES.format(constant="", argument="16 * 8"), encoding="utf-8")
    found = session.plan_own(
        find_source(str(path), ()), {}, budget_bytes=500 << 20, largest_batch=True
    ).get()
    assert found.plan.largest_batch is None
    assert any(
        "no largest batch: neither its words nor its text" in one for one in found.plan.notes
    )


def test_an_option_of_click_is_found() -> None:
    text = '@click.option("--epochs", default=3)\n@click.option("--batch-size", default=8)\ndef f(batch_size): ...'
    batch = find_batch_size((), {"a.py": text})
    assert batch is not None
    assert batch.words((), 16) == ("--batch-size", "16")


def test_the_number_is_replaced_where_it_stands() -> None:
    text = 'é = 1; loader = f("ü", batch_size=4)  # 4\nbatch_size = 9\n'
    batch = find_batch_size((), {"a.py": "import b", "c.py": text})
    assert batch is not None
    assert (batch.size, batch.file, batch.line) == (4, "c.py", 1)
    assert batch.text("c.py", text, 64) == text.replace("=4", "=64")
    assert batch.text("c.py", text, 4) is text
    assert batch.text("a.py", text, 64) is text


def test_the_batch_size_of_an_evaluation_is_none_of_the_training() -> None:
    text = (
        "val_loader = load(val, batch_size=1)\nself.test = load(batch_size=2)\nload(batch_size=8)"
    )
    batch = find_batch_size((), {"a.py": text})
    assert batch is not None
    assert batch.size == 8
