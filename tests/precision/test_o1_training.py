"""O1 where gradients meet it: the weight cache, recomputation, recurrent layers, attention and other composites."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint

from mpt.precision import o1
from tests.precision.o1_calls import random

half, single = torch.float16, torch.float32


def gradients(module: nn.Module) -> list[Tensor]:
    return [
        parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None
    ]


def all_equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(torch.equal(a, b) for a, b in zip(left, right))


def casts_made(run: Callable[[], Any]) -> int:
    """Count the conversions to half that the profiler sees."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profile:
        run()
    return sum(event.name == "aten::_to_copy" for event in profile.events())


def test_a_weight_is_cast_once_per_block() -> None:
    layer, x = nn.Linear(3, 3, bias=False), random(2, 3).half()

    def run(cache: bool) -> None:
        with o1.casts(half, cache=cache):
            layer(layer(layer(x)))

    assert casts_made(lambda: run(True)) == 1
    assert casts_made(lambda: run(False)) == 3


def test_gradients_through_the_cache_equal_uncached_ones() -> None:
    layer, x = nn.Linear(3, 3), random(2, 3)
    results = {}
    for cache in (True, False):
        with o1.casts(half, cache=cache):
            loss = functional.mse_loss(layer(x), x)
        layer.zero_grad()
        loss.backward()
        results[cache] = gradients(layer)
    assert all_equal(results[True], results[False])


def test_train_eval_train_in_one_block_keeps_gradients_connected() -> None:
    layer, x = nn.Linear(3, 3), random(2, 3)
    with o1.casts(half, cache=False):
        layer(x).sum().backward()
    expected = gradients(layer)
    layer.zero_grad()
    with o1.casts(half):
        with torch.no_grad():
            layer(x)
        layer(x).sum().backward()
    assert all_equal(gradients(layer), expected)
    layer.zero_grad()
    with o1.casts(half):
        with torch.inference_mode():
            layer(x)
        layer(x).sum().backward()
    assert all_equal(gradients(layer), expected)


def test_a_frozen_and_thawed_weight_is_cast_anew() -> None:
    layer, x = nn.Linear(3, 3), random(2, 3).requires_grad_()
    with o1.casts(half):
        layer.requires_grad_(False)
        layer(x).sum().backward()
        assert layer.weight.grad is None
        layer.requires_grad_(True)
        layer(x).sum().backward()
    assert layer.weight.grad is not None


def test_changed_weights_are_seen_after_the_block_and_after_in_place_changes_within() -> None:
    layer, x = nn.Linear(3, 3, bias=False), random(2, 3)
    twice = copy.deepcopy(layer)
    with torch.no_grad():
        twice.weight.mul_(2)
    with o1.casts(half), torch.no_grad():
        before = layer(x)
        layer.load_state_dict(twice.state_dict())
        assert torch.equal(layer(x), before * 2)
    with o1.casts(half):
        layer(x)
    layer.weight.data = twice.weight.data / 2
    with o1.casts(half):
        assert torch.equal(layer(x), before)
        layer.weight.data = twice.weight.data
        assert torch.equal(layer(x), before)  # no version moved: this is what clear_cache is for
        o1.clear_cache()
        assert torch.equal(layer(x), before * 2)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Softplus()
    )


@pytest.mark.parametrize("dtype", [half, torch.bfloat16, None])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_recomputation_gives_bitwise_equal_gradients(
    dtype: torch.dtype | None, backward_inside: bool
) -> None:
    results = []
    for recompute in (False, True):
        model, x = network(), random(3, 4).requires_grad_()
        seen: list[torch.dtype] = []
        model[3].register_forward_hook(lambda module, args, out, seen=seen: seen.append(out.dtype))
        with o1.casts(dtype or half) if dtype else o1.suspended():
            if recompute:
                out = checkpoint(model, x, use_reentrant=False, context_fn=o1.checkpoint_contexts)
            else:
                out = model(x)
            loss = functional.mse_loss(out, x.detach())
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        assert set(seen) == {dtype or single}
        assert len(seen) == 1 + recompute
        results.append([*gradients(model), x.grad])
    assert all_equal(*results)


def test_recomputation_of_a_suspended_region_stays_suspended() -> None:
    model, x = network(), random(3, 4)
    seen: list[torch.dtype] = []
    model[3].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with o1.casts(half):
        with o1.suspended():
            out = checkpoint(model, x, use_reentrant=False, context_fn=o1.checkpoint_contexts)
        out.sum().backward()
    assert seen == [single, single]


