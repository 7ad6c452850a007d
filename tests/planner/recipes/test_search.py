"""The search without a planner: which recipes are tried, which are left out and why, and in which order they come."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.config.text.yaml_text import write_text
from mpt.errors import MemoryBudgetError
from mpt.memory.relieving.relief import Relief, reliefs
from mpt.planner.answers.plan import Growing, Plan
from mpt.planner.client.session import Answer, PlanError
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.recipes.dials import Turn
from mpt.planner.recipes.known import Known
from mpt.planner.recipes.patches import combinations, patched, precision_patches
from mpt.planner.recipes.recipe import (
    Patch,
    Recipe,
    describe_cost,
    describe_patch,
    rank,
    without_conflicts,
)
from mpt.planner.recipes.search import _Search, search
from tests.planner.made_plans import make_plan

GIB, MIB = 2**30, 2**20
BUDGET = 6 * GIB
CONFIG = {
    "model": "small_cnn",
    "dataset": "digits",
    "precision": "amp",
    "train": {"batch_size": 32},
}


def plan(total: float, seconds: float = 1.0, **changes: Any) -> Plan:
    """A plan that takes `total` GiB of the card and fits where that is within the budget."""
    figures = {
        "reserved": int(total * GIB),
        "reserved_in_budget": int(min(total * GIB, BUDGET)),
        "budget_bytes": BUDGET,
        "fits": total * GIB <= BUDGET,
        "step_seconds": seconds,
        "inexact": ["micro_batch", "cpu_optimizer", "low_bit_optimizer"],
    }
    return make_plan(**{**figures, **changes})


class FakeSession:
    """Answers by a function of the memory tricks and the mode, and remembers what was asked."""

    allow: tuple[str, ...] = ()

    def __init__(
        self, answer: Callable[[dict[str, Any], str], Plan | str | Answer[Plan]], workers: int = 1
    ) -> None:
        self.answer, self.workers, self.asked = answer, workers, list[tuple[str, dict[str, Any]]]()

    def fork_ahead(self) -> None:
        """There is nothing to fork."""

    def submit(self, config: Config, **wish: Any) -> Future[Answer[Plan]]:
        memory = {
            name: value
            for name, value in config.to_data()["memory"].items()
            if name not in ("on_oom", "ceiling")
        }
        self.asked.append((config.precision.mode, memory))
        found = self.answer(memory, config.precision.mode)
        future: Future[Answer[Plan]] = Future()
        found = Answer(error=found) if isinstance(found, str) else found
        future.set_result(found if isinstance(found, Answer) else Answer(found))
        return future


def run(session: FakeSession, gpu: str = "rtx2060", **config: Any) -> Any:
    return search(
        session, load_config({**CONFIG, **config}), find_gpu(gpu), BUDGET, allow_lossy=True
    )  # type: ignore[arg-type]


def test_weights_elsewhere_are_combined_with_recomputation_and_micro_batches_where_nothing_less_fits() -> (
    None
):
    def answer(memory: dict[str, Any], mode: str) -> Plan:
        streams = (memory.get("stream_weights") or {}).get("fraction") == 1.0
        fits = (
            streams
            and "recompute" in memory
            and memory.get("micro_batch", {"size": 32})["size"] <= 8
        )
        return plan(4.0 if fits else 40.0, held_throughout=(1 if streams else 10) * GIB)

    found = run(FakeSession(answer), precision="fp32")
    best = found.recipes[0]
    assert best.fits
    assert {"stream_weights", "recompute", "micro_batch"} <= set(best.tricks)


def test_where_the_configuration_fits_single_tricks_are_tried_once_and_no_pairs_nor_micro_batches() -> (
    None
):
    session = FakeSession(lambda memory, mode: plan(2.0))
    found = run(session)
    modes = list(precision_patches(load_config(CONFIG), find_gpu("rtx2060")))
    # the other mode changes something and is no faster: it gets no tricks
    assert len(session.asked) == len(combinations().single) + len(modes) - 1
    assert found.recipes[0].patch == {}
    assert all("micro_batch" not in recipe.tricks for recipe in found.recipes)


@pytest.mark.parametrize(("slow", "is_outdone"), [(3.0, True), (1.1, False)])
def test_a_precision_that_takes_longer_alone_than_what_fits_in_another_gets_no_dials(
    slow: float, is_outdone: bool
) -> None:
    def answer(memory: dict[str, Any], mode: str) -> Plan:
        alone = slow if mode == "fp32" else 1.0
        return plan(4.0, 1.05 * alone) if "recompute" in memory else plan(8.0, alone)

    session = FakeSession(answer)
    found = run(session, precision="fp32")
    tried = {
        mode: [memory for one, memory in session.asked if one == mode] for mode in ("fp32", "amp")
    }
    budgets = {
        mode: [memory.get("recompute", {}).get("budget") for memory in tried[mode]]
        for mode in tried
    }
    turned = {mode: any(budget is not None for budget in budgets[mode]) for mode in tried}
    assert turned == {"fp32": not is_outdone, "amp": True}
    # for who wants no other arithmetic
    assert [memory for memory in tried["fp32"] if "recompute" in memory]
    assert ("precision" in found.recipes[0].patch) == is_outdone


@pytest.mark.parametrize(("smallest", "sizes"), [(5.2, [16, 8, 4, 2]), (6.2, [16, 8])])
def test_micro_batches_are_not_split_further_where_even_one_of_nothing_would_be_too_much(
    smallest: float, sizes: list[int]
) -> None:
    def answer(memory: dict[str, Any], mode: str) -> Plan:
        return plan(smallest + memory.get("micro_batch", {"size": 32})["size"] / 4)

    session = FakeSession(answer)
    found = run(session)
    asked = [
        memory["micro_batch"]["size"] for _, memory in session.asked if "micro_batch" in memory
    ]
    if smallest * GIB > BUDGET:  # then one more says how small it gets
        assert asked.pop() == 2
    assert list(dict.fromkeys(asked)) == sizes
    assert bool(found.hopeless) == (smallest * GIB > BUDGET)
    assert any(one.fits for one in found.recipes) == (smallest * GIB < BUDGET)


def test_what_does_not_fit_is_paired_and_then_split_until_it_fits() -> None:
    def answer(memory: dict[str, Any], mode: str) -> Plan:
        return plan(4.0 if memory.get("micro_batch", {"size": 32})["size"] <= 8 else 8.0)

    session = FakeSession(answer)
    found = run(session)
    sizes = [
        memory["micro_batch"]["size"] for _, memory in session.asked if "micro_batch" in memory
    ]
    assert set(sizes) == {16, 8}  # not 4: eights fit
    assert found.recipes[0].tricks["micro_batch"] == 8
    assert any({"recompute", "cpu_optimizer"} <= set(memory) for _, memory in session.asked)


def test_a_trick_is_not_added_to_what_fits_with_room_to_spare() -> None:
    session = FakeSession(lambda memory, mode: plan(5.0 if "cpu_optimizer" in memory else 8.0))
    run(session)
    with_it = [memory for _, memory in session.asked if "cpu_optimizer" in memory]
    assert with_it == [{"cpu_optimizer": True}]  # in masters of 24 bits it would be no faster
    session = FakeSession(lambda memory, mode: plan(5.99 if "cpu_optimizer" in memory else 8.0))
    run(session)
    assert len([memory for _, memory in session.asked if "cpu_optimizer" in memory]) > 1


def test_weights_and_states_that_are_too_much_rule_out_what_leaves_them_as_they_are() -> None:
    def answer(memory: dict[str, Any], mode: str) -> Plan:
        smaller = "cpu_optimizer" in memory
        size = memory.get("micro_batch", {"size": 32})["size"]
        return plan(5.0 + size if smaller else 9.0, held_throughout=3 * GIB if smaller else 7 * GIB)

    session = FakeSession(answer)
    found = run(session)
    assert found.hopeless
    assert all("cpu_optimizer" not in patch["memory"] for patch in found.hopeless)
    asked = [memory for _, memory in session.asked]
    assert not any("micro_batch" in memory and "cpu_optimizer" not in memory for memory in asked)
    assert any("micro_batch" in memory and "cpu_optimizer" in memory for memory in asked)


@pytest.mark.parametrize(("weights", "asked"), [(2, []), (4, ["amp", "bf16"])])
def test_gradients_are_not_released_where_the_rest_is_too_much(
    weights: int, asked: list[str]
) -> None:
    def answer(memory: dict[str, Any], mode: str) -> Plan | str:
        if "optimizer_in_backward" in memory and mode == "amp":
            return "scaled"
        by_category = {"parameters": weights * GIB, "gradients": GIB}
        return plan(12.0, held_throughout=9 * GIB, by_category=by_category)

    session = FakeSession(answer)
    config = load_config(CONFIG)
    search(session, config, find_gpu("rtx3060"), BUDGET)  # type: ignore[arg-type]
    released = [mode for mode, memory in session.asked if set(memory) == {"optimizer_in_backward"}]
    assert released == asked


def test_nothing_is_tried_alone_either_that_leaves_too_large_weights_as_they_are() -> None:
    def answer(memory: dict[str, Any], mode: str) -> Plan | Answer[Plan]:
        if "stream_weights" in memory:
            return plan(4.0, held_throughout=GIB)
        if memory:
            return Answer(
                error="built, and before any step, it holds 22 GiB",
                exit_code=MemoryBudgetError.exit_code,
            )
        return plan(24.0, held_throughout=22 * GIB)

    session = FakeSession(answer)
    found = run(session, precision="bf16", memory={})
    asked = [memory for _, memory in session.asked]
    leave_weights = {one.name for one in reliefs("activations", "batch")}
    assert not any(memory and set(memory) <= leave_weights for memory in asked)
    assert {"recompute"} in [set(patch["memory"]) for patch in found.hopeless]
    # its networks alone were too much
    assert {"cpu_optimizer"} in [set(patch["memory"]) for patch in found.hopeless]
    assert not any("cpu_optimizer" in patch.get("memory", {}) for patch, _ in found.refused)
    assert found.recipes[0].tricks.keys() == {"stream_weights"}


@pytest.mark.parametrize("held", [4, 1])
def test_weights_that_are_much_of_what_does_not_fit_are_sent_to_the_host_as_few_as_can_be(
    held: int,
) -> None:
    def answer(memory: dict[str, Any], mode: str) -> Plan:
        fraction = memory.get("stream_weights", {"fraction": 0.0})["fraction"]
        return plan(8.0 - 4 * fraction, 1.0 + fraction, held_throughout=held * GIB)

    session = FakeSession(answer)
    found = run(session)
    asked = [
        memory["stream_weights"]["fraction"]
        for _, memory in session.asked
        if "stream_weights" in memory
    ]
    if held == 1:
        assert asked == []
        return
    assert found.recipes[0].fits_well
    assert 0.5 < found.recipes[0].tricks["stream_weights"]["fraction"] < 0.7
    assert asked[0] == 1.0


def test_a_configuration_that_cannot_be_planned_is_an_error_and_a_refused_recipe_is_not() -> None:
    with pytest.raises(PlanError, match="no shape rule"):
        run(FakeSession(lambda memory, mode: "cannot plan: no shape rule"))
    found = run(
        FakeSession(
            lambda memory, mode: (
                "there is no 8-bit SGD" if "low_bit_optimizer" in memory else plan(2)
            )
        )
    )
    assert ({"memory": {"low_bit_optimizer": True}}, "there is no 8-bit SGD") in found.refused


def test_the_first_plan_may_end_the_search() -> None:
    def stop(first: dict[str, Any]) -> None:
        raise MemoryBudgetError(str(first.reserved))

    session: Any = FakeSession(lambda memory, mode: plan(8.0))
    with pytest.raises(MemoryBudgetError, match=str(8 * GIB)):
        search(session, load_config(CONFIG), find_gpu("rtx2060"), BUDGET, goes_on=stop)


def test_growing_segments_make_a_recipe_of_their_own_where_they_help() -> None:
    growing = Growing(reserved=5 * GIB, reserved_in_budget=5 * GIB, fits=True, tight=False)
    found = run(FakeSession(lambda memory, mode: plan(7.0, growing=None if memory else growing)))
    best = found.recipes[0]
    assert best.patch == {"memory": {"expandable_segments": True}}
    assert (best.traced, best.total, describe_cost(best)) == (False, 5 * GIB, "exact")
    assert "expandable_segments" in best.config.memory.tricks


def test_a_patch_that_changes_nothing_is_not_tried_again() -> None:
    session = FakeSession(lambda memory, mode: plan(2.0))
    run(session, memory={"recompute": "all"})
    assert len(session.asked) == len({str(asked) for asked in session.asked})


def recipe(patch: Patch, total: float = 3.0, seconds: float = 1.0, **changes: Any) -> Recipe:
    return Recipe(patch, load_config(CONFIG), plan(total, seconds, **changes))


def test_recipes_come_fastest_first_gentlest_among_equals_and_the_doubtful_last() -> None:
    fast = recipe({"memory": {"micro_batch": 4}}, seconds=1.00)
    gentle = recipe({"memory": {"recompute": "all"}}, seconds=1.05)
    slow = recipe({"memory": {"offload_activations": True}}, seconds=2.0)
    close = recipe({"memory": {"recompute": "sqrt"}}, total=5.9, seconds=0.5)
    tight = recipe({"memory": {"recompute": "selective"}}, seconds=0.6, tight=True)
    too_large = recipe({}, total=7, seconds=0.1)
    assert rank([too_large, tight, close, slow, fast, gentle]) == [
        gentle,
        fast,
        slow,
        close,
        tight,
        too_large,
    ]
    assert [describe_cost(one) for one in (gentle, fast, close, tight)] == [
        "exact",
        "not bit-equal",
        "close",
        "tight",
    ]


def test_the_bytes_of_a_tight_recipe_are_those_under_the_budget() -> None:
    tight = recipe({}, total=7, fits=True, tight=True, reserved_in_budget=int(5.9 * GIB))
    assert tight.total == int(5.9 * GIB)


@pytest.mark.parametrize(
    ("gpu", "mode", "expected"),
    [
        ("rtx2060", "fp32", ["amp", "fp16-24bit"]),
        ("rtx3060", "fp32", ["bf16", "bf16-sr"]),
        ("rtx2060", "amp", ["fp16-24bit"]),
    ],
)
def test_modes_that_hold_less_on_the_card_are_tried(
    gpu: str, mode: str, expected: list[str]
) -> None:
    patches = list(precision_patches(load_config({**CONFIG, "precision": mode}), find_gpu(gpu)))
    assert [patch["precision"]["mode"] for patch in patches if patch] == expected


@pytest.mark.parametrize(
    "precision", ["fp32", "amp", {"mode": "amp", "dtype": "float16", "loss_scale": 128.0}]
)
@pytest.mark.parametrize("memory", [{}, {"recompute": {"mode": "sqrt"}}])
def test_a_recipe_is_planned_as_its_patch_over_the_file_is_trained(
    precision: Any, memory: Any, tmp_path: Path
) -> None:
    file, patch_file = tmp_path / "config.yaml", tmp_path / "plan.yaml"
    file.write_text(write_text({**CONFIG, "precision": precision, "memory": memory}))
    config = load_config(file)
    for patch in precision_patches(config, find_gpu("rtx3060")):
        patch["memory"] = {"recompute": "all", "micro_batch": 8}
        patch_file.write_text(write_text(patch))
        assert patched(config, patch, ()) == load_config(file, patches=[patch_file])


def test_overrides_that_would_win_over_a_patch_are_left_out_of_the_command() -> None:
    overrides = [
        "precision=fp32",
        "precision.keep_fp32=[a]",
        "memory.micro_batch.size=4",
        "train.batch_size=8",
    ]
    patch = {"precision": {"mode": "bf16"}, "memory": {"micro_batch": 2}}
    assert without_conflicts(overrides, patch) == ["precision.keep_fp32=[a]", "train.batch_size=8"]
    assert without_conflicts(overrides, {"memory": {"recompute": "all"}}) == overrides


def test_what_changes_the_learnt_result_is_proposed_only_where_that_is_allowed() -> None:
    session = FakeSession(lambda memory, mode: plan(7.0))
    config: Any = load_config({**CONFIG, "precision": "amp"})
    search(session, config, find_gpu("rtx3060"), BUDGET)  # type: ignore[arg-type]
    assert not any(
        "low_bit_optimizer" in memory or mode == "bf16-sr" for mode, memory in session.asked
    )
    session = FakeSession(lambda memory, mode: plan(7.0))
    found = search(session, config, find_gpu("rtx3060"), BUDGET, allow_lossy=True)  # type: ignore[arg-type]
    lossy = [one for one in found.recipes if one.is_lossy]
    assert {tuple(one.tricks) for one in lossy} >= {("low_bit_optimizer",)}
    assert any(one.patch.get("precision", {}).get("mode") == "bf16-sr" for one in lossy)


def test_a_lossy_trick_of_any_kind_waits_until_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ours are for the optimizer; one of somebody else's may keep activations or weights in fewer bits."""

    def all_lossy(*kinds: str) -> list[Relief]:
        return [
            replace(one, is_lossy=one.relieves in ("activations", "weights"))
            for one in reliefs(*kinds)
        ]

    for module in ("patches", "search"):
        monkeypatch.setattr(f"mpt.planner.recipes.{module}.reliefs", all_lossy)
    session = FakeSession(lambda memory, mode: plan(7.0))
    search(session, load_config(CONFIG), find_gpu("rtx3060"), BUDGET)  # type: ignore[arg-type]
    named = {name for _, memory in session.asked for name in memory}
    assert "micro_batch" in named
    assert named.isdisjoint(one.name for one in reliefs("activations", "weights"))


