"""Training steps that know nothing of mpt are planned: `mpt plan FILE.py:FUNCTION` and `mpt.plan_step`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mpt
from mpt.config.finding.shipped import shipped_configs
from mpt.config.load import load_config
from mpt.errors import ConfigError, MptError
from mpt.planner.client.session import Session
from scripts.plans.live_bytes import live_bytes
from tests.planner.own import foreign_steps
from tests.programs import run_mpt

STEPS = Path(foreign_steps.__file__)


def sparse(**options: Any) -> tuple[str, dict[str, Any]]:
    return "looked_up", options


@pytest.mark.parametrize(
    "steps",
    [
        [
            ("decoder", {}),
            sparse(),
            sparse(kind="sgd"),
            sparse(kind="adagrad", padding=0),
            sparse(passes=2),
            sparse(in_bags=True),
        ],
        pytest.param([("pair", {}), ("four_parts", {})], marks=pytest.mark.slow),
    ],
)
def test_live_bytes_on_a_cpu_are_those_of_the_same_step_on_real_tensors(
    steps: list[tuple[str, dict[str, Any]]],
) -> None:
    calls = [({"where": str(STEPS), "function": name}, given) for name, given in steps]
    for planned, measured in live_bytes(*calls):
        assert measured == planned > 0


@pytest.fixture(scope="module")
def decoder() -> Any:
    return mpt.plan_step(
        foreign_steps.decoder, gpu="rtx3060", largest=True, batch_size=8, names_cuda=True
    )


def test_what_the_weights_gradients_and_states_hold_is_found_without_being_told(
    decoder: Any,
) -> None:
    words, width = 100, 128  # all tensors are multiples of the allocator's 512 bytes
    block = (
        2 * width
        + 3 * width * width
        + 3 * width
        + width * width
        + width
        + 8 * width * width
        + 5 * width
    )
    weights = 4 * (words * width + 3 * block)
    held = decoder.plan.by_category
    assert held["parameters"] == 2 * weights  # and the moving average
    assert held["optimizer state"] == 2 * weights
    assert decoder.plan.moment == "backward"
    modules = dict(decoder.plan.by_module)
    assert any(name.startswith("model.layers.0") for name in modules)


TIMES = """
import sys
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.own.proposals.changes import Changes
from mpt.planner.own.execution.source import Source
from mpt.planner.own.trace import trace_own
gpu = find_gpu("a100")
def trace(name, **given):
    return trace_own(Source(sys.argv[1], name), given, gpu, None, Changes()).fake
assert any("results whose size" in note for note in trace("suppressed").notes)
for given in ({"parallel": True}, {}, {"products": "ieee"}, {"products": "tf32"}):
    print(trace("convolutions", **given).work.seconds(gpu))
"""


def test_convolutions_are_as_fast_as_the_scripts_own_switches_let_them_be() -> None:
    """By torch's default they are in TF32, and other products not; `nn.DataParallel` of one card is no other step."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TIMES, str(STEPS)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    parallel, by_default, exactly, all_in_tf32 = map(float, done.stdout.split())
    assert parallel == by_default
    assert all_in_tf32 <= by_default < exactly / 2


@pytest.mark.slow
def test_a_step_of_accelerate_in_float16_is_planned_on_its_card() -> None:
    pytest.importorskip("accelerate")
    made = mpt.plan_step(foreign_steps.accelerated, gpu="rtx3060")
    weights = 4 * (256 * 1024 + 1024 + 1024 * 10 + 10)
    assert made.plan.by_category["optimizer state"] == pytest.approx(2 * weights, rel=0.01)


def test_what_to_write_into_the_script_is_planned_with_its_saving() -> None:
    decoder = mpt.plan_step(foreign_steps.decoder, gpu="rtx3060", batch_size=64, names_cuda=True)
    exact = next(way for way in decoder.ways if way.exact)
    assert exact.lines == [
        "for block in model.layers: block.forward = "
        "functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)"
    ]
    assert exact.plan.allocated < 0.8 * decoder.plan.allocated
    assert exact.plan.step_seconds >= decoder.plan.step_seconds
    words = " ".join(line for way in decoder.ways for line in way.lines)
    assert "with torch.autocast" in words
    assert "optimizer = bitsandbytes.optim.AdamW8bit(optimizer.param_groups)" in words


def test_the_largest_batch_is_one_that_the_factory_was_asked_for(decoder: Any) -> None:
    most = decoder.plan.largest_surely
    assert most > 64
    again = mpt.plan_step(foreign_steps.decoder, gpu="rtx3060", batch_size=most, names_cuda=True)
    assert again.plan.fits


