"""Whether two estimates of depth agree on what is nearer."""

import pytest
import torch

from mpt.systems.dain.metrics.shared.depth_order import order_kept


def test_scale_keeps_the_order_turning_it_round_loses_it_and_ties_are_lost():
    depth = torch.arange(64.0).view(1, 1, 8, 8)
    assert order_kept(depth, 3 * depth + 1) == 1.0
    assert order_kept(depth, -depth) == 0.0
    assert order_kept(depth, torch.zeros_like(depth)) == 0.0
    # nothing is in front of anything
    assert order_kept(torch.ones(1, 1, 8, 8), depth[..., :8]) == 1.0


def test_half_swaps_as_many_pairs_as_round_to_one_number():
    # float16 has steps of a half there: values become 1000, 1000.5 or 1001
    depth = 1000 + torch.arange(64.0) / 64
    levels = depth.half().float().unique(return_counts=True)[1].double() / 64
    # of pairs that round to one number, those of a pixel with itself do not count
    same = float((levels**2).sum())
    wanted = 1 - (same - 1 / 64) / (1 - 1 / 64)
    assert order_kept(depth, depth.half()) == pytest.approx(wanted, abs=0.01)