def test_a_lossy_recipe_comes_first_only_where_it_gains_more_than_the_band() -> None:
    lossy, other = {"memory": {"low_bit_optimizer": True}}, {"memory": {"micro_batch": 4}}
    ranked = rank([recipe(lossy, seconds=1.0), recipe(other, seconds=1.2)])
    assert [one.patch for one in ranked] == [other, lossy]
    assert rank([recipe(lossy, seconds=1.0), recipe(other, seconds=1.3)])[0].patch == lossy
    assert describe_cost(ranked[1]).startswith("lossy")


def test_a_recipe_that_changes_nothing_is_preferred_until_the_gain_exceeds_the_band() -> None:
    exact, other = {"memory": {"recompute": "all"}}, {"memory": {"cpu_optimizer": True}}
    assert rank([recipe(exact, seconds=1.2), recipe(other, seconds=1.0)])[0].patch == exact
    assert rank([recipe(exact, seconds=1.3), recipe(other, seconds=1.0)])[0].patch == other


def test_dials_are_turned_to_the_gentlest_number_that_fits() -> None:
    """Of 8 GiB, 4 are activations: a budget keeps its share of these, and what is recomputed takes time."""

    def answer(memory: dict[str, Any], mode: str) -> Plan | str:
        way = memory.get("recompute", {})
        if set(memory) - {"recompute"} or mode != "amp":
            return "not here"
        if way.get("budget") is None:
            return (
                plan(8.0) if not way else plan(4.1, 3.0) if way["mode"] == "all" else plan(7.0, 3.0)
            )
        slow = 1.0 if way["per"] == "tensor" else 2.0
        return plan(4 + 4 * way["budget"], 1 + slow * (1 - way["budget"]))

    session = FakeSession(answer)
    found = run(session)
    best = found.recipes[0]
    assert best.tricks["recompute"]["per"] == "tensor"
    limit = (0.97 * 6 - 4) / 4
    assert limit - 0.12 <= best.tricks["recompute"]["budget"] <= limit
    by_block = [one for one in session.asked if one[1].get("recompute", {}).get("per") == "block"]
    by_block = [one for one in by_block if one[1]["recompute"]["budget"] is not None]
    assert len(by_block) == 1  # it is slower than the other dial


