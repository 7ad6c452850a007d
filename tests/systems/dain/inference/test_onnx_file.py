"""Interpolating networks as ONNX files behind a gate."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from mpt.errors import ConfigError, GateError
from mpt.systems.dain.inference import onnx_file
from mpt.systems.dain.inference.onnx_file import Wishes, export_file, read_size
from mpt.systems.dain.nn.flow_warp import FlowWarp
from mpt.systems.dain.nn.operators.filter_interpolation import interpolate_filtered
from mpt.systems.dain.nn.operators.interpolation import Interpolator
from mpt.systems.dain.nn.operators.projection import Projection, project_flow
from mpt.systems.dain.nn.rife_published.practical import PracticalRife
from mpt.systems.dain.nn.rife_published.versions import plan_425

WISHES = Wishes(size="96x64", scale=1.0, half=False, int8=None, gate=40.0, overwrite=False)


def of(net: Interpolator) -> SimpleNamespace:
    run = SimpleNamespace(task=SimpleNamespace(modules={"net": net}))
    return SimpleNamespace(run=run, config=SimpleNamespace(model=SimpleNamespace(name="flow_warp")))


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every name stand for a small network built as 4.25 is."""
    torch.manual_seed(0)
    plan = plan_425((8, 8), scales=(2.0, 1.0), multiple=32)
    monkeypatch.setattr(onnx_file, "open_network", lambda *_: of(PracticalRife(plan)))
    monkeypatch.setattr(onnx_file, "rebuild", lambda trained, _: trained.run)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's own exporter
def test_a_file_in_8_bits_has_grid_samples_and_is_judged_by_its_frames(network, tmp_path, capsys):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    for number in range(3):
        Image.effect_noise((100, 70), 60 + number).convert("RGB").save(tmp_path / f"{number}.png")
    wishes = Wishes("96x64", 1.0, False, tmp_path, 20.0, False)
    export_file("run", tmp_path / "out.onnx", wishes, tmp_path)
    said = capsys.readouterr().out
    assert "against float32, worst of 2 frames: PSNR" in said
    assert "96 x 64, inputs first, last, time" in said
    kinds = {node.op_type for node in onnx.load(str(tmp_path / "out.onnx")).graph.node}
    assert {"GridSample", "QuantizeLinear", "Conv"} <= kinds
    with pytest.raises(ConfigError, match="is there already"):
        export_file("run", tmp_path / "out.onnx", wishes, tmp_path)
    with pytest.raises(GateError, match=r"--gate asks for 150; it was not kept"):
        export_file(
            "run", tmp_path / "half.onnx", Wishes("96x64", 1.0, True, None, 150.0, False), tmp_path
        )
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".onnx", ".png", ".png", ".png"]


class Operators(torch.nn.Module):
    """DAIN's projection with its holes filled, and the warp along it."""

    def forward(
        self, image: torch.Tensor, flow: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        projected = project_flow(flow, weight, fill=True)
        kernel = weight.expand(-1, 16, -1, -1)
        return torch.cat((projected, interpolate_filtered(image, projected, kernel)), dim=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's own exporter
def test_dain_s_operators_are_the_same_in_a_file(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    given = torch.rand(1, 3, 12, 16), 6 * torch.randn(1, 2, 12, 16), 0.2 + torch.rand(1, 1, 12, 16)
    with torch.no_grad():
        _, count = Projection.apply(*given[1:], False)
        wanted = Operators()(*given)
        program = torch.onnx.export(
            Operators(), given, dynamo=True, opset_version=20, verbose=False
        )
    assert (count == 0).any()  # there are holes
    program.save(str(tmp_path / "operators.onnx"))
    session = runtime.InferenceSession(
        str(tmp_path / "operators.onnx"), providers=["CPUExecutionProvider"]
    )
    names = [one.name for one in session.get_inputs()]
    made = session.run(
        None, {name: value.numpy() for name, value in zip(names, given, strict=True)}
    )[0]
    torch.testing.assert_close(torch.from_numpy(made), wanted, rtol=1e-5, atol=1e-5)


def test_what_does_not_export_is_said_before_anything_is_written(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"--size: found '96'; write WIDTHxHEIGHT"):
        read_size("96")
    monkeypatch.setattr(onnx_file, "open_network", lambda *_: of(FlowWarp([4, 8, 8])))
    monkeypatch.setattr(onnx_file, "rebuild", lambda trained, _: trained.run)
    with pytest.raises(
        ConfigError, match="flow_warp is not exported; DAIN and RIFE with a version are"
    ):
        export_file("run", tmp_path / "out.onnx", WISHES, tmp_path)
    with pytest.raises(ConfigError, match=r"does not end in \.onnx"):
        export_file("run", tmp_path / "out.pt", WISHES, tmp_path)
    assert not list(tmp_path.iterdir())
