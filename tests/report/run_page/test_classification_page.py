"""A classifier's page shows who is taken for whom, and a forged file can put nothing on it."""

from __future__ import annotations

import json
from pathlib import Path

from mpt.commands.train import Command as TrainArguments
from mpt.commands.train import run
from mpt.report.run_page.page import write_report

CONFIG = """
model: {name: small_cnn, features: 4, image_size: 16}
dataset: digits
precision: fp32
train: {steps: 3, batch_size: 64}
name: run
"""


def test_a_classifier_s_page_shows_classes_calibration_and_worst_errors(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    run(TrainArguments(config=tmp_path / "c.yaml", runs=str(tmp_path / "runs"), quiet=True))
    path = tmp_path / "runs" / "run"
    details = json.loads((path / "evaluation.json").read_text("utf-8"))
    accuracy = json.loads((path / "summary.json").read_text("utf-8"))["evaluations"]["accuracy"][
        "last"
    ]
    assert sum(details["matrix"][n][n] for n in range(10)) / details["samples"] == accuracy
    page = (path / "report.html").read_text("utf-8")
    assert "Confusion: rows are the truth" in page
    assert 'aria-label="calibration"' in page
    assert page.count("data:image/png;base64,") >= len(details["worst"]) + len(details["examples"])
    assert len(details["worst"]) > 0
    assert "Examples, evenly over the test set" in page
    assert page.count("<script") == 1
    # ten columns of one width
    assert 'class="heat confusion" style="--cells: 32.0em; --names: 1ch"' in page

    details["worst"][0] |= {"picture": 'x" onerror="alert(1)', "label": "<script>alert(1)</script>"}
    details["classes"][0] = "<b>zero</b>"
    details["per_class"][0] |= {"name": "nobody", "samples": 0}
    details["worst"][0]["name"] = "/home/someone/pictures/test/<cat>/13.jpg"
    (path / "evaluation.json").write_text(json.dumps(details))
    write_report(path)
    page = (path / "report.html").read_text("utf-8")
    assert page.count("<script") == 1
    assert "onerror=" not in page
    assert ">&lt;cat&gt;/13.jpg</span>" in page  # beside its picture, where there is little room
    assert "&lt;b&gt;zero&lt;/b&gt;" in page
    # of a class without test images there is no recall to tell
    unknown = '<td class="number">–</td>' * 3
    assert f'<td>nobody</td><td class="number">0</td>{unknown}</tr>' in page
    assert 'class="heat confusion upright" style="--cells: 32.0em; --names: 11ch"' in page
    for broken in (
        {**details, "matrix": 5},
        {**details, "calibration": {"bins": [{}]}},
        [],
        {"step": 1},
    ):
        (path / "evaluation.json").write_text(json.dumps(broken))
        write_report(path)
        assert "Calibration" not in (path / "report.html").read_text("utf-8")
