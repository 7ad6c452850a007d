"""One rank's side of the exchange of gradients, in one process: what leaves when, and what others send in return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpt.parallel.exchange import Exchange

pytestmark = pytest.mark.tier("fast")


class Wire:
    """Takes what is sent; adds what the other rank has, if anything."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.others: Tensor | None = None

    def send(self, buffer: Tensor) -> Any:
        self.sent.append(buffer.clone())
        if self.others is not None:
            buffer += self.others
        return self

    def wait(self) -> None:
        pass


def weights(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(4)) for _ in range(count)]


def backward(exchange: Exchange, *slopes: float) -> None:
    """Walk back a loss with these slopes; a weight with slope 0 is not in its graph."""
    exchange.before_backward()
    terms = [
        slope * weight.sum()
        for slope, weight in zip(slopes, exchange.weights, strict=True)
        if slope
    ]
    torch.stack(terms).sum().backward()  # type: ignore[no-untyped-call]


def values(exchange: Exchange) -> list[float | None]:
    return [None if weight.grad is None else float(weight.grad[0]) for weight in exchange.weights]


def drop(exchange: Exchange) -> None:
    for weight in exchange.weights:
        weight.grad = None
    exchange.begin()
    exchange.parts = 1


def test_a_layer_without_a_gradient_here_sends_zeros_and_has_the_other_ranks_gradient() -> None:
    wire = Wire()
    exchange = Exchange(weights(2), wire.send, 1e9, None, overlaps=False)
    for slopes in ((1.0, 2.0), (3.0, 0.0)):  # the buffer still holds the first update's
        drop(exchange)
        backward(exchange, *slopes)
        exchange.send_rest(failed=False)
        exchange.wait()
        exchange.finish([True, True])
    assert wire.sent[1].tolist() == [0.0] * 4 + [3.0] * 4, "the last weight comes first"
    assert values(exchange) == [3.0, 0.0]
    wire.others = torch.full((8,), 10.0)
    drop(exchange)
    backward(exchange, 3.0, 0.0)
    exchange.send_rest(failed=False)
    exchange.finish([True, True])
    assert values(exchange) == [13.0, 10.0]
    drop(exchange)
    backward(exchange, 3.0, 0.0)
    exchange.send_rest(failed=False)
    exchange.finish([True, False])
    assert values(exchange) == [13.0, None], (
        "what no rank has used has no gradient, and is not stepped"
    )


def test_gradients_leave_during_the_last_backward_and_again_where_it_was_not_the_last() -> None:
    wire = Wire()
    exchange = Exchange(weights(2), wire.send, 1e9, None, overlaps=True)

    def go(losses: int) -> list[int]:
        """Return the buckets that were sent after each backward of an update."""
        drop(exchange)
        before, sent = len(wire.sent), []
        for _ in range(losses):
            backward(exchange, 1.0, 1.0)
            sent.append(len(wire.sent) - before)
        exchange.send_rest(failed=False)
        if exchange.guessed_wrong:
            exchange.send_again()
        exchange.finish([True, True])
        return sent

    assert go(2) == [0, 0], "nothing is known yet"
    assert go(2) == [0, 1]
    assert values(exchange) == [2.0, 2.0]
    assert go(1) == [0]
    assert go(2) == [1, 1], "the first was taken for the last"
    assert exchange.guessed_wrong
    assert wire.sent[-1].tolist() == [2.0] * 8
    assert values(exchange) == [2.0, 2.0]


def test_a_weight_that_the_last_backward_did_not_reach_is_not_waited_for() -> None:
    wire = Wire()
    exchange = Exchange(weights(2), wire.send, 1e9, None, overlaps=True)
    for _ in range(2):
        drop(exchange)
        backward(exchange, 1.0, 0.0)
        on_the_way = exchange.sent_in_backward
        exchange.send_rest(failed=False)
        exchange.finish([True, False])
    assert on_the_way == 1
    assert wire.sent[-1].tolist() == [0.0] * 4 + [1.0] * 4


def test_buckets_are_as_large_as_is_said_and_hold_the_last_weights_first() -> None:
    own = weights(5)
    exchange = Exchange(own, Wire().send, 32, None, overlaps=False)  # two weights of 16 bytes
    places = [
        [next(n for n, w in enumerate(own) if w is one) for one in bucket.weights]
        for bucket in exchange.buckets
    ]
    assert places == [[4, 3], [2, 1], [0]]


def test_a_rank_that_failed_sends_zeros() -> None:
    wire = Wire()
    exchange = Exchange(weights(1), wire.send, 1e9, None, overlaps=False)
    drop(exchange)
    backward(exchange, 2.0)
    exchange.send_rest(failed=True)
    assert wire.sent[0].tolist() == [0.0] * 4
