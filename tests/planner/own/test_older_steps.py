"""Steps of older repositories: old names of tensors, values that are asserted, written out or become sizes."""

from __future__ import annotations

import gc
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mpt.errors import MptError
from mpt.planner.answers.plan import Plan
from mpt.planner.client.session import Session
from mpt.planner.own.stand_ins.extensions import extension, extensions_forgotten
from scripts.plans.live_bytes import live_bytes
from tests.planner.own import older_steps
from tests.planner.own.own_plans import plan_of

STEPS = Path(older_steps.__file__)


def planned(session: Session, name: str, **options: Any) -> Plan:
    return plan_of(session, STEPS, name, options)


def test_tensors_of_old_class_names_are_on_the_card(session: Session) -> None:
    for default in (False, True):
        plan = planned(session, "by_old_names", default=default)
        assert plan.by_category["parameters"] == 4 * (256 * 256 + 256)
    # and the next script has its own default again
    assert planned(session, "counts").by_category["parameters"] == 4 * (256 * 256 + 256)
    assert any("puts nothing on" in note for note in planned(session, "counts").notes)


@pytest.mark.parametrize("kind", ["host", "accelerator"])
def test_values_that_a_script_writes_out_are_known_on_the_card(session: Session, kind: str) -> None:
    plan = planned(session, "counts", kind=kind)
    weights = 4 * (256 * 256 + 256)
    assert plan.by_category["optimizer state"] == pytest.approx(2 * weights, abs=2048)
    assert any("puts nothing on" in note for note in plan.notes) == (kind == "host")
    assert not any("reads values" in note for note in plan.notes)


def test_steps_whose_sizes_hang_on_values_that_a_plan_takes_as_0_are_those_of_a_run(
    session: Session,
) -> None:
    plan = planned(session, "in_parts")
    assert plan.by_category["parameters"] == 4 * 4 * 8 * (16 + 8) + 2 * 512
    assert not any("packed sequences were" in note for note in plan.notes)
    with pytest.raises(MptError, match=r"a value read at .*older_steps.py:\d+ was taken as 0"):
        planned(session, "masked_by_values")


def test_sequences_of_known_lengths_are_packed_as_torch_packs_them() -> None:
    """They were as long as the longest, and the lengths that come back were 0: labels for the words were refused."""
    source = {"where": str(STEPS), "function": "sentences"}
    kinds = {"LSTM": True, "GRU": False, "RNN": True}
    calls = [(source, {"kind": kind, "batch_first": first}) for kind, first in kinds.items()]
    # of this one oneDNN's workspace was remembered as none, and the backward refused
    for planned, measured in live_bytes(*calls, (source | {"function": "evaluated_first"}, {})):
        assert planned == measured


def test_a_card_holds_the_rows_of_packed_sequences(session: Session) -> None:
    one, two = (planned(session, "sentences", layers=layers) for layers in (1, 2))
    # 4 gates and 2 states of 2 x 32 numbers for 47 words, and not for 4 x 20; last states are 2,048 bytes
    kept = one.by_category["activations"], two.by_category["activations"]
    assert kept[1] - kept[0] == pytest.approx(47 * 6 * 2 * 32 * 4, abs=2048)


def test_a_mask_of_a_placeholder_is_taken_at_its_bound(session: Session) -> None:
    assert any(
        "1 results whose size" in note or "2 results" in note
        for note in planned(session, "placeholder").notes
    )


def test_gradients_of_each_sample_may_be_divided_by_a_length(session: Session) -> None:
    assert planned(session, "of_each_sample").allocated > 8 * 64 * 64 * 4


def test_what_is_asserted_is_no_value_that_is_taken_as_0(session: Session) -> None:
    assert not any("taken as 0" in note for note in planned(session, "asserted").notes)


def test_rows_that_a_filled_mask_leaves_out_are_not_planned(session: Session) -> None:
    """VideoMAE was planned 2.5 times too large: what weighed were the places, and not the rows at them."""
    by_mask, by_number = (planned(session, "masked_rows", by_mask=one) for one in (True, False))
    chosen = 100 * 512 * 4  # a copy of the rows by a mask, a view of them by their number
    assert by_mask.by_category["activations"] <= by_number.by_category["activations"] + chosen