def test_autocast_and_a_scaler_of_its_own_are_followed() -> None:
    half = mpt.plan_step(foreign_steps.decoder, batch_size=8, names_cuda=True, autocast=True)
    assert not any("autocast" in line for way in half.ways for line in way.lines)
    whole = mpt.plan_step(foreign_steps.decoder, batch_size=8, names_cuda=True)
    assert half.plan.by_category["activations"] < 0.85 * whole.plan.by_category["activations"]


def test_shapes_that_depend_on_values_are_taken_at_their_bound() -> None:
    found = mpt.plan_step(foreign_steps.masked)
    assert (
        "4 results whose size depends on values were taken as large as they can be"
        in found.plan.notes
    )


def test_sizes_that_a_factory_computes_with_tensors_are_true(session: Session) -> None:
    computed, by_chance = (
        session.plan_own(
            {"where": str(STEPS), "function": name, "folder": str(STEPS.parents[3])}, {}
        )
        for name in ("computed", "by_chance")
    )
    plan = computed.get().plan
    # a bias takes whole blocks
    assert plan.by_category["parameters"] == 4 * (64 * 128 + 128 + 128 * 192) + 1024
    note, *_ = plan.notes
    assert note.startswith("values that only a real run has were read while it was built")
    # the check of a weight is named, and neither the widths nor the loader's seed nor what torch draws again
    assert re.search(f"at {STEPS}:3..: if a size", note)
    assert re.search(
        f"ZeroDivisionError.*; a value read at {STEPS}:3.. was taken as 0", by_chance.error
    )


def test_what_is_recomputed_in_backward_is_on_the_card_too() -> None:
    recomputed, plain = (
        mpt.plan_step(foreign_steps.recomputed, is_recomputed=each).plan for each in (True, False)
    )
    assert recomputed.by_category["parameters"] == plain.by_category["parameters"]
    assert recomputed.allocated <= plain.allocated


def test_packed_sequences_are_planned_as_long_as_the_longest() -> None:
    packed, padded = (
        mpt.plan_step(foreign_steps.sentences, is_packed=each).plan for each in (True, False)
    )
    assert any(
        "packed sequences were taken to be as long as the longest" in note for note in packed.notes
    )
    result, given = 8 * 64 * 32 * 4, 8 * 64 * 16 * 4
    held = [plan.by_category["activations"] for plan in (packed, padded)]
    assert 0 <= held[0] - held[1] <= 2 * (result + given)  # packing and unpacking copy


LIBRARY = """
import torch

assert not torch.cuda.is_available(), "a card is there"
WIDTHS = [int(width) for width in torch.tensor([8, 4] + 100 * [0]).numpy()[:2]]
"""
IMPORTS_LATE = """
import torch

def build():
    import a_library
    model = torch.nn.Linear(*a_library.WIDTHS).cuda()
    assert torch.cuda.is_available()
    return lambda: model(torch.randn(2, 8, device="cuda")).sum().backward()
"""


def test_a_library_that_the_factory_imports_sees_no_card_and_makes_real_tensors(
    session: Session, tmp_path: Path
) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "a_library.py").write_text(LIBRARY)
    (tmp_path / "training.py").write_text(IMPORTS_LATE)
    source = {"where": str(tmp_path / "training.py"), "function": "build", "folder": str(installed)}
    found = session.plan_own(source, {}).get()
    assert found.plan.by_category["parameters"] == 2 * 512  # both are less than a block


def test_buckets_of_gradients_are_planned_for_one_of_several_cards(session: Session) -> None:
    source = {"where": str(STEPS), "function": "on_cards", "folder": str(STEPS.parents[3])}
    kinds: list[dict[str, Any]] = [
        {},
        {"has_views": True},
        {"is_parallel": False, "is_synced": False},
    ]
    copied, viewed, alone = (session.plan_own(source, options).get().plan for options in kinds)
    weights = 4 * (64 * 3 * 9 + 64 + 2 * 64 + 64 * 64 * 9 + 64)
    assert copied.by_category["reduce buffers"] == pytest.approx(weights, abs=512)
    assert viewed.by_category["gradients"] == pytest.approx(weights, abs=512)  # even in forward
    assert all("reduce buffers" not in plan.by_category for plan in (viewed, alone))
    # a norm keeps as much
    assert copied.allocated - alone.allocated == pytest.approx(weights, abs=1024)
    assert viewed.allocated <= copied.allocated
    assert any("without NCCL's own buffers" in note for note in copied.notes)