def test_a_dial_is_not_turned_if_another_tricks_fits_in_the_time_of_the_step_alone() -> None:
    """Copies to the host overlap with computing as long as there are few; recomputation always takes time."""

    def turned(seconds: float) -> tuple[set[str], Patch]:
        def answer(memory: dict[str, Any], mode: str) -> Plan | str:
            if set(memory) == {"recompute"}:
                return plan(4.1, 3.0)
            if set(memory) - {"offload_activations"}:
                return "not here"
            sent = memory["offload_activations"]["at_most_gib"] or 6.0 if memory else 0.0
            taken = 1.0 if not sent else seconds if sent < 6 else 2.0
            return plan(8.0 - sent / 2, taken, by_category={"activations": 6 * GIB})

        session = FakeSession(answer)
        found = search(session, load_config(CONFIG), find_gpu("rtx2060"), BUDGET)  # type: ignore[arg-type]
        numbers = [
            one for _, memory in session.asked for one in memory.items() if isinstance(one[1], dict)
        ]
        dials = {name for name, value in numbers if value.get("budget") or value.get("at_most_gib")}
        return dials, found.recipes[0].patch

    both, first = turned(1.5)
    assert both == {"recompute", "offload_activations"}
    one, same = turned(1.0)
    assert one == {"offload_activations"}
    assert first == same


