"""Weights that libraries load and change, as those of language models in four bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpt.planner.answers.own_plan import OwnPlan
from mpt.planner.client.session import Session
from mpt.planner.recipes.own_step import find_source
from scripts.plans.live_bytes import live_bytes
from tests.planner.own import loaded_steps

STEPS = Path(loaded_steps.__file__)


def planned(session: Session, function: str, **arguments: Any) -> OwnPlan:
    found: OwnPlan = session.plan_own(
        find_source(f"{STEPS}:{function}", ("tests",)), arguments
    ).get()
    return found


def test_a_weight_of_a_librarys_class_keeps_its_methods_and_its_memory(session: Session) -> None:
    first, second = (planned(session, "in_eighths").plan for _ in range(2))
    assert first.by_category["parameters"] == 256 * 256 + 4 * (256 * 256 + 256)
    # with the tables that are made once, which the first plan must not have left
    assert second.by_category == first.by_category
    assert second.by_module == first.by_module


def test_a_tensor_of_a_class_that_is_given_another_keeps_its_methods(session: Session) -> None:
    plan = planned(session, "drawn_in_place").plan
    assert plan.by_category["parameters"] == 4 * (256 * 256 + 256)
    assert plan.allocated >= 4 * (1024 + 2 * 512) * 256
    assert any(name == "model" for name, _ in plan.by_module)


def test_weights_that_threads_read_from_a_file_are_on_the_card(
    session: Session, tmp_path: Path
) -> None:
    loaded_steps.write_weights(tmp_path)
    plan = planned(session, "from_files", folder=str(tmp_path)).plan
    assert plan.by_category["parameters"] == 2 * 4 * (256 * 256 + 256)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_low_rank_product_is_trained_beside_quantized_weights(
    session: Session, bits: int
) -> None:
    pytest.importorskip("bitsandbytes")
    found = planned(session, "by_bitsandbytes", bits=bits)
    held = found.plan.by_category
    trained = 3 * 4 * 2 * 256 * 8
    assert held["parameters"] == 3 * 256 * 256 * bits // 8 + trained
    assert held["optimizer state"] == pytest.approx(2 * trained, rel=0.1)
    outliers = [note for note in found.plan.notes if "beyond their threshold" in note]
    assert len(outliers) == (bits == 8)


def test_live_bytes_of_quantized_weights_on_a_cpu_are_those_of_real_tensors() -> None:
    pytest.importorskip("bitsandbytes")
    source = {"where": str(STEPS), "function": "by_bitsandbytes"}
    [(plan, measured)] = live_bytes((source, {"bits": 4, "device": "cpu"}))
    assert plan == measured > 0


def test_tables_behind_decorators_are_made_anew_in_each_trace() -> None:
    """Fake ones of transformers' RT-DETR were left to the next trace, which lacked them and the modes of the first."""
    [(plan, measured)] = live_bytes(({"where": str(STEPS), "function": "on_tables"}, {}))
    assert plan == measured > 4 * 1024 * 64 * 4


@pytest.mark.parametrize(
    ("library", "name", "per_weight"),
    [
        ("torchao", "AdamW8bit", 2 * (1 + 4 / 256)),
        ("torchao", "AdamW4bit", 2 * (1 / 2 + 4 / 128)),
        ("torchao", "CPUOffloadOptimizer", 0),
        ("bitsandbytes", "PagedAdamW8bit", 2 * (1 + 4 / 256)),
    ],
)
def test_states_of_fewer_bits_take_their_bytes_and_their_updates_no_more(
    session: Session, library: str, name: str, per_weight: float
) -> None:
    pytest.importorskip(library)
    plan = planned(session, "optimized", library=library, name=name).plan
    weights = 2 * 1024 * 1024
    assert plan.by_category.get("optimizer state", 0) == pytest.approx(
        weights * per_weight, rel=0.02, abs=50_000
    )
    around = plan.allocated - plan.by_category.get("optimizer state", 0)
    assert around < 2.6 * 4 * weights + 17 * 2**20  # weights, gradients, half of that, a workspace


def test_a_compiled_function_writes_what_its_products_read_and_nothing_else(
    session: Session,
) -> None:
    alone, multiplied = (
        planned(session, "compiled_update", product=product).plan.allocated
        for product in (False, True)
    )
    one = 4 * 1024 * 1024
    assert alone < 3.1 * one  # the weight, its product with the numbers, and its gradient
    assert multiplied > alone + one