def test_weights_that_fsdp_shares_out_are_planned_as_real_ranks_hold_them(session: Session) -> None:
    source = {"where": str(STEPS), "function": "shared_out", "folder": str(STEPS.parents[3])}
    found = [session.plan_own(source, {"way": way}).get() for way in ("plain", "half")]
    plain, half = (each.plan for each in found)
    # whose 8-bit optimizers cannot step shared weights
    assert not any(
        "bitsandbytes" in line for each in found for way in each.ways for line in way.lines
    )
    layers, layer = 8, 4 * (1024 * 1024 + 1024)
    for plan in (plain, half):  # half of them on each of two cards
        assert plan.by_category["parameters"] == pytest.approx(layers * layer / 2, abs=8192)
        assert plan.by_category["optimizer state"] == pytest.approx(layers * layer, abs=16384)
    # two gloo ranks on a CPU held so many live bytes in the same step
    assert plain.allocated - plain.by_category["workspace"] == pytest.approx(83_968_128, abs=16384)
    assert any("shared out as on the first of 2 cards" in note for note in plain.notes)
    # what that process keeps of operators' results is none of a mesh's numbers
    config = load_config(shipped_configs()["classify_digits"])
    (after,) = session.plan([config], placement={"nproc": 2, "strategy": "fsdp"})
    assert after.get().by_category["gathered parameters"] > 0


def test_a_recorded_step_has_its_memory_in_a_pool_and_its_time_in_each_replay(
    session: Session,
) -> None:
    source = {"where": str(STEPS), "function": "recorded", "folder": str(STEPS.parents[3])}
    recorded, plain = (
        session.plan_own(source, {"is_recorded": each}).get().plan for each in (True, False)
    )
    # a number more is alive
    assert recorded.by_category == pytest.approx(plain.by_category, abs=512)
    assert recorded.allocated == pytest.approx(plain.allocated, abs=512)
    assert recorded.reserved > plain.reserved  # the warm-up's memory is not the graph's
    assert recorded.step_seconds == pytest.approx(plain.step_seconds, rel=0.02)
    assert {name for name, _ in recorded.by_module} == {name for name, _ in plain.by_module}


@pytest.mark.parametrize("as_lists", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_table_of_ctc_grows_with_the_labels(as_lists: bool) -> None:
    few, many = (
        mpt.plan_step(foreign_steps.letters, labels=each, as_lists=as_lists).plan
        for each in (100, 1000)
    )
    table = 8 * 200 * 2 * (1000 - 100) * 4
    # of forward and of backward
    assert many.allocated - few.allocated == pytest.approx(2 * table, rel=0.02)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken", f"same reduction dim.*model \\({STEPS}:[12][0-9][0-9]\\)"),
        ("ends", f"it ends the program.*{STEPS}:[12][0-9][0-9]"),
        ("number", "it returned int; return a step, which takes nothing, or"),
        ("nothing", "has no function nothing"),
        ("in_parts", "make_graphed_callables is not followed; record the whole step"),
    ],
)
def test_what_cannot_be_planned_is_one_line_with_its_place(name: str, words: str) -> None:
    from mpt.planner.recipes.own_step import plan_own_step

    with pytest.raises(MptError, match=words) as raised:
        plan_own_step(f"{STEPS}:{name}", {})
    assert "\n" not in str(raised.value)


def test_a_module_wants_to_be_allowed_and_a_function_wants_to_stand_in_a_file() -> None:
    from mpt.planner.recipes.own_step import plan_own_step

    with pytest.raises(ConfigError, match="add --allow json"):
        plan_own_step("json:loads", {})
    with pytest.raises(ConfigError, match="at the top level of a file"):
        mpt.plan_step(lambda: None)


def test_the_command_plans_a_file_and_its_arguments(tmp_path: Path) -> None:
    words = [
        "plan",
        f"{STEPS}:decoder",
        "batch_size=2",
        "names_cuda=true",
        "--vram",
        "6GiB",
        "--json",
    ]
    done = run_mpt(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["plan"]["batch_size"] == 2
    assert found["plan"]["fits"] is True
    assert all(way["plan"]["reserved"] < found["plan"]["reserved"] for way in found["ways"])
    wrong = run_mpt("plan", f"{STEPS}:decoder", "batchsize=2")
    assert wrong.returncode == 2
    assert "it takes batch_size, length, names_cuda, autocast" in wrong.stderr
