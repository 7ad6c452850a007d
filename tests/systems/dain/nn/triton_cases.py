"""The Triton operators against torch's, in the interpreter; `test_triton_operators.py` runs this in its own process."""

import numpy as np
import pytest
import torch

from mpt.systems.dain.nn.dain import Dain
from mpt.systems.dain.nn.operators import (
    correlation,
    filter_interpolation,
    projection,
    triton_operators,
)

from .test_operators import RECORDED, case, close, inputs

PROJECTED = [(1, 1), (17, 13)]
FILTERED = [((1, 5), False), ((5, 7), False), ((13, 11), True)]
"""Sizes, and whether the gradient is DAIN's own, which differs from the derivative at copied pixels alone."""


def floats(height, width, seed=0):
    return {name: value.float() for name, value in inputs(height, width, seed).items()}


def outcome(function, leaves, grad):
    """Return the output and the gradients at the leaves."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad(out))]


def agree(ours, theirs, leaves, tolerance=3e-6):
    numbers = torch.Generator().manual_seed(1)
    weights = {}

    def grad(out):
        return weights.setdefault("grad", torch.randn(out.shape, generator=numbers))

    for found, wanted in zip(
        outcome(ours, leaves, grad), outcome(theirs, leaves, grad), strict=True
    ):
        assert close(found, wanted, tolerance)


@pytest.mark.parametrize("size", [(1, 5), (12, 12)])
@pytest.mark.parametrize("radius", [1])
def test_correlation(size, radius):
    x = floats(*size)
    agree(
        lambda a, b: triton_operators.correlate(a, b, radius),
        lambda a, b: correlation.correlate(a, b, radius),
        (x["image"], x["other"]),
    )


@pytest.mark.parametrize("size", PROJECTED)
@pytest.mark.parametrize("original", [False, True])
def test_projection(size, original):
    x = floats(*size)
    agree(
        lambda f, w: triton_operators.project_flow(f, w, fill=True, original_gradient=original),
        lambda f, w: projection.project_flow(f, w, fill=True, original_gradient=original),
        (x["flow"], x["weight"]),
        1e-5,
    )


def test_projection_weighs_far_surfaces_that_are_a_million_times_lighter():
    x = floats(9, 9)
    weight = x["weight"] * torch.where(torch.arange(9) % 2 == 0, 1e6, 1.0)
    found = triton_operators.project_flow(x["flow"], weight)
    assert close(found, projection.project_flow(x["flow"].double(), weight.double()).float(), 1e-5)


@pytest.mark.parametrize(("size", "original"), FILTERED)
def test_filter_interpolation(size, original):
    x = floats(*size)
    agree(
        lambda *a: triton_operators.interpolate_filtered(*a, original_gradient=original),
        lambda *a: filter_interpolation.interpolate_filtered(*a, original_gradient=original),
        (x["image"], x["flow"], x["kernel"]),
        1e-5,
    )


def test_images_in_half_precision_return_in_it():
    x = floats(6, 7)
    found = triton_operators.interpolate_filtered(x["image"].half(), x["flow"], x["kernel"])
    assert found.dtype == torch.float16
    wanted = filter_interpolation.interpolate_filtered(
        x["image"].half().float(), x["flow"], x["kernel"]
    )
    assert close(found.float(), wanted, 2e-3)


@pytest.mark.parametrize("number", [0])
def test_what_dain_itself_computed(number):
    with np.load(RECORDED, allow_pickle=False) as archive:
        recorded = dict(archive)
    c = case(recorded, "correlation", number)
    assert close(triton_operators.correlate(c["first"], c["second"]), c["out"])
    c = case(recorded, "depth_flow_projection", number)
    assert close(triton_operators.project_flow(c["flow"], c["weight"]), c["out_unfilled"])
    assert close(triton_operators.project_flow(c["flow"], c["weight"], fill=True), c["out_filled"])


def test_the_whole_network_uses_them_where_they_are_asked_for(monkeypatch):
    torch.manual_seed(0)
    plain = Dain("small").eval()
    other = Dain("small", kernels="triton").eval()
    other.load_state_dict(plain.state_dict())
    calls = []
    for name, module in {
        "correlate": correlation,
        "project_flow": projection,
        "interpolate_filtered": filter_interpolation,
    }.items():

        def counted(*args, _module=module, _name=name, **kwargs):
            calls.append(_name)
            # torch's: the interpreter would take many seconds
            return getattr(_module, _name)(*args, **kwargs)

        monkeypatch.setattr(triton_operators, name, counted)
    first, last = torch.rand(2, 1, 3, 16, 16)
    time = torch.full((1,), 0.5)
    with torch.no_grad():
        assert close(other(first, last, time)[0], plain(first, last, time)[0], 1e-5)
    assert set(calls) == {"correlate", "project_flow", "interpolate_filtered"}
