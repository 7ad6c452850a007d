import numpy as np
import pytest
import torch

from mpt.errors import CheckpointError, GateError
from mpt.systems.deepfacelab.data.faces.face_pairs import describe_pairs
from mpt.systems.deepfacelab.inference.dfm import write_dfm
from mpt.systems.deepfacelab.nn import saehd


def autoencoder(archi):
    torch.manual_seed(0)
    settings = saehd.Settings(
        archi=archi, image_size=64, ae_dims=6, e_dims=4, d_dims=4, d_mask_dims=2
    )
    return saehd.build(settings, describe_pairs(64, 1))["autoencoder"]


@pytest.mark.parametrize("archi", ["df-ud", "liae-udtc"])
def test_deepfacelive_finds_its_names_and_gets_the_swap(tmp_path, archi):
    runtime = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    model = autoencoder(archi)
    path = tmp_path / "model.dfm"
    assert write_dfm(path, model, 64).difference < 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["model.dfm"]
    assert onnx.load(str(path)).opset_import[0].version == 12
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (slot,) = session.get_inputs()
    assert (slot.name, slot.shape[1:], slot.type) == ("in_face:0", [64, 64, 3], "tensor(float)")
    assert [slot.name for slot in session.get_outputs()] == [
        "out_face_mask:0",
        "out_celeb_face:0",
        "out_celeb_face_mask:0",
    ]
    bgr = np.random.default_rng(0).random((3, 64, 64, 3), np.float32)
    mask, swap, swap_mask = session.run(None, {"in_face:0": bgr})
    rgb = torch.from_numpy(bgr[..., ::-1].copy()).permute(0, 3, 1, 2)
    with torch.no_grad():
        expected, expected_mask = model.draw_swap(model.encode_swap(rgb))
        dst_mask = model.draw_dst(model.encode_dst(rgb))[1]
    for found, wanted in (
        (swap[..., ::-1], expected),
        (swap_mask, expected_mask),
        (mask, dst_mask),
    ):
        np.testing.assert_allclose(found, wanted.permute(0, 2, 3, 1).numpy(), atol=1e-4)


@pytest.mark.parametrize("archi", ["df-ud", "liae-udtc"])
def test_a_quantized_file_has_convolutions_in_half_and_dense_layers_in_float32(tmp_path, archi):
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    model = autoencoder(archi)
    write_dfm(tmp_path / "whole.dfm", model, 64)
    assert 0 < write_dfm(tmp_path / "half.dfm", model, 64, in_half=True).difference < 5e-3
    graph = onnx.load(str(tmp_path / "half.dfm")).graph
    assert {slot.type.tensor_type.elem_type for slot in (*graph.input, *graph.output)} == {
        onnx.TensorProto.FLOAT
    }
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    used = {
        node.op_type: {kinds[name] for name in node.input if name in kinds} for node in graph.node
    }
    assert used["Conv"] == {onnx.TensorProto.FLOAT16}
    assert onnx.TensorProto.FLOAT16 not in used["Gemm"]
    assert (tmp_path / "half.dfm").stat().st_size < 0.8 * (tmp_path / "whole.dfm").stat().st_size
    assert next(model.parameters()).dtype == torch.float32


def test_weights_that_are_not_finite_are_refused(tmp_path):
    pytest.importorskip("onnx")
    model = autoencoder("df")
    model["inter"].dense1.weight.data[0, 0] = torch.nan
    with pytest.raises(CheckpointError, match="not finite"):
        write_dfm(tmp_path / "model.dfm", model, 64)
    assert not list(tmp_path.iterdir())


def test_swaps_of_real_faces_pass_a_gate_and_the_file_says_where_it_comes_from(tmp_path):
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    model, path = autoencoder("df-ud"), tmp_path / "half.dfm"
    faces = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with pytest.raises(
        GateError,
        match=r"half.dfm: its swaps of 3 faces are \d+\.\d dB from float32's, and --gate asks",
    ):
        write_dfm(path, model, 64, in_half=True, faces=faces, gate=200)
    assert not list(tmp_path.iterdir())
    checked = write_dfm(path, model, 64, in_half=True, faces=faces, about={"mpt_run": "mine"})
    assert checked.faces == 3
    assert checked.are_real
    assert 40 < checked.psnr < 120
    assert {one.key: one.value for one in onnx.load(str(path)).metadata_props} == {
        "mpt_run": "mine"
    }


def test_a_file_that_draws_something_else_is_not_kept(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    monkeypatch.setattr("mpt.systems.deepfacelab.inference.dfm.HALF_TOLERANCE", 1e-9)
    with pytest.raises(
        CheckpointError, match=r"half.dfm: ONNX Runtime draws .* off; it was not kept"
    ):
        write_dfm(tmp_path / "half.dfm", autoencoder("df-ud"), 64, in_half=True)
    assert not list(tmp_path.iterdir())
