"""Notebooks planned as scripts: `mpt plan NOTEBOOK.ipynb`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpt.errors import ConfigError, MptError
from mpt.planner.answers.own_plan import OwnPlan
from mpt.planner.client.session import Session
from mpt.planner.own.text.notebooks import as_python, parts_of
from mpt.planner.recipes.own_step import find_source

NETWORK = """%matplotlib inline
!pip install --quiet \\
    something
import inspect, torch
from torch import nn

class Network(nn.Module):
    text = '''
%no magic, but a text
'''
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)))
    def forward(self, x):
        return self.layers(x)

assert "layers(x)" in inspect.getsource(Network.forward)
"""
MADE = """%%time
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Network().to(device)
optimizer = torch.optim.AdamW(model.parameters())
display(model)
"""
TRAINED = """for step in range(10):
    x = torch.randn(4096, 256, device=device)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def notebook(folder: Path, *cells: str, **metadata: Any) -> Path:
    code = [{"cell_type": "code", "source": text.splitlines(True), "outputs": []} for text in cells]
    words = {"cell_type": "markdown", "source": "# A network"}
    path = folder / "my.ipynb"
    data = {"cells": [words, *code], "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def planned(session: Session, path: Path) -> OwnPlan:
    found: OwnPlan = session.plan_own(find_source(str(path), ()), {}, budget_bytes=600 << 20).get()
    return found


def test_a_notebook_is_planned_like_a_script_with_its_cells(
    tmp_path: Path, session: Session
) -> None:
    cells = NETWORK, MADE, "", "%%bash\nrm -rf $HOME", TRAINED
    found = planned(session, notebook(tmp_path, *cells, kernelspec={"language": "python"}))
    script = tmp_path / "train.py"
    lines = "\n".join(cells[:2]).replace("%%time", "").replace("display(model)", "")
    lines = lines.replace("!pip install --quiet \\\n    something\n", "").replace(
        "%matplotlib inline", ""
    )
    lines = lines.replace('assert "layers(x)" in inspect.getsource(Network.forward)', "")
    script.write_text(lines + TRAINED, encoding="utf-8")
    same = planned(session, script)
    assert found.name == "my.ipynb"
    assert found.plan.reserved == same.plan.reserved
    assert [way.plan.reserved for way in found.ways] == [way.plan.reserved for way in same.ways]
    places = {edit.place for way in found.ways for edit in way.edits}
    assert {"before my.ipynb[4]:1", "around my.ipynb[4]:3", "after my.ipynb[2]:4"} <= places
    # torch was imported by a cell before
    assert not any("import torch" in edit.lines for way in found.ways for edit in way.edits)
    assert any("my.ipynb[2] is its second cell" in note for note in found.plan.notes)


def test_an_error_names_the_cell_and_its_line(tmp_path: Path, session: Session) -> None:
    path = notebook(tmp_path, "import torch", "x = 1\nx = torch.zeros(2) @ torch.zeros(3)")
    with pytest.raises(MptError, match=r"my\.ipynb\[2\]:2"):
        planned(session, path)
    path = notebook(tmp_path, "import torch", "\nfiles = !ls")
    with pytest.raises(MptError, match=r"SyntaxError: invalid syntax, at \S*my\.ipynb\[2\]:2$"):
        planned(session, path)


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("%load_ext autoreload\nx = 1", "pass\nx = 1"),
        ("if x:\n    !ls\n    x = 2", "if x:\n    pass\n    x = 2"),
        ("x = (7\n% 4)", "x = (7\n% 4)"),
        ("%time train(3)", "train(3)"),
        ("%env CUDA_VISIBLE_DEVICES=0", "__import__('os').environ['CUDA_VISIBLE_DEVICES'] = '0'"),
        ("model?", "pass"),
        ("?model", "pass"),
        ("!pip install a \\\n  b \\\n  c\nx = 1", "\n\npass\nx = 1"),
        ("%%html\n<b>x</b>", "\n"),
        ("%%capture out\nx = 1", "\nx = 1"),
        ("files = !ls", "files = !ls"),
    ],
)
def test_what_only_ipython_understands_is_left_out_of_a_cell(cell: str, text: str) -> None:
    assert as_python(cell) == text


def test_what_is_no_notebook_of_python_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "my.ipynb"
    for text in ("x = 1", "[]", '{"worksheets": [], "metadata": {}}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"my\.ipynb: no notebook in the format of Jupyter 4"):
            parts_of(str(path))
    in_r = notebook(tmp_path, "x <- 1", kernelspec={"language": "R"})
    with pytest.raises(ConfigError, match="a notebook in R; mpt plans Python"):
        parts_of(str(in_r))
    with pytest.raises(ConfigError, match=r"my\.ipynb:build: a notebook is planned as a whole"):
        find_source(f"{in_r}:build", ())


def test_a_notebook_changes_its_folder_and_names_the_script_that_it_starts(
    tmp_path: Path, session: Session
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mean.txt").write_text("0.5")
    moved = f"%cd {tmp_path / 'data'}\n%cd /content/nowhere\nmean = float(open('mean.txt').read())"
    assert planned(session, notebook(tmp_path, moved, NETWORK, MADE, TRAINED)).plan.reserved
    started = "!pip install torch", "%cd repo\n!python3 -u train.py --batch 8"
    with pytest.raises(MptError, match=r"mpt plan train\.py -- --batch 8"):
        planned(session, notebook(tmp_path, *started))
    with pytest.raises(MptError, match=r"mpt plan tools/run\.py$"):
        planned(session, notebook(tmp_path, "!torchrun --nproc_per_node=2 tools/run.py"))
