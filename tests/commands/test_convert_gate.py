"""An ONNX export proves itself by the metric: what does not fit stays float32, what loses too much is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpt.commands import convert
from mpt.commands.convert import Command as ConvertArguments
from mpt.config.finding.part_packages import use_parts
from mpt.errors import ConfigError, DataError, GateError
from mpt.inference.graphs.files import open_graph
from mpt.inference.graphs.mixed import beyond_half, to_half
from mpt.inference.graphs.watched import magnitudes
from mpt.workflows.exporting import export_gate as gate
from mpt.workflows.exporting import export_graphs as writing
from tests.commands.conftest import CLASSIFIER, GENERATOR, save_run

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript", reason="the exporter needs it")

PLANTED = '''
"""A classifier that multiplies by 1e5 on its way, and divides again."""

import torch
from torch import nn

from mpt.config.options import ModelOptions

TASK = "classify"


class Settings(ModelOptions):
    image_size: int = 16
    """Pixels."""


class Planted(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 4, 3, 2), nn.Linear(4 * 49, classes)

    def forward(self, image):
        large = torch.relu(self.first(image)) * 1e5
        return self.last((large / 1e5).flatten(1))


def build(settings, data):
    return {"net": Planted(len(data.classes))}
'''


def go(run: Path, **changes: Any) -> None:
    convert.run(
        ConvertArguments(run=str(run), runs=str(run.parent), to="onnx", samples=64, **changes)
    )


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "parts" / "nn"
    folder.mkdir(parents=True)
    (folder / "planted_range.py").write_text(PLANTED)
    monkeypatch.setenv("MPT_PARTS", str(tmp_path / "parts"))
    use_parts((str(tmp_path / "parts"),))
    return save_run(tmp_path, {**CLASSIFIER, "model": {"name": "planted_range"}})


def texts(path: Path) -> dict[str, str]:
    return {one.key: one.value for one in onnx.load(str(path)).metadata_props}


def test_a_planted_range_of_1e5_stays_float32_and_is_listed(planted: Path, capsys: Any) -> None:
    go(planted, half=True)
    said = capsys.readouterr().out
    assert "2 of " in said
    assert "reaches 1" in said
    path = planted / "classifier-half.onnx"
    kept = json.loads(texts(path)["mpt_kept_float32"])
    model = onnx.load(str(path))
    assert sorted(node.op_type for node in model.graph.node if node.name in kept) == ["Div", "Mul"]
    kinds = {
        one.data_type
        for one in model.graph.initializer
        if one.name.startswith(("first", "last", "net"))
    }
    assert onnx.TensorProto.FLOAT not in kinds
    page = (planted / "classifier-half.onnx.html").read_text()
    assert all(name in page for name in kept)
    image = np.random.default_rng(0).random((3, 1, 16, 16), dtype=np.float32)
    assert np.isfinite(
        open_graph(path.read_bytes()).run(None, {model.graph.input[0].name: image})[0]
    ).all()


def test_without_the_rule_the_planted_node_would_overflow(planted: Path) -> None:
    go(planted)
    model = onnx.load(str(planted / "classifier.onnx"))
    feeds = [
        {
            model.graph.input[0].name: np.random.default_rng(0).random(
                (3, 1, 16, 16), dtype=np.float32
            )
        }
    ]
    sizes = magnitudes(model, feeds)
    assert max(sizes.values()) > 65504
    assert beyond_half(model.graph, sizes)
    everything = to_half(model, ())
    product = next(node for node in everything.graph.node if node.op_type == "Mul")
    scale = next(one for one in everything.graph.initializer if one.name in product.input)
    assert np.isinf(onnx.numpy_helper.to_array(scale)).all(), "1e5 is no float16"


@pytest.mark.parametrize("kind", ["half", "int8"])
def test_what_loses_more_than_the_gate_is_refused_with_the_nodes_on_the_page(
    kind: str, classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = gate.loss_of
    monkeypatch.setattr(gate, "loss_of", lambda *given: honest(*given) + 1.0)
    with pytest.raises(
        GateError, match=r"outside of the gate, and not kept.*classifier-\w+.onnx.html"
    ):
        go(classifier, **{kind: True})
    assert not list(classifier.glob("*.onnx"))
    (page,) = classifier.glob("*.onnx.html")
    assert "Refused" in page.read_text()
    assert "Nodes that add most error" in page.read_text()


def test_a_float32_file_that_computes_something_else_is_refused(
    classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "loss_of", lambda *given: 0.5)
    with pytest.raises(GateError, match="outside of the gate"):
        go(classifier)
    assert not list(classifier.glob("*.onnx"))


def test_nodes_are_kept_one_after_the_other_until_the_metric_is_within(
    classifier: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    losses = iter([1.0, 1.0, 0.0])
    monkeypatch.setattr(gate, "loss_of", lambda *given: next(losses))
    go(classifier, half=True)
    kept = json.loads(texts(classifier / "classifier-half.onnx")["mpt_kept_float32"])
    assert len(kept) == 2
    assert all("it adds an error of" in why for why in kept.values())
    assert "nodes compute in float32" in capsys.readouterr().out


def test_eight_bits_are_calibrated_on_training_data_and_measured_on_test_data(
    classifier: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []
    honest = gate.Place.measure
    monkeypatch.setattr(
        gate.Place,
        "measure",
        lambda place, opened, data=None: (seen.append(data), honest(place, opened, data))[1],
    )
    go(classifier, int8=True, gate="50%")
    assert (
        "in float32, before its conversion to int8, ONNX Runtime's output differs from PyTorch's by 0.00%"
        in capsys.readouterr().out
    )
    path = classifier / "classifier-int8.onnx"
    model = onnx.load(str(path))
    assert "QuantizeLinear" in {node.op_type for node in model.graph.node}
    assert texts(path)["mpt_dtype"] == "int8"
    assert json.loads(texts(path)["mpt_measured"])["metric"] == "accuracy"
    chosen = [data for data in seen if data is not None]
    assert [len(data) for data in chosen] == [1437], (
        "the training samples of the digits, of which 64 are taken"
    )


def test_a_fixed_batch_is_fixed_and_takes_any_number_of_samples(classifier: Path) -> None:
    go(classifier, batch=5)
    path = classifier / "classifier.onnx"
    opened = open_graph(path.read_bytes())
    assert opened.get_inputs()[0].shape[0] == 5
    from mpt.inference.exported import open_exported

    run = open_exported(path, "cpu", (), ()).run
    image = torch.rand(7, 1, 16, 16)
    made = run.task.modules["net"](image)
    assert made.shape == (7, 10)
    assert torch.allclose(made[:5], run.task.modules["net"](image[:5]), atol=1e-6)


def test_a_generator_is_judged_by_its_distance(tmp_path: Path, capsys: Any) -> None:
    run = save_run(tmp_path, {**GENERATOR, "task": {"metric_samples": 32}})
    go(run, half=True)
    assert "reaches frechet_distance" in capsys.readouterr().out


DENOISER: dict[str, Any] = {
    "model": {"name": "small_denoiser", "image_size": 8},
    "task": {"metric_samples": 16, "sampling_steps": 2},
    "dataset": {"name": "digits"},
    "precision": {"mode": "fp32"},
    "train": {"batch_size": 16, "steps": 1},
    "name": "denoiser",
}


def test_a_network_that_takes_labels_is_judged_and_refused_as_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graph takes whole numbers for labels, and was given floats."""
    honest = writing.loss_of
    monkeypatch.setattr(writing, "loss_of", lambda *given: honest(*given) + 1e9)
    with pytest.raises(GateError, match=r"reaches frechet_distance .* outside of the gate"):
        go(save_run(tmp_path, DENOISER))


def test_options_without_a_graph_and_eight_bits_without_data_are_refused(
    classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for option in ({"int8": True}, {"gate": "1%"}, {"batch": 2}):
        with pytest.raises(ConfigError, match="only --to onnx"):
            convert.run(ConvertArguments(run=str(classifier), to="pt", **option))
    with pytest.raises(ConfigError, match="choose one"):
        go(classifier, int8=True, half=True)
    with pytest.raises(ConfigError, match="a positive share"):
        go(classifier, gate="much")
    monkeypatch.setattr(gate.Place, "has_data", property(lambda place: False))
    with pytest.raises(DataError, match="--int8 needs the run's data set"):
        go(classifier, int8=True)
    go(classifier, half=True)
    assert "mpt_measured" not in texts(classifier / "classifier-half.onnx")
