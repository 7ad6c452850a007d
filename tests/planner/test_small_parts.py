"""Budgets, GPUs, batch fits, calibrations and pictures: the parts of the planner that need no torch device."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from mpt.config.sizes import describe_bytes, parse_budget
from mpt.errors import ConfigError
from mpt.planner.facts import calibration
from mpt.planner.facts.calibration import (
    Calibration,
    Measurement,
    calibration_path,
    learn,
    load_calibration,
    read_measurement,
    save_calibration,
)
from mpt.planner.facts.capacity import find_capacity
from mpt.planner.facts.gpus import TABLE, find_gpu, installed_gpu
from mpt.planner.trace.batch_fit import fit, largest_batch
from mpt.planner.trace.recorder import Recorder
from mpt.planner.trace.replay import peak_live, replay, split_at, timeline
from mpt.planner.trace.time_model import Work
from mpt.planner.trace.timeline import AXIS, write_timeline
from mpt.planner.trace.trace import Span, Storage, Trace
from mpt.planner.trace.unseen import Unseen

GIB = 2**30
MIB = 2**20


@pytest.mark.parametrize("text", ["6GiB", "6GB", "6144MiB", "6g", " 6 gib ", "6.0 GiB", "6144MB"])
def test_budgets_are_read_as_people_write_them(text: str) -> None:
    assert parse_budget(text) == 6 * GIB


def test_sixteen_mebibytes_are_the_smallest_budget() -> None:
    assert parse_budget("16MiB") == 16 * MIB
    with pytest.raises(ConfigError, match="less than any GPU has"):
        parse_budget("15.9MiB")


@pytest.mark.parametrize("text", ["", "lots", "6 apples", "-6GiB", "6", "1KiB", "nan", "6GiB6"])
def test_a_budget_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="6GiB"):
        parse_budget(text)


def test_a_size_that_is_none_is_answered_with_its_own_option() -> None:
    with pytest.raises(ConfigError, match="--desktop: 'some'"):
        find_capacity(find_gpu("rtx2060"), True, "6GiB", "some")


def test_bytes_are_printed_in_the_unit_that_suits() -> None:
    assert describe_bytes(6 * GIB) == "6,144 MiB"
    assert describe_bytes(24 * GIB) == "24.0 GiB"


@pytest.mark.parametrize(
    "name", ["rtx2060", "RTX 2060", "NVIDIA GeForce RTX 2060", "2060", "rtx-2060"]
)
def test_a_gpu_is_found_by_any_of_its_names(name: str) -> None:
    assert find_gpu(name).name == "rtx2060"


def test_two_digits_that_changed_places_are_the_nearest_gpu() -> None:
    with pytest.raises(ConfigError, match="nearest: rtx2060, "):
        find_gpu("rtx2600")


def test_an_unknown_gpu_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="nearest: rtx2060") as refused:
        find_gpu("rtx2066")
    assert "\n" not in str(refused.value)


def test_names_and_aliases_of_gpus_are_unique() -> None:
    names = [name for gpu in TABLE for name in (gpu.name, *gpu.aliases)]
    assert len(names) == len(set(names))


def test_an_installed_card_keeps_its_true_memory_even_when_unknown() -> None:
    known = installed_gpu("NVIDIA GeForce RTX 3060 Laptop GPU", 6 * GIB, (8, 6))
    assert (known.name, known.memory_gib) == ("rtx3060-laptop", 6)
    assert installed_gpu("NVIDIA Unheard Of", 5 * GIB, (7, 5)).memory_gib == 5


def small_trace(scale: int) -> Trace:
    storages = [
        Storage(4 * MIB, "parameters", "net", "a"),
        Storage(scale * MIB, "activations", "net.layer", "b"),
        Storage(2 * scale * MIB, "temporaries", "", "c"),
    ]
    spans = [Span(0, 0, "", "build"), Span(1, 0, "net", "forward")]
    return Trace(storages, [0, 1, 2, ~2, ~1], spans)


def test_two_traces_give_the_bytes_at_any_batch() -> None:
    line = fit(small_trace(8), 8, small_trace(16), 16)
    assert line is not None
    assert line.sizes(40) == [4 * MIB, 40 * MIB, 80 * MIB]
    assert replay(line.trace, sizes=line.sizes(40)).allocated == 124 * MIB


def test_traces_whose_events_differ_are_not_fitted() -> None:
    other = small_trace(16)
    other.events = [0, 2, 1, ~2, ~1]
    assert fit(small_trace(8), 8, other, 16) is None


def test_bytes_that_grow_faster_than_the_batch_are_not_extrapolated() -> None:
    """All pairs of samples: the line through 64 and 256 MiB has -128 MiB at no sample, and 832 at 40, not 1600."""
    pairs = [Trace([Storage(n * n * MIB, "activations", "net", "a")], [0, ~0], []) for n in (8, 16)]
    assert fit(pairs[0], 8, pairs[1], 16) is None
    constant = Trace([Storage(64 * MIB, "activations", "net", "a")], [0, ~0], [])
    line = fit(constant, 8, constant, 16)
    assert line is not None
    assert line.sizes(40) == [64 * MIB]


@pytest.mark.parametrize("start", [1, 8, 64])
def test_the_largest_batch_that_may_be_proposed_is_the_limit_itself(start: int) -> None:
    assert largest_batch(lambda batch: True, start, limit=64) == 64
    assert largest_batch(lambda batch: True, start, limit=100) == 100
    assert largest_batch(lambda batch: batch <= 99, start, limit=100) == 99


@pytest.mark.parametrize("limit", [0, 1, 7, 64, 1000])
@pytest.mark.parametrize("start", [1, 8, 64])
def test_the_largest_batch_is_found_from_any_start(limit: int, start: int) -> None:
    assert largest_batch(lambda batch: batch <= limit, start) == limit


def test_the_split_at_the_peak_names_categories_modules_and_the_moment() -> None:
    trace = small_trace(8)
    peak = replay(trace)
    split = split_at(trace, peak.peak_event)
    assert split.by_category == {
        "parameters": 4 * MIB,
        "activations": 8 * MIB,
        "temporaries": 16 * MIB,
    }
    assert split.by_module[0] == ("(outside modules)", 16 * MIB)
    assert split.moment == "phase net, forward (step 1)"
    curves = timeline(trace)
    assert max(curves["temporaries"]) == 16 * MIB


def test_no_replay_does_with_less_than_what_is_alive_at_once() -> None:
    trace = small_trace(8)
    assert peak_live(trace) == 28 * MIB <= replay(trace).allocated
    assert peak_live(trace, sizes=[0, 100, MIB]) == MIB + 512
    assert peak_live(trace, categories={"parameters", "activations"}) == 12 * MIB


def test_a_thinned_timeline_keeps_the_peak_of_every_stretch() -> None:
    storages = [
        Storage(size * MIB, category, "net", "a")
        for size in (1, 7, 2)
        for category in ("batch", "gradients")
    ]
    events = [entry for index in range(len(storages)) for entry in (index, ~index)]
    curves = timeline(Trace(storages, events, [Span(0, 0, "", "build")]), points=3)
    assert curves == {"batch": [MIB, 7 * MIB, 2 * MIB]}


def test_a_trace_beyond_the_limit_does_not_fit() -> None:
    assert replay(small_trace(8), 64 * MIB).fits
    assert not replay(small_trace(8), 30 * MIB).fits


def test_a_calibration_explains_the_surplus_by_scratch_and_comes_back_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = Measurement("NVIDIA GeForce RTX 2060", 1200, 1400, 0.3, 300)
    learnt = learn(
        measured, planned=1000, planned_with_scratch=1400, planned_seconds=0.2, source="runs/a"
    )
    assert learnt == Calibration(300, 0.5, 1.5, "runs/a")
    save_calibration("RTX 2060", learnt)
    assert load_calibration("rtx2060") == learnt
    assert load_calibration("rtx3060") == Calibration()  # nothing is moved unasked
    assert load_calibration("rtx3060", "rtx2060") == Calibration(
        time_factor=1.5, time_from="rtx2060"
    )
    save_calibration("RTX 2070", replace(learnt, cuda="12.6"))
    for installed, context in (("12", 300), ("", 300), ("13", Calibration().context_bytes)):
        monkeypatch.setattr(calibration, "installed_cuda", lambda installed=installed: installed)
        # that of another CUDA says nothing
        assert load_calibration("rtx2070").context_bytes == context
        assert load_calibration("rtx2070").cudnn_share == 0.5
    with pytest.raises(ConfigError, match="rtx4090 has no calibration; calibrated are rtx2060"):
        load_calibration("rtx3060", "rtx4090")
    calibration_path("rtx2060").write_text('{"time_factor": -1}')
    with pytest.raises(ConfigError, match="time_factor"):
        load_calibration("rtx2060")


@pytest.mark.parametrize(("seconds", "factor"), [(0.5, 5), (5, 1), (0.001, 1)])
def test_a_step_far_from_the_roofline_teaches_no_time(seconds: float, factor: float) -> None:
    measured = Measurement("NVIDIA GeForce RTX 2060", 1200, 1400, seconds, 300)
    assert learn(measured, 1000, 1400, 0.1, "runs/a").time_factor == factor


@pytest.mark.parametrize(("busy", "factor"), [(None, 5), (0.9, 5), (0.37, 1)])
def test_a_card_that_waited_for_data_teaches_no_time(busy: float | None, factor: float) -> None:
    """A ResNet-50 on an H200 that was busy for 37 % of the time had taught "18 times as long as planned"."""
    measured = Measurement("NVIDIA H200", 1200, 1400, 0.5, 300, busy=busy)
    assert learn(measured, 1000, 1400, 0.1, "runs/a").time_factor == factor


def test_scratch_is_that_of_dense_convolutions_larger_than_1x1() -> None:
    unseen, x = Unseen((7, 5), cudnn_share=0.5), torch.zeros(2, 8, 4, 4)
    for groups, kernel, inside in ((1, 3, 2), (1, 1, 0), (8, 3, 0)):
        weight = torch.zeros(8, 8 // groups, kernel, kernel)
        rest = ([1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
        assert (
            unseen.scratch("aten::convolution", (x, weight, None, *rest), x)
            == inside * x.nbytes / 2
        )
        backward = (x, x, weight, [8], *rest, [True] * 3)
        assert (
            unseen.scratch("aten::convolution_backward", backward, (x, weight, x))
            == inside * x.nbytes / 2
        )


def test_a_run_without_a_gpu_teaches_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="calibrate with a finished run that trained on CUDA"):
        read_measurement(tmp_path)
    (tmp_path / "env.json").write_text(json.dumps({"devices": []}))
    (tmp_path / "summary.json").write_text(json.dumps({"peak_memory": {"kind": "tracked"}}))
    with pytest.raises(ConfigError, match="no measured peak"):
        read_measurement(tmp_path)


def test_a_run_on_a_gpu_is_read_from_its_records(tmp_path: Path) -> None:
    (tmp_path / "env.json").write_text(json.dumps({"devices": [{"name": "NVIDIA T4"}]}))
    peak = {"kind": "cuda", "peak_bytes": 5, "reserved_bytes": 7}
    written = {"peak_memory": peak, "median_step_seconds": 0.5}
    for use, busy in (({}, None), ({"not_measured": "no library"}, None), ({"mean": 0.5}, 0.5)):
        summary = {**written, "device_utilization": use}
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        assert read_measurement(tmp_path) == Measurement("NVIDIA T4", 5, 7, 0.5, None, busy=busy)


def test_a_run_s_steps_teach_and_not_its_evaluation(tmp_path: Path) -> None:
    (tmp_path / "env.json").write_text(
        json.dumps({"devices": [{"name": "NVIDIA T4"}, {"name": "NVIDIA L4"}]})
    )
    peak = {
        "kind": "cuda",
        "peak_bytes": 50,
        "reserved_bytes": 70,
        "steps_peak_bytes": 5,
        "steps_reserved_bytes": 7,
    }
    peak |= {"device": "NVIDIA L4", "outside_bytes": 3}
    (tmp_path / "summary.json").write_text(
        json.dumps({"peak_memory": peak, "median_step_seconds": 0.5})
    )
    assert read_measurement(tmp_path) == Measurement("NVIDIA L4", 5, 7, 0.5, 3)


def test_a_card_that_is_not_in_the_table_is_described_by_the_run(tmp_path: Path) -> None:
    device = {"name": "NVIDIA B300", "capability": "10.3", "memory_bytes": 288 * 2**30}
    (tmp_path / "env.json").write_text(json.dumps({"devices": [device]}))
    peak = {"kind": "cuda", "peak_bytes": 5, "reserved_bytes": 7}
    (tmp_path / "summary.json").write_text(
        json.dumps({"peak_memory": peak, "median_step_seconds": 0.5})
    )
    gpu = read_measurement(tmp_path).gpu
    assert (gpu.name, gpu.memory_gib, gpu.capability) == ("b300", 288, (10, 3))
    with pytest.raises(ConfigError, match="no 'NVIDIA B300' in the table"):
        _ = Measurement("NVIDIA B300", 5, 7, 0.5).gpu


def test_another_process_on_the_card_is_not_taken_for_its_context() -> None:
    measured = Measurement("NVIDIA L4", 1000, 1000, 0.1, 3 * 2**30)
    assert learn(measured, 1000, 1100, 0.1, "runs/a").context_bytes == Calibration().context_bytes


def test_the_picture_is_written_with_its_title_and_what_its_line_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    save = Figure.savefig

    def watched(figure: Figure, *arguments: Any, **options: Any) -> None:
        texts.extend(str(one.get_text()) for one in figure.findobj(Text))
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", watched)
    curves = timeline(small_trace(8))
    path = tmp_path / "plan.png"
    write_timeline(path, [("as it stands", curves), ("recompute", curves)], GIB, "dcgan, batch 8")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert {
        "dcgan, batch 8",
        "as it stands",
        "recompute",
        "budget less the context: 1.00 GiB",
        "GiB",
        AXIS,
    } <= set(texts)
    texts.clear()
    write_timeline(path, [("as it stands", curves)], 190 * 2**20)
    assert {"budget less the context: 190 MiB", "MiB"} <= set(texts)  # as the title's figures


def test_products_in_tf32_are_as_fast_as_the_card_says() -> None:
    """GeForce cards compute in TF32 at float32's rate, so that both modes are planned alike there; an A100 does not."""
    products = {is_tf32: Work(products_in_tf32=is_tf32) for is_tf32 in (False, True)}
    for work in products.values():
        work.add(10**12, 10**6, "float32")
    ratios = [
        products[False].seconds(gpu) / products[True].seconds(gpu)
        for gpu in map(find_gpu, ("rtx3060", "a100"))
    ]
    assert ratios == pytest.approx([1, 156 / 19.5])


