import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from mpt.systems.deepfacelab.optim import adabelief, rmsprop_leras
from mpt.systems.deepfacelab.optim.shared import leras

PLUGINS = [adabelief, rmsprop_leras]


def train(plugin, steps, shape=(4, 3), settings=None):
    numbers = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(shape, generator=numbers))
    optimizer = plugin.build(plugin.Settings(**(settings or {})), [weight])
    start = weight.detach().numpy().astype(np.float64)
    gradients = []
    for _ in range(steps):
        weight.grad = torch.randn(shape, generator=numbers)
        gradients.append(weight.grad.numpy().astype(np.float64))
        optimizer.step()
    return weight, optimizer, start, gradients


def test_adabelief_is_the_published_sequence_of_leras():
    weight, _, w, gradients = train(adabelief, 20, settings={"lr": 1e-2})
    m, v = np.zeros_like(w), np.zeros_like(w)
    for g in gradients:
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * (g - m) ** 2
        w = w - 1e-2 * m / (np.sqrt(v) + 1e-6)
    np.testing.assert_allclose(weight.detach().numpy(), w, rtol=1e-4, atol=1e-5)


def test_rmsprop_adds_epsilon_outside_the_root():
    weight, _, w, gradients = train(rmsprop_leras, 20, settings={"lr": 1e-2})
    a = np.zeros_like(w)
    for g in gradients:
        a = 0.9 * a + 0.1 * g**2
        w = w - 1e-2 * g / (np.sqrt(a) + 1e-6)
    np.testing.assert_allclose(weight.detach().numpy(), w, rtol=1e-4, atol=1e-5)


def test_epsilon_is_outside_the_root_where_it_shows():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = rmsprop_leras.build(rmsprop_leras.Settings(lr=1.0), [weight])
    weight.grad = torch.full((1,), 1e-6)
    optimizer.step()
    expected = -1e-6 / (math.sqrt(0.1) * 1e-6 + 1e-6)
    assert weight.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_weights_in_bfloat16_move_as_far_as_in_float32(plugin):
    """Its own resolution, 0.01, as epsilon made steps a fifth as long at SAEHD's gradients."""
    moved = []
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
        optimizer = plugin.build(plugin.Settings(lr=0.5), [weight])
        weight.grad = torch.tensor([0.03, 0.003, -0.03, -0.003]).to(dtype)
        optimizer.step()
        moved.append(weight.detach().float())
    torch.testing.assert_close(moved[1], moved[0], rtol=0.05, atol=0)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_rate_follows_a_cosine_over_updates(plugin):
    steps = []
    for count in (1, 5, 9):
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = plugin.build(plugin.Settings(lr=1.0, lr_cos=10), [weight])
        optimizer.param_groups[0]["iterations"] = count - 1
        weight.grad = torch.ones(1)
        optimizer.step()
        steps.append(-weight.item())
    full = (math.cos(2 * math.pi / 10) + 1) / 2
    assert steps[1] == pytest.approx(0, abs=1e-6)
    assert steps[0] == pytest.approx(steps[2], rel=1e-5)
    plain = torch.nn.Parameter(torch.zeros(1))
    plain.grad = torch.ones(1)
    plugin.build(plugin.Settings(lr=1.0), [plain]).step()
    assert steps[0] == pytest.approx(-plain.item() * full, rel=1e-5)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_lr_dropout_moves_three_weights_in_ten_and_all_of_the_state(plugin):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(10_000))
    optimizer = plugin.build(plugin.Settings(lr=1.0, lr_dropout=0.3), [weight])
    weight.grad = torch.ones(10_000)
    optimizer.step()
    moved = weight != 0
    assert moved.float().mean().item() == pytest.approx(0.3, abs=0.02)
    for tensor in optimizer.state[weight].values():
        assert (tensor != 0).all()
    weight.grad = torch.ones(10_000)
    before = weight.detach().clone()
    optimizer.step()
    assert not torch.equal(moved, weight != before)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_working_in_pieces_changes_nothing(plugin, monkeypatch):
    whole, *_ = train(plugin, 3, shape=(7, 5))
    monkeypatch.setattr(leras, "PIECE", 8)
    pieces, *_ = train(plugin, 3, shape=(7, 5))
    assert torch.equal(whole, pieces)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_saved_optimizer_goes_on_bit_for_bit(plugin):
    settings = {"lr": 1e-2, "lr_cos": 7}
    _, optimizer, _, gradients = train(plugin, 4, settings=settings)
    first = optimizer.param_groups[0]["params"][0]
    other = torch.nn.Parameter(first.detach().clone())
    twin = plugin.build(plugin.Settings(**settings), [other])
    twin.load_state_dict(deepcopy(optimizer.state_dict()))
    for opt, weight in ((optimizer, first), (twin, other)):
        weight.grad = torch.from_numpy(gradients[0]).float()
        opt.step()
    assert torch.equal(first, other)


def test_transposed_memory_is_updated_whole_and_right():
    plain, *_ = train(adabelief, 2, shape=(6, 4))
    numbers = torch.Generator().manual_seed(0)
    start = torch.randn(6, 4, generator=numbers)
    weight = torch.nn.Parameter(start.t().contiguous().t())
    optimizer = adabelief.build(adabelief.Settings(), [weight])
    for _ in range(2):
        weight.grad = torch.randn(6, 4, generator=numbers)
        optimizer.step()
    torch.testing.assert_close(weight, plain)


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize(
    "wrong", [{"lr": 0}, {"lr_dropout": 0}, {"lr_dropout": 1.5}, {"lr_cos": -1}, {"lr_drop": 0.3}]
)
def test_settings_out_of_range_are_refused(plugin, wrong):
    with pytest.raises(ValidationError):
        plugin.Settings(**wrong)