def test_a_recomputed_block_survives_two_backwards() -> None:
    model, x = network(), random(3, 4)
    with o1.casts(half):
        loss = checkpoint(model, x, use_reentrant=False, context_fn=o1.checkpoint_contexts).sum()
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    assert all_equal(gradients(model), [g * 2 for g in once])


@pytest.mark.parametrize("dtype", [half, single])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_run_in_half(
    kind: type[nn.RNNBase], packed: bool, dtype: torch.dtype
) -> None:
    layer = kind(3, 2, num_layers=2, bidirectional=True)
    x = random(4, 2, 3).to(dtype).requires_grad_()
    entry = pack_sequence([x[:, 0], x[:2, 1]]) if packed else x
    with o1.casts(half):
        out, state = layer(entry)
    out = out.data if isinstance(out, PackedSequence) else out
    assert out.dtype == half
    assert (state[0] if isinstance(state, tuple) else state).dtype == half
    out.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert len(gradients(layer)) == 16
    assert all(g.dtype == single for g in gradients(layer))
    with pytest.raises(ValueError, match="does not match weight dtype"):
        layer(x.detach().half())  # outside the block torch's own check stands again


def test_recurrent_layers_accept_a_half_state() -> None:
    x, state = random(4, 2, 3).half(), random(1, 2, 2).half()
    with o1.casts(half):
        out, _ = nn.LSTM(3, 2)(x, (state, state))
        assert out.dtype == half
        assert nn.GRU(3, 2)(x, state)[0].dtype == half


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_recurrent_cells_run_in_half_and_cast_their_weights_once(
    kind: type[nn.RNNCellBase],
) -> None:
    cell, x = kind(3, 2), random(5, 2, 3).half().requires_grad_()

    def run() -> Tensor:
        state: Any = None
        with o1.casts(half):
            for step in x:
                state = cell(step, state)
        return state[0] if isinstance(state, tuple) else state

    assert run().dtype == half
    assert casts_made(run) == 4  # weights and biases, not 4 per step
    run().float().sum().backward()
    assert all(g.dtype == single for g in gradients(cell))


@pytest.mark.parametrize("dtype", [half, single])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_attention_runs_inside_the_mode(
    dtype: torch.dtype, need_weights: bool, training: bool
) -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True).train(training)
    x = random(2, 3, 4).to(dtype)
    mask = torch.zeros(3, 3)
    with o1.casts(half):
        out, weights = attention(x, x, x, need_weights=need_weights, attn_mask=mask)
    assert out.dtype == half
    if need_weights:
        assert weights.dtype == single  # the softmax is a float32 function
    out.float().sum().backward()
    assert all(g.dtype == single for g in gradients(attention))


def test_a_transformer_layer_trains_and_evaluates() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    for training in (True, False):
        with o1.casts(half):
            assert layer.train(training)(random(2, 3, 4)).dtype == single  # ends in layer_norm


def test_composites_run_their_parts_inside_the_mode() -> None:
    h = random(4, 4).half()
    with o1.casts(half):
        assert functional.gumbel_softmax(h).dtype == single
        assert functional.lp_pool1d(h[None], 2.0, 2).dtype == single
        assert functional.lp_pool2d(h[None, None], 2.0, 2).dtype == single
        assert functional.lp_pool3d(h.reshape(1, 1, 2, 2, 4), 2.0, 2).dtype == single
        assert functional.gaussian_nll_loss(h, h, h).dtype == single
        assert (
            functional.triplet_margin_with_distance_loss(h, h, h, distance_function=_product).dtype
            == half
        )
        weight = torch.ones(4, 4)
        assert functional.huber_loss(h, h, weight=weight).dtype == single


def _product(left: Tensor, right: Tensor) -> Tensor:
    assert o1.active_dtype() == half
    product = left.float() @ right.float()
    assert product.dtype == half
    return product.mean(-1)


def test_several_models_train_in_one_block_without_touching_each_other() -> None:
    x = random(3, 4)
    together = [network(), network()]
    alone = copy.deepcopy(together)
    torch.manual_seed(1)
    with o1.casts(half):
        losses = [functional.mse_loss(model(x), x) for model in together]
    for loss in losses:
        loss.backward()
    torch.manual_seed(1)
    for model in alone:
        with o1.casts(half):
            loss = functional.mse_loss(model(x), x)
        loss.backward()
    assert all_equal(gradients(together[0]), gradients(alone[0]))
    assert all_equal(gradients(together[1]), gradients(alone[1]))
