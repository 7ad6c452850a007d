"""RIFE's way from two frames to the one between, and its start from cost volumes."""

import torch

from mpt.data.pictures.seeds import mix
from mpt.systems.dain.data.procedural_triplets import draw_scene, render
from mpt.systems.dain.nn.flow_warp import FlowWarp
from mpt.systems.dain.nn.operators.regions import IntermediateFlowRegion
from mpt.systems.dain.nn.rife import Rife, convolution


def small(cost_volume: bool) -> Rife:
    torch.manual_seed(0)
    return Rife((8, 8, 8), 1, 2, cost_volume)


def test_deep_blocks_begin_with_signals_of_the_size_of_their_inputs():
    """With torch's default initialisation the tenth layer's output varies by a hundredth: the network stood still."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(convolution(24, 24) for _ in range(10)))
    with torch.no_grad():
        assert 0.3 < float(layers(torch.randn(2, 24, 16, 16)).std()) < 3.0


def test_started_from_cost_volumes_it_begins_as_the_baseline_that_warps_by_that_flow():
    net, baseline = small(cost_volume=True), FlowWarp([16, 32, 48])
    with torch.no_grad():
        net.flownets.get_submodule("decode2")[-1].bias.copy_(torch.tensor([0.4, -0.3]))
    baseline.flownets.load_state_dict(net.flownets.state_dict())
    first, last = torch.rand(2, 3, 32, 64), torch.rand(2, 3, 32, 64)
    time = torch.tensor([0.5, 0.25])
    ours, theirs = (one.between(first, last, time).image for one in (net, baseline))
    inside = (..., slice(4, -4), slice(4, -4))
    # either counts the farther frame by its own least share
    assert (ours - theirs)[inside].abs().max() < 0.02
    assert net.between(first, last, time).flow[1, 0].mean() != 0


def test_the_true_flow_becomes_the_flow_from_the_frame_between():
    scene = draw_scene(2, 32, 0, 6.0, mix(0, 0, 0))
    (first, motion, _), (middle, *_), (last, *_) = (
        render(scene, 32, time) for time in (0.0, 0.25, 1.0)
    )
    flow, logit = IntermediateFlowRegion()(
        torch.cat((motion, -motion), dim=1), torch.full((2,), 0.25)
    )
    net = small(cost_volume=False)
    fused = net.fusion(*net.both_warped((first, last), flow), logit)
    inside = (..., slice(6, -6), slice(6, -6))
    assert (fused - middle)[inside].abs().mean() < 0.2 * ((first + last) / 2 - middle)[
        inside
    ].abs().mean()
