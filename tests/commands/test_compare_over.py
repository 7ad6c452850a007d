"""`mpt compare --over`: each mode at several values of a setting; a stand-in trains in no time."""

import json
import math

import pytest
import yaml

from mpt.commands import compare
from mpt.commands.compare import Command as CompareArguments
from mpt.errors import ConfigError
from mpt.workflows.comparing.compare_over import Over
from tests.commands.test_compare import write_summary


def train(file, folder, name, resumes):
    """Write the run of a training whose best rate is 1e-3 in float32 and 1.3 times lower in half precision."""
    config = yaml.safe_load(file.read_text())
    mode, rate = config["precision"]["mode"], config["optimizer"]["lr"]
    (folder / name).mkdir()
    (folder / name / "config.yaml").write_text(file.read_text())
    if rate > 0.01:
        return 6, "the loss was not finite"
    best = 1e-3 / (1.0 if mode == "fp32" else 1.3)
    write_summary(
        folder / name, mode, 0.95 - 0.05 * math.log2(rate / best) ** 2 + 0.001 * config["seed"], 10
    )
    return 0, ""


def go(tmp_path, *what, **changes):
    compare.run(
        CompareArguments(what=what, runs=str(tmp_path), **changes), train, lambda file: (0, "")
    )


def test_modes_are_trained_at_each_value_and_their_windows_are_said_and_drawn(tmp_path, capsys):
    go(tmp_path, "fp32", "amp", "optimizer.lr=1e-3", over="optimizer.lr=0.25x,0.5x,1x,2x,20x")
    said = capsys.readouterr().out
    assert "fp32: trains from 0.5x to 2x" in said
    assert "best value 0.77 times fp32's" in said
    folder = tmp_path / "sweep-small_cnn-fp32-amp-optimizer.lr"
    found = json.loads((folder / "comparison.json").read_text())
    assert [window["mode"] for window in found["windows"]] == ["fp32", "amp"]
    assert found["windows"][0]["points"][-1]["failed"] == {
        str(seed): "the loss was not finite" for seed in range(3)
    }
    assert found["windows"][1]["best_ratio"]["value"] == pytest.approx(1 / 1.3, rel=1e-6)
    page = (folder / "comparison.html").read_text()
    assert "fp32 trains from 0.5x to 2x" in page
    assert "3 of 3 diverged" in page
    assert "<svg" in page
    assert "| 20x | 3 of 3 diverged | does not train |" in (folder / "comparison.md").read_text()


def test_a_multiple_is_one_of_every_phase_that_has_a_rate_of_its_own(tmp_path):
    file = tmp_path / "gan.yaml"
    file.write_text(
        "model: {name: dcgan}\noptimizer: {name: adam, lr: 4e-4, phases: {disc: {lr: 1e-4}}}\n"
    )
    go(tmp_path, config=file, over="optimizer.lr=0.5x,1x")
    written = [
        yaml.safe_load(path.read_text())["optimizer"]
        for path in sorted(tmp_path.glob("sweep*/*/config.yaml"))
    ]
    rates = {(one["lr"], one["phases"]["disc"]["lr"]) for one in written}
    assert rates == {(2e-4, 5e-5), (4e-4, 1e-4)}


@pytest.mark.parametrize(
    "text",
    ["optimizer.lr", "optimizer.lr=1x", "=1,2", "optimizer.lr=1x,2", "a=0x,1x", "a=1,1", "a=1,b"],
)
def test_what_names_no_values_is_refused_in_one_line(text):
    with pytest.raises(ConfigError, match="two positive numbers or more"):
        Over.parse(text)


def test_what_a_sweep_cannot_do_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not set in this configuration"):
        go(tmp_path, over="optimizer.clip_grad_norm=0.5x,1x")
    with pytest.raises(ConfigError, match="allowed with --over is 3 or more"):
        go(tmp_path, over="optimizer.lr=0.5x,1x", seeds=2)
    with pytest.raises(ConfigError, match="--gate does not go with --over"):
        go(tmp_path, over="optimizer.lr=0.5x,1x", gate=True)
    with pytest.raises(ConfigError, match="nonsense"):
        go(tmp_path, over="optimizer.nonsense=1,2")