def turned(memory: Callable[[float], float]) -> tuple[Turn, list[float]]:
    """A dial of the GiB that are offloaded, of up to 6, with what that leaves on the card; and the numbers tried."""
    (dial,) = next(one for one in reliefs("activations") if one.name == "offload_activations").dials
    ends = [
        Recipe({}, None, plan(memory(sent), 9 - memory(sent), by_category={"activations": 6 * GIB}))  # type: ignore[arg-type]
        for sent in (0.0, 6.0)
    ]
    turn, tried = Turn({}, "offload_activations", dial, *ends), list[float]()
    while (value := turn.next_value()) is not None:
        tried.append(value)
        turn.note(value, Recipe({}, None, plan(memory(value), 9 - memory(value))))  # type: ignore[arg-type]
    return turn, tried


def test_a_dial_is_turned_to_what_fits_well_also_where_memory_is_on_no_line() -> None:
    turn, tried = turned(lambda sent: 8 - 4 * (sent / 6) ** 3)
    assert turn.fitting is not None
    assert 0.84 * BUDGET < turn.fitting[1] < 0.95 * BUDGET  # a line alone finds nothing
    assert len(tried) <= 4


def test_a_dial_is_left_alone_where_whole_blocks_move_and_nothing_is_between() -> None:
    _, tried = turned(lambda sent: 8 if sent < 4.5 else 4)
    assert len(tried) == 3


