"""DeepFaceLab's networks compute what they computed there, with weights made by a formula."""

from functools import cache

import numpy as np
import pytest
import torch

from mpt.errors import CheckpointError
from mpt.systems.deepfacelab.nn.facelib import enhancer, fan, s3fd, xseg
from mpt.systems.deepfacelab.nn.weights.facelib_weights import fill_network, network_arrays
from tests.systems.deepfacelab.formula_weights import fill
from tests.systems.deepfacelab.pixels import arrays, facts


@cache
def filled(model):
    """One of the networks with its formula's weights."""
    network = {"S3FD": s3fd.S3FD, "FAN": fan.FAN, "XSeg": xseg.XSeg}[model]()
    listing = facts("xseg")["listing"] if model == "XSeg" else facts("detectors")[model]["listing"]
    return fill_network(
        network, {key: fill(model, key, tuple(shape)) for key, shape in listing.items()}, model
    )


def draw_heat(faces):
    with torch.no_grad():
        return filled("FAN")(
            torch.from_numpy(np.ascontiguousarray(faces.transpose(0, 3, 1, 2)))
        ).numpy()


def stored_pictures():
    return [key.split("_")[1] for key in arrays("detectors") if key.endswith("_network_input")]


@pytest.mark.parametrize("name", stored_pictures())
def test_s3fd_finds_deepfacelabs_boxes(name):
    stored = arrays("detectors")
    picture = torch.from_numpy(stored[f"s3fd_{name}_network_input"].astype(np.float32)).permute(
        2, 0, 1
    )[None]
    with torch.no_grad():
        outputs = [
            tuple(part[0].permute(1, 2, 0).numpy() for part in pair)
            for pair in filled("S3FD")(picture.contiguous())
        ]
    for number, (chances, offsets) in enumerate(outputs, start=1):
        for found, kind in ((chances, "cls"), (offsets, "reg")):
            expected = stored[f"s3fd_{name}_{kind}{number}"].reshape(found.shape)
            np.testing.assert_allclose(found, expected, atol=1e-4)
    boxes = s3fd.refine(outputs)
    np.testing.assert_array_equal(boxes, stored[f"s3fd_{name}_refined"])
    scale = s3fd.input_scale(*stored[f"s3fd_{name}_u8"].shape[:2])
    np.testing.assert_array_equal(s3fd.choose(boxes, scale), stored[f"s3fd_{name}_faces"])


def test_no_box_is_no_face():
    empty = [(np.zeros((2, 2, 2), np.float32), np.zeros((2, 2, 4), np.float32))] * 6
    assert s3fd.choose(s3fd.refine(empty), 2.0) == []


def test_fan_finds_deepfacelabs_landmarks():
    stored = arrays("detectors")
    picture = np.ascontiguousarray(stored["s3fd_photo_u8"][..., ::-1])
    for suffix in ("", "_outside"):
        box = tuple(stored[f"fan_rect{suffix}"])
        centre, scale = fan.centre_and_scale(box)
        shown = fan.crop(picture, centre, scale)
        assert np.abs(shown.astype(int) - stored[f"fan_crop{suffix}_u8"]).max() <= 1
        found = fan.find_landmarks(draw_heat, picture, box)
        np.testing.assert_allclose(found, stored[f"fan_landmarks{suffix}"], atol=1e-3)
    heat = draw_heat(stored["fan_crop_u8"].astype(np.float32)[None] / 255)[0]
    np.testing.assert_array_equal(
        heat.reshape(68, -1).argmax(axis=1), stored["fan_heatmaps_argmax"]
    )
    np.testing.assert_allclose(
        heat[:, ::4, ::4], stored["fan_heatmaps_every4"], atol=3e-4 * heat.std()
    )


def test_landmarks_lean_towards_the_higher_neighbour():
    stored = arrays("detectors")
    heat = np.random.RandomState(73).normal(0, 0.1, (68, 64, 64)).astype(np.float32)
    for number, (x, y) in enumerate(stored["crafted_peaks_xy"]):
        heat[number, y, x] = 3
    found = fan.points_of(heat, np.array([100.0, 120.0]), 0.8)
    np.testing.assert_allclose(found, stored["crafted_points"], atol=1e-6)


def test_xseg_draws_deepfacelabs_masks():
    stored, network = arrays("xseg"), filled("XSeg")
    face = stored["input_u8"].astype(np.float32).reshape(256, 256, 3) / 255
    tensor = torch.from_numpy(face).permute(2, 0, 1)[None].contiguous()
    with torch.no_grad():
        logits, bare = network(tensor), network(tensor, pretrains=True)
    np.testing.assert_allclose(
        logits[0, 0, ::4, ::4], stored["logits_every4"].reshape(64, 64), atol=1e-3
    )
    np.testing.assert_allclose(
        bare[0, 0, ::4, ::4], stored["pretrain_logits_every4"].reshape(64, 64), atol=1e-3
    )
    mask = xseg.draw_mask(network, face)
    np.testing.assert_allclose(mask[::4, ::4], stored["extract_every4"].reshape(64, 64), atol=1e-3)


def test_weights_go_back_as_they_came_and_others_are_refused():
    listing = facts("xseg")["listing"]
    back = network_arrays(filled("XSeg").state_dict())
    assert list(back) == list(listing)
    for key in ("conv01/conv/weight:0", "up3/conv/weight:0", "dense1/weight:0", "conv53/frn/eps:0"):
        np.testing.assert_array_equal(back[key], fill("XSeg", key, tuple(listing[key])))
    with pytest.raises(CheckpointError, match="holds no conv01/conv/bias:0"):
        fill_network(xseg.XSeg(), {"other": np.zeros(1, np.float32)}, "x.npy")
    with pytest.raises(CheckpointError, match="another network's"):
        fill_network(xseg.XSeg(), {**back, "dense1/weight:0": back["dense1/weight:0"].T}, "x.npy")
    wrong = {**back, "out_conv/bias:0": np.full(1, np.nan, np.float32)}
    with pytest.raises(CheckpointError, match="not finite"):
        fill_network(xseg.XSeg(), wrong, "x.npy")


@pytest.mark.parametrize("larger", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_enhancer_draws_deepfacelabs_larger_faces(larger):
    """Its weights were the formula's, those of more than one dimension times the root of 2."""
    weights = {
        key: fill("FaceEnhancer", key, tuple(shape)) * np.float32(2**0.5 if len(shape) > 1 else 1)
        for key, shape in facts("enhancer").items()
    }
    network = fill_network(enhancer.Enhancer(), weights, "formula")
    assert list(network_arrays(network.state_dict())) == list(weights)
    face, stored = (
        arrays("merger_inputs")["one_face0_predicted_u8"].astype(np.float32) / 255,
        arrays("enhancer"),
    )
    found = enhancer.enlarge(network, face[::2, ::2])  # smaller than a patch
    np.testing.assert_allclose(found[::2, ::2], stored["small_every2"], atol=2e-3)
    if larger:
        found = enhancer.enlarge(network, np.tile(face, (2, 2, 1))[:256, :200])  # four patches
        np.testing.assert_allclose(found[::8, ::8], stored["large_every8"], atol=2e-3)