def test_a_script_sees_cuda_as_the_type_of_its_device(session: Session, tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(256, 256).state_dict(), tmp_path / "true.pt")
    plan = planned(session, "by_type", folder=str(tmp_path))
    weights = 4 * (256 * 256 + 256)
    assert plan.by_category["parameters"] == weights
    assert plan.by_category["optimizer state"] == pytest.approx(2 * weights, abs=2048)


def test_arrays_are_on_the_card_if_all_of_a_script_is(session: Session) -> None:
    plan = planned(session, "from_arrays")
    assert plan.by_category["parameters"] == 4 * 16 * 16 + 512
    assert any("puts nothing on" in note for note in plan.notes)


@pytest.mark.parametrize("by_import", [False, True])
def test_a_kernel_that_a_script_compiles_is_refused_by_name_if_it_is_called(
    session: Session, by_import: bool
) -> None:
    """It may be imported after `load`, as where a compiled module was loaded before."""
    plan = planned(session, "compiled", by_import=by_import)
    assert plan.by_category["parameters"] == 4 * (256 * 256 + 256)
    words = r"fused\.bias_act is a kernel that the script compiles.*, at .*older_steps\.py:\d+"
    with pytest.raises(MptError, match=words):
        planned(session, "compiled", is_called=True, by_import=by_import)


def test_a_kernel_that_is_registered_with_torch_is_refused_by_name(session: Session) -> None:
    for _ in range(2):
        with pytest.raises(MptError, match=r"fused_bias\.forward is a kernel that the script"):
            planned(session, "registered")


def test_a_kernel_that_a_script_keeps_is_refused_at_once(session: Session) -> None:
    """It was tried without a compiler over and over."""
    with pytest.raises(MptError, match=r"fused\.bias_act is a kernel"):
        planned(session, "compiled_once")


def test_a_script_that_can_do_without_its_kernel_is_planned_so(session: Session) -> None:
    for _ in range(2):
        plan = planned(session, "compiled_if_possible")
        assert plan.by_category["parameters"] == 4 * (256 * 256 + 256)
        assert any("where there is no compiler" in note for note in plan.notes)


def test_a_kernel_of_a_module_that_a_fork_froze_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = ModuleType("some_library")
    library.__spec__ = ModuleSpec("some_library", None)
    monkeypatch.setitem(sys.modules, library.__name__, library)
    monkeypatch.setitem(sys.modules, "fused", None)
    vars(library)["kernel"] = extension("fused")
    gc.freeze()
    with extensions_forgotten():
        assert vars(library)["kernel"] is None


@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_a_sparse_matrix_of_another_layout_is_refused_with_the_one_to_take(
    session: Session, layout: str
) -> None:
    with pytest.raises(MptError, match=r"in COO is \(`matrix\.to_sparse\(\)`\), at .*older_steps"):
        planned(session, "compressed", layout=layout)


def test_a_compiled_network_has_its_own_name_and_is_planned_as_it_stands(session: Session) -> None:
    plan = planned(session, "compiled_network")
    assert {name for name, _ in plan.by_module if name[0] != "("} <= {"model", "model.0", "model.1"}
    assert any("planned as without it" in note for note in plan.notes)
    assert not any("compile" in note for note in planned(session, "compiled").notes)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_borders_of_pictures_lie_in_order_on_a_card(session: Session, mode: str) -> None:
    assert planned(session, "with_borders", mode=mode).allocated > 0


@pytest.mark.parametrize("folder", ["torch", "numpy", "mpt/planner"])
def test_a_script_may_lie_in_a_folder_of_any_name(
    session: Session, folder: str, tmp_path: Path
) -> None:
    """Scripts of environments in a folder called torch were taken for torch's own: what they assert was 0."""
    copied = tmp_path / folder / STEPS.name
    copied.parent.mkdir(parents=True)
    copied.write_text(STEPS.read_text("utf-8"), "utf-8")
    there, here = (plan_of(session, file, "in_parts", {}) for file in (copied, STEPS))
    assert there.by_category == here.by_category
    assert there.by_module == here.by_module