def test_a_result_that_its_kernel_shrank_keeps_the_storage_that_it_was_made_in() -> None:
    columns, fold = (
        torch.zeros(2, 27, 16),
        partial(functional.fold, output_size=(4, 4), kernel_size=3, padding=1),
    )
    storage = fold(columns).untyped_storage().nbytes()
    assert storage == columns.nbytes
    with FakeTensorMode() as fake:
        given = fake.from_tensor(columns)
        with Recorder("cpu").recording() as trace:
            fold(given)
    assert [one.size for one in trace.storages if one.operator == "aten::col2im"] == [storage]


@pytest.mark.parametrize(
    ("loss", "values_too"),
    [
        (functional.mse_loss, True),
        (functional.smooth_l1_loss, True),
        (functional.binary_cross_entropy, False),
        (functional.soft_margin_loss, False),
        (functional.huber_loss, False),
    ],
)
def test_a_loss_keeps_the_storage_of_all_elements_that_it_was_made_in(
    loss: Any, values_too: bool
) -> None:
    found, wanted = torch.rand(4, 100), torch.rand(4, 100)
    storage = loss(found, wanted).untyped_storage().nbytes()
    assert storage == (4 if loss is functional.huber_loss else 4 * 400)
    unseen = Unseen((8, 0))
    with FakeTensorMode() as fake:
        pair = fake.from_tensor(found), fake.from_tensor(wanted)
        with Recorder("cpu", unseen).recording() as trace:
            kept = loss(*pair)
    assert [trace.storages[index].size for index in trace.live_at(len(trace.events))] == [storage]
    assert kept.dim() == 0
    scratch = [one.size for one in trace.storages if one.category == "workspace"]
    assert scratch == ([storage] if values_too else [])