def test_a_dial_is_left_alone_where_one_block_lies_between_two_near_values() -> None:
    turn, tried = turned(lambda sent: 8 - 0.3 * sent - (1.5 if sent > 3.9 else 0))
    assert len(tried) == 2
    assert turn.fitting is not None


def test_a_dial_is_turned_further_where_two_values_alike_leave_room_for_blocks_between() -> None:
    turn, tried = turned(lambda sent: 8 if sent < 4.5 else 3)
    assert max(tried[:2]) < 4.5  # neither fits: all would be sent
    assert turn.fitting is not None
    assert 4.5 <= turn.fitting[0] < 6


def test_what_changes_something_has_to_be_faster_by_the_band_than_what_changes_nothing() -> None:
    def cannot_win(seconds: float, trick: str, allow_lossy: bool = False) -> bool:
        plain, exact = recipe({}, total=8), recipe({"memory": {"recompute": "all"}}, 3, seconds)
        known = Known(BUDGET, allow_lossy)
        known.recipes = [plain, exact, recipe({}, 9, inexact=("cpu_optimizer",))]
        return known.cannot_win(plain, {"memory": {trick: True}})

    assert cannot_win(1.15, "cpu_optimizer")
    assert not cannot_win(1.35, "cpu_optimizer")
    assert not cannot_win(1.15, "offload_activations")  # which changes nothing either
    # a lossy one may be so much faster that the band is about that
    assert not cannot_win(1.15, "cpu_optimizer", allow_lossy=True)


