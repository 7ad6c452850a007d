"""DAIN's operators against its own numbers, against direct loops, and against finite differences."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mpt.systems.dain.nn.operators.correlation import correlate
from mpt.systems.dain.nn.operators.filter_interpolation import interpolate_filtered
from mpt.systems.dain.nn.operators.projection import project_flow
from mpt.systems.dain.nn.operators.regions import WarpRegion
from mpt.systems.dain.nn.operators.warping import warp

from . import direct_loops

RECORDED = Path(__file__).parents[1] / "fixtures" / "operators.npz"
SIZES = [(1, 1), (1, 5), (5, 7), (8, 6), (3, 11), (2, 35)]


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    with np.load(RECORDED, allow_pickle=False) as archive:
        return dict(archive)


def case(recorded: dict[str, np.ndarray], operator: str, number: int) -> dict[str, Tensor]:
    start = f"{operator}/c{number}_"
    return {
        key.removeprefix(start): torch.from_numpy(value)
        for key, value in recorded.items()
        if key.startswith(start)
    }


def close(found: Tensor, wanted: Tensor, tolerance: float = 3e-6) -> bool:
    return bool((found - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=1e-9))


def inputs(height: int, width: int, seed: int = 0) -> dict[str, Tensor]:
    """Return float64 inputs whose landing places keep away from whole numbers, where the operators jump."""
    numbers = torch.Generator().manual_seed(seed)

    def draw(channels: int) -> Tensor:
        return torch.randn(2, channels, height, width, generator=numbers, dtype=torch.float64)

    flow = 3 * draw(2)
    flow = flow.floor() + 0.1 + 0.8 * (flow - flow.floor())
    return {
        "image": draw(3),
        "other": draw(3),
        "flow": flow,
        "weight": draw(1).exp(),
        "kernel": draw(16),
    }


@pytest.mark.parametrize("number", [0, 2, 3])
def test_the_correlation_and_its_gradients_are_dains(recorded, number):
    c = case(recorded, "correlation", number)
    first, second = c["first"].requires_grad_(), c["second"].requires_grad_()
    out = correlate(first, second)
    out.backward(c["grad_out"])
    assert close(out, c["out"])
    assert close(first.grad, c["grad_first"])
    assert close(second.grad, c["grad_second"])


@pytest.mark.parametrize("number", [0, 2, 3])
@pytest.mark.parametrize("operator", ["flow_projection", "depth_flow_projection"])
def test_the_projection_is_dains_unfilled_and_filled(recorded, operator, number):
    c = case(recorded, operator, number)
    flow = c["flow"].requires_grad_()
    weight = c.get("weight", torch.ones_like(c["count"])).requires_grad_()
    out = project_flow(flow, weight)
    assert close(out, c["out_unfilled"])
    assert close(project_flow(flow, weight, fill=True), c["out_filled"])
    grad_flow, grad_weight = torch.autograd.grad(out, (flow, weight), c["grad_out"])
    assert close(grad_flow, c["grad_flow"])
    if "weight" in c:
        assert close(grad_weight, c["grad_weight_true"])
        original = project_flow(flow, weight, original_gradient=True)
        assert close(
            torch.autograd.grad(original, weight, c["grad_out"])[0], c["grad_weight_original"]
        )
        assert not close(c["grad_weight_original"], c["grad_weight_true"], 0.1)


@pytest.mark.parametrize("number", [0, 3])
def test_filter_interpolation_and_both_its_gradients_are_dains(recorded, number):
    c = case(recorded, "filter_interpolation", number)
    arguments = [c[name].requires_grad_() for name in ("image", "flow", "kernel")]
    out = interpolate_filtered(*arguments)
    assert close(out, c["out"])
    image, flow, kernel = torch.autograd.grad(out, arguments, c["grad_out"])
    assert close(image, c["grad_image_true"])
    assert close(flow, c["grad_flow"])
    assert close(kernel, c["grad_kernel"])
    original = interpolate_filtered(*arguments, original_gradient=True)
    assert close(
        torch.autograd.grad(original, arguments[0], c["grad_out"])[0], c["grad_image_original"]
    )


@pytest.mark.parametrize("number", [0, 3])
def test_the_masked_warp_is_that_of_dains_flow_network(recorded, number):
    c = case(recorded, "warp", number)
    x, flow = c["x"].requires_grad_(), c["flow"].requires_grad_()
    out = warp(x, flow)
    assert close(out, c["out"])
    grad_x, grad_flow = torch.autograd.grad(out, (x, flow), c["grad_out"])
    assert close(grad_x, c["grad_x"])
    assert close(grad_flow, c["grad_flow"])


def test_the_warp_that_repeats_the_border_is_torchs():
    numbers = torch.Generator().manual_seed(0)
    image, flow = (torch.randn(2, channels, 5, 7, generator=numbers) for channels in (3, 2))
    flow = (4 * flow).requires_grad_()
    rows, columns = torch.meshgrid(torch.arange(5.0), torch.arange(7.0), indexing="ij")
    grid = torch.stack(((columns + flow[:, 0]) / 3 - 1, (rows + flow[:, 1]) / 2 - 1), dim=-1)
    wanted = F.grid_sample(image, grid, mode="bilinear", padding_mode="border", align_corners=True)
    found = WarpRegion(masked=False, border=True)(image, flow)
    assert close(found, wanted)
    weight = torch.randn(wanted.shape, generator=numbers)
    gradients = [
        torch.autograd.grad((weight * out).sum(), flow, retain_graph=True)[0]
        for out in (found, wanted)
    ]
    assert close(*gradients)
    outside = WarpRegion(masked=False)(image, flow)
    assert not close(outside, wanted)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_every_operator_equals_its_direct_loop_at_odd_sizes(height, width):
    t = inputs(height, width)
    n = {name: value.numpy() for name, value in t.items()}
    pairs = [
        (correlate(t["image"], t["other"], 2), direct_loops.correlation(n["image"], n["other"], 2)),
        (project_flow(t["flow"], t["weight"]), direct_loops.projection(n["flow"], n["weight"])[0]),
        (
            project_flow(t["flow"], t["weight"], fill=True),
            direct_loops.filled(*direct_loops.projection(n["flow"], n["weight"])),
        ),
        (
            interpolate_filtered(t["image"], t["flow"], t["kernel"]),
            direct_loops.filter_interpolation(n["image"], n["flow"], n["kernel"]),
        ),
    ]
    # along a side of one pixel grid_sample, and so this, knows one position
    if min(height, width) > 1:
        for masked in (True, False):
            moved = warp(t["image"], t["flow"], masked=masked)
            pairs.append((moved, direct_loops.warp(n["image"], n["flow"], masked)))
    for found, wanted in pairs:
        assert np.allclose(found.numpy(), wanted, rtol=1e-9, atol=1e-9)


def test_every_gradient_is_the_derivative():
    t = {name: value.requires_grad_() for name, value in inputs(4, 5).items()}
    assert torch.autograd.gradcheck(lambda a, b: correlate(a, b, 1), (t["image"], t["other"]))
    assert torch.autograd.gradcheck(lambda f, w: project_flow(f, w), (t["flow"], t["weight"]))
    assert torch.autograd.gradcheck(
        lambda i, f, k: interpolate_filtered(i, f, k), (t["image"], t["flow"], t["kernel"])
    )
    assert torch.autograd.gradcheck(lambda i, f: warp(i, f), (t["image"], t["flow"]))


def test_holes_that_see_no_other_pixel_stay_zero():
    flow = torch.full((1, 2, 6, 9), 1000.0)
    assert project_flow(flow, torch.ones(1, 1, 6, 9), fill=True).abs().max() == 0


def test_flows_of_any_size_and_nan_index_inside_the_image():
    t = {name: value.float() for name, value in inputs(5, 7).items()}
    for bad in (1e30, -1e30, float("inf"), float("nan")):
        flow = t["flow"].clone()
        flow[:, :, 2] = bad
        assert project_flow(flow, t["weight"], fill=True).isfinite().all()
        assert interpolate_filtered(t["image"], flow, t["kernel"])[:, :, 2].equal(
            t["image"][:, :, 2]
        )
        assert (warp(t["image"], flow)[:, :, 2] == 0).all()


def test_operators_are_deterministic():
    t = {name: value.float() for name, value in inputs(33, 40).items()}
    first = project_flow(t["flow"], t["weight"], fill=True)
    assert all(
        torch.equal(first, project_flow(t["flow"], t["weight"], fill=True)) for _ in range(3)
    )


def test_the_correlation_keeps_its_inputs_alone_for_the_backward_pass():
    kept: list[int] = []
    first, second = (torch.randn(1, 8, 16, 16, requires_grad=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        correlate(first, second)
    assert sum(kept) == first.numel() + second.numel()


def test_filter_interpolation_holds_no_image_per_tap():
    kept: list[Tensor] = []
    image = torch.randn(1, 196, 16, 16, requires_grad=True)
    flow, kernel = torch.randn(1, 2, 16, 16), torch.randn(1, 16, 16, 16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        interpolate_filtered(image, flow, kernel)
    saved = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    # nor the image, where only it has a gradient
    assert sum(saved.values()) < image.untyped_storage().nbytes() / 2
