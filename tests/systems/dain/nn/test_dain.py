"""The published network against passes of DAIN itself with weights made from their names."""

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mpt.systems.dain.nn.dain import PARTS, Dain
from mpt.systems.dain.nn.networks.flow_net import FlowNet
from mpt.systems.dain.nn.networks.small_nets import SmallFlowNet

from .formula_weights import formula_state

RECORDED = Path(__file__).parents[1] / "fixtures" / "network.npz"
COUNTS = {
    "flow": 9_374_340,
    "depth": 5_357_153,
    "context": 156_864,
    "kernel": 5_514_112,
    "rectify": 3_629_187,
}
# 0.014 with AVX2
GRADIENT = 1e-4 if "avx512f" in Path("/proc/cpuinfo").read_text("utf-8") else 5e-2


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    with np.load(RECORDED, allow_pickle=False) as archive:
        return dict(archive)


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return formula_state(Dain())


@pytest.fixture
def net(weights: dict[str, Tensor]) -> Dain:
    net = Dain()
    net.load_state_dict(weights)
    return net.eval()


def tensor(value: np.ndarray) -> Tensor:
    return torch.from_numpy(value.copy())


def distance(found: Tensor, wanted: np.ndarray) -> float:
    return float((found.detach() - tensor(wanted)).abs().max() / np.abs(wanted).max())


def test_names_and_shapes_are_the_published_ones_and_every_part_has_its_count(recorded, weights):
    assert list(weights) == [str(name) for name in recorded["names"]]
    assert ["x".join(map(str, t.shape)) for t in weights.values()] == [
        str(shape) for shape in recorded["shapes"]
    ]
    assert [zlib.crc32(t.numpy().tobytes()) for t in weights.values()] == list(recorded["crc32"])
    net = Dain()
    for part, prefixes in PARTS.items():
        modules = [getattr(net, prefix) for prefix in prefixes]
        assert sum(p.numel() for module in modules for p in module.parameters()) == COUNTS[part]
    assert sum(p.numel() for p in net.parameters()) == sum(COUNTS.values()) == 24_031_656


def test_the_flow_network_and_its_gradient_are_pwc_nets(recorded, net):
    x = tensor(recorded["flow/input"]).requires_grad_()
    out = net.flownets(x)
    out.backward(tensor(recorded["flow/grad_out"]))
    assert distance(out, recorded["flow/flow2"]) < 1e-5
    assert distance(x.grad, recorded["flow/grad_in"]) < 1e-5


def test_the_depth_network_is_megadepths_in_both_modes(recorded, net):
    x = tensor(recorded["depth/input"])
    assert distance(net.depthNet(x), recorded["depth/out_eval"]) < 1e-5
    assert distance(net.depthNet.train()(x), recorded["depth/out_train"]) < 1e-4


def test_slow_motion_is_dains_at_every_time(recorded, net):
    first, last = tensor(recorded["slowmotion/frames"])
    with torch.no_grad():
        prepared = net.prepare(first, last)
        assert distance(prepared.flow_01, recorded["slowmotion/pwc_01"]) < 1e-5
        for index, time in enumerate(recorded["slowmotion/times"]):
            found = net.render(first, last, prepared, torch.tensor([float(time)]))
            assert (
                distance(found.extra["projected_01"], recorded["slowmotion/projected_01"][index])
                < 2e-5
            )
            assert distance(found.blended, recorded["slowmotion/blended"][index]) < 2e-5
            assert distance(found.image, recorded["slowmotion/rectified"][index]) < 2e-5
            assert torch.equal(found.image, net(first, last, torch.tensor([float(time)]))[0])


def test_validation_inside_training_fills_holes_and_normalises_by_the_batch(recorded, net):
    first, _, last = tensor(recorded["train/frames"])
    net.train()
    net.fill_holes = True
    with torch.no_grad():
        found = net.between(first, last, torch.tensor([0.5]))
    assert distance(found.blended, recorded["validation/blended"]) < 2e-5
    assert distance(found.image, recorded["validation/rectified"]) < 2e-5


@pytest.mark.parametrize("gradient", ["true", "original"])
def test_a_training_pass_has_dains_loss_gradients_and_statistics(recorded, net, gradient):
    net.projection.original_gradient = net.filter_interpolation.original_gradient = (
        gradient == "original"
    )
    net.train()
    first, middle, last = tensor(recorded["train/frames"])
    image, blended = net(first, last, torch.tensor([0.5]))
    loss = ((image - middle).square() + 1e-12).sqrt().mean()
    loss.backward()
    assert distance(image, recorded["train/rectified"]) < 2e-5
    assert distance(blended, recorded["train/blended"]) < 2e-5
    assert abs(loss.item() - recorded["train/loss_total"]) < 1e-6
    parameters = dict(net.named_parameters())
    for name, norm in zip(
        recorded["train/grad_names"], recorded[f"train/f64_grad_norm_{gradient}"], strict=True
    ):
        grad = parameters[str(name)].grad
        if norm < 1e-5 or grad is None:  # biases before a BatchNorm: noise around zero
            continue
        # ReLUs near zero make the depth network's float32 gradient differ by some 1e-3 from float64's, in DAIN too.
        tolerance = 2e-2 if str(name).startswith("depthNet") else GRADIENT
        assert abs(grad.double().norm().item() - norm) < tolerance * norm, name
    assert {name for name, p in parameters.items() if p.grad is None} == set(
        map(str, recorded["train/grad_none"])
    )
    state = net.state_dict()
    statistics = torch.cat([state[str(name)].flatten() for name in recorded["train/bn_names"]])
    assert distance(statistics, recorded["train/bn_after"]) < 1e-5


@pytest.mark.parametrize("size", ["full", "small"])
def test_sides_that_are_multiples_pass_and_keep_their_size(size):
    net = Dain(size).eval()
    frame = torch.rand(1, 3, net.multiple, 2 * net.multiple)
    with torch.no_grad():
        assert net(frame, frame, torch.tensor([0.5]))[0].shape == frame.shape


@pytest.mark.parametrize(("size", "most"), [("small", 500_000), ("tiny", 350_000)])
def test_the_smaller_networks_begin_as_the_mean_of_both_frames(size, most):
    net = Dain(size)
    first, last = torch.rand(2, 1, 3, 16, 24)
    image, blended = net(first, last, torch.tensor([0.25]))
    assert blended is not None
    assert torch.allclose(image, 0.75 * first + 0.25 * last, atol=1e-6)
    assert sum(p.numel() for p in net.parameters()) < most
    published = {prefix for prefixes in PARTS.values() for prefix in prefixes}
    assert {name.split(".")[0] for name in net.state_dict()} == published


@pytest.mark.parametrize(
    "net", [FlowNet((4, 6, 8), (8, 6, 4)), SmallFlowNet((4, 6, 8))], ids=["PWC-Net", "small"]
)
def test_the_flow_both_ways_is_that_of_each_way(net):
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.2)
        first, last = torch.rand(2, 2, 3, 32, 24)
        forth, back = net(torch.cat((first, last), 1)), net(torch.cat((last, first), 1))
        assert not torch.allclose(forth, back, atol=1e-3)
        assert torch.allclose(
            net(torch.cat((first, last), 1), both_ways=True), torch.cat((forth, back)), atol=1e-5
        )