@pytest.mark.parametrize(("seconds", "is_tried"), [(1.1, False), (2.0, True)])
def test_bfloat16_is_not_tried_for_a_trick_beside_what_comes_before_the_configured_half(
    seconds: float, is_tried: bool
) -> None:
    session: Any = FakeSession(lambda memory, mode: plan(7.0))
    under_way = _Search(
        session, load_config(CONFIG), BUDGET, lambda planned, fitting: None, allow_lossy=False
    )
    under_way.known.recipes = [
        recipe({}, 8.0),
        recipe({"memory": {"recompute": "all"}}, 3.0, seconds),
    ]
    under_way.refused = [({"memory": {"optimizer_in_backward": True}}, "it has a loss scale")]
    under_way.try_without_scale(find_gpu("rtx3060"))
    assert bool(session.asked) == is_tried


def test_a_recipe_waits_for_the_answer_to_a_part_of_it_that_may_rule_it_out() -> None:
    def answer(memory: dict[str, Any], mode: str) -> Plan:
        return plan(9.0, held_throughout=7 * GIB)

    session: Any = FakeSession(answer, workers=2)
    under_way = _Search(
        session, load_config(CONFIG), BUDGET, lambda planned, fitting: None, allow_lossy=False
    )
    both = {"cpu_optimizer": True, "recompute": "all"}
    under_way.try_all([{"memory": {"cpu_optimizer": True}}, {"memory": both}])
    assert len(session.asked) == 1
    assert under_way.known.hopeless == [{"memory": both}]


