"""Plans as a planning process would give them, with figures that a test chooses."""

from typing import Any

from mpt.planner.answers.plan import Plan


def make_plan(**figures: Any) -> Plan:
    """Return a plan of 1 GiB with no budget, but for some figures."""
    size = figures.get("reserved", 2**30)
    usual = {
        "batch_size": 64,
        "allocated": size,
        "reserved": size,
        "context_bytes": 0,
        "budget_bytes": None,
        "fits": None,
        "tight": False,
        "reserved_in_budget": size,
        "held_throughout": 2**30,
        "growing": None,
        "by_category": {"activations": 4 * 2**30},
        "by_module": [],
        "moment": "phase net, backward",
        "largest_batch": None,
        "largest_surely": None,
        "largest_is_bound": False,
        "step_seconds": 1.0,
        "time_band": 0.25,
    }
    return Plan(**{**usual, **figures})