def test_a_recipe_waits_for_other_settings_of_its_tricks_that_may_rule_it_out() -> None:
    def answer(memory: dict[str, Any], mode: str) -> Plan:
        return plan(5.0 if "recompute" in memory else 8.0)

    session: Any = FakeSession(answer, workers=2)
    under_way = _Search(
        session, load_config(CONFIG), BUDGET, lambda planned, fitting: None, allow_lossy=False
    )
    under_way.known.recipes = [recipe({}, 8.0), recipe({"memory": {"cpu_optimizer": True}}, 7.9)]
    pairs = [{"recompute": way, "cpu_optimizer": True} for way in ("sqrt", "selective")]
    under_way.try_all({"memory": one} for one in pairs)
    assert len(session.asked) == 1


@pytest.mark.slow
def test_what_a_loss_scale_refuses_is_tried_in_bfloat16_where_the_card_has_it() -> None:
    def asked(gpu: str) -> list[tuple[str, dict[str, Any]]]:
        def answer(memory: dict[str, Any], mode: str) -> Plan | str:
            return "scaled" if "optimizer_in_backward" in memory and mode == "amp" else plan(8.0)

        session = FakeSession(answer)
        run(session, gpu)
        return [
            one for one in session.asked if "optimizer_in_backward" in one[1] and one[0] == "bf16"
        ]

    assert asked("rtx3060")
    assert not asked("rtx2060")


@pytest.mark.parametrize(("held", "heavy"), [(60, True), (40, False)])
def test_weights_are_heavy_by_what_the_context_leaves_of_a_small_budget(
    held: int, heavy: bool
) -> None:
    figures = {
        "context_bytes": 450,
        "held_throughout": held,
        "fits": False,
        "reserved": 300,
        "tight": False,
    }
    plain = Recipe(
        {}, load_config({"model": "small_cnn", "dataset": "digits"}), make_plan(**figures)
    )
    known = Known(600, allow_lossy=False)
    known.recipes = [plain]
    assert known.is_heavy({}) is heavy


def test_sizes_in_a_recipe_are_in_the_unit_of_its_memory() -> None:
    patch = {"memory": {"offload_activations": {"at_most_gib": 1.65}, "recompute": {"budget": 0.5}}}
    assert describe_patch(patch) == "offload activations at most 1,690 MiB, recompute budget 0.5"
