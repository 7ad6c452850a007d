"""The doctor finds what was planted, names it, cures it with no more than is needed, and leaves the healthy alone."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from mpt.config.load import load_config
from mpt.doctor.findings import Section
from mpt.doctor.measuring import measured_step
from mpt.doctor.measuring.half_arithmetic import RoundedHalf
from mpt.doctor.measuring.instrument import observed, sample_of
from mpt.doctor.numerics.cure import find_cure
from mpt.doctor.numerics.numerics import Verdict, examine
from mpt.doctor.numerics.numerics_section import describe_numerics, note_little_headroom
from mpt.doctor.numerics.subject import with_float32
from mpt.engine.building import build
from mpt.engine.recovery.smallest_list import fewest
from mpt.errors import ConfigError
from mpt.seams import NOTHING
from mpt.tasks import classify
from scripts.doctor.doctor_table import DIGITS, diagnose, planted, subject_of
from scripts.doctor.planted_faults import RIGHT_ON_CUDA

FEW = {
    "plant_cross_entropy_by_hand": "log: `logaddexp(logsigmoid(x), log(1e-08))` for `log(sigmoid(x) + 1e-08)`; ",
    "plant_variance_by_difference": "variance: `mean((x - mean(x))**2)` for `mean(x**2) - mean(x)**2` (precision.",
    "plant_attention_scores": "divide_first: `(a * 0.000833333) @ (b * 0.000833333)` for `(a @ b) * 6.94444e-07`",
    "plant_coordinates": "keep net.planted in float32 (the smallest list that helps)",
}


@pytest.mark.parametrize("name", FEW)
def test_a_planted_fault_is_found_named_and_cured_by_its_own_block(name: str) -> None:
    row = diagnose(name, planted(name))
    assert row.found
    assert row.place.startswith("net.planted: ")
    assert row.cure.startswith(FEW[name])
    assert row.is_cured


def test_the_inputs_and_samples_of_a_fault_are_named_and_every_operator_has_its_error() -> None:
    subject = dataclasses.replace(
        subject_of(planted("plant_mean_of_squares")), indices=range(100, 132)
    )
    section = describe_numerics(subject)
    (fault,) = [one for one in section.findings if one.level == "fault"]
    said = re.search(
        r"mul in float16 \(planted_faults.py:\d+\); its inputs go from -\d+ to \d+ and \S+ to \S+; "
        r"samples (\d+), .* and \d+ more of the batch of 32 \(of the data set: (\d+), ",
        fault.advice,
    )
    assert said is not None, fault.advice
    assert int(said[2]) == int(said[1]) + 100
    rows = {(row["module"], row["operator"]): row for row in section.tables["operators"]}
    assert 0 < rows["net.trunk.1", "addmm"]["relative_error"] < 0.01
    assert rows["net.planted", "mean"]["relative_error"] is None  # not finite
    assert rows["net.trunk.2", "tanh"]["largest"] <= 1
    assert ("net.trunk.1", "backward of mm") in rows


def test_forms_that_the_configuration_refuses_are_not_offered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(forms: Any) -> Any:
        raise ConfigError("memory.compile: leave one of the two out")

    monkeypatch.setattr(
        build, "make_stable_forms", lambda forms: refuse(forms) if forms else NOTHING
    )
    subject = subject_of(planted("plant_log_of_tiny"))
    cure = find_cure(subject, examine(subject))
    assert cure is not None
    assert cure.patch == {"precision": {"keep_fp32": ["net.planted"]}}


def test_of_a_list_that_cures_no_module_can_be_left_out() -> None:
    subject = subject_of(planted("plant_explosion"))
    cure = find_cure(subject, examine(subject))
    assert cure is not None
    assert cure.kept is not None
    assert cure.kept.is_minimal
    assert len(cure.kept.modules) > 1
    verdict = Verdict(subject)
    assert verdict.is_healthy(with_float32(subject.config, cure.kept.modules))
    for left_out in cure.kept.modules:
        rest = [name for name in cure.kept.modules if name != left_out]
        assert not verdict.is_healthy(with_float32(subject.config, rest)), left_out


@pytest.mark.parametrize("model", ["small_cnn", "dcgan", "vae"])
def test_a_healthy_model_raises_no_alarm(model: str) -> None:
    size = {"image_size": 16} if model != "vae" else {}
    found = examine(subject_of(load_config({"model": {"name": model, **size}, **DIGITS})))
    assert [one.faults for one in found] == [[]] * len(found)
    assert all(one.scale for one in found)


def test_an_examination_leaves_weights_buffers_and_gradients_as_they_were() -> None:
    subject = subject_of(load_config({"model": {"name": "small_cnn", "image_size": 16}, **DIGITS}))
    verdict = Verdict(subject)
    before = {
        name: value.clone()
        for name, value in verdict.reference.task.modules["net"].state_dict().items()
    }
    assert verdict.is_healthy(subject.config)
    after = verdict.reference.task.modules["net"].state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(
        parameter.grad is None for parameter in verdict.reference.task.modules["net"].parameters()
    )


def test_a_step_whose_scale_is_right_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, with moved weights and in the mode: watching takes several times as long as a step."""
    taken: list[bool] = []
    original = measured_step.repeat_backward

    def repeat_backward(*args: Any, **kwargs: Any) -> measured_step.Step:
        taken.append(kwargs.get("watched", False))
        return original(*args, **kwargs)

    monkeypatch.setattr(measured_step, "repeat_backward", repeat_backward)
    config = load_config({"model": {"name": "small_cnn", "image_size": 16}, **DIGITS})
    (found,) = examine(subject_of(config))
    assert found.scale == 65536.0
    assert taken == [True, False, True]


def test_updates_that_rounding_takes_away_are_said_and_those_that_arrive_on_average_are_not() -> (
    None
):
    said = {}
    for mode in ("bf16-pure", "bf16-sr"):
        data = {"model": {"name": "small_cnn", "image_size": 16}, **DIGITS, "precision": mode}
        section = describe_numerics(
            subject_of(load_config({**data, "optimizer": {"name": "adam", "lr": 1e-5}}))
        )
        assert section.worst != "fault"
        said[mode] = [one.text for one in section.findings if one.level == "warning"]
        rows = section.tables["parameters"]
        assert all(row["cosine"] > 0.9 for row in rows if row["share_of_gradient"] > 0.1)
    assert "as the update is rounded away" in said["bf16-pure"][0]
    assert said["bf16-sr"] == []


def test_an_epsilon_that_float16_does_not_hold_is_told_with_its_cure() -> None:
    data = {
        "model": {"name": "small_cnn", "image_size": 16},
        **DIGITS,
        "precision": {"mode": "O3", "dtype": "float16"},
    }
    section = describe_numerics(
        subject_of(load_config({**data, "optimizer": {"name": "adam", "lr": 1e-4}}))
    )
    assert section.worst == "fault"
    assert "1e-08 is zero in float16" in section.findings[0].text
    assert "set optimizer.eps=1e-4" in section.findings[0].text


def test_a_loss_scale_that_cannot_move_is_cured_before_any_module_is_kept_in_float32() -> None:
    data = {"model": {"name": "small_cnn", "image_size": 16}, **DIGITS}
    precision = {"mode": "amp", "dtype": "float16", "loss_scale": 2.0**24}
    section = describe_numerics(subject_of(load_config({**data, "precision": precision})))
    assert section.tables["cure"][0]["patch"] == {"precision": {"loss_scale": "dynamic"}}


def test_a_fault_of_float32_itself_is_not_blamed_on_half() -> None:
    config = load_config({"model": {"name": "small_cnn", "image_size": 16}, **DIGITS})
    subject = subject_of(config)
    subject.batch["image"][0, 0, 0, 0] = float("nan")
    (found,) = examine(subject)
    assert "not finite in float32 either" in found.faults[0]


def test_a_gradient_that_is_not_finite_in_float32_is_not_blamed_on_half() -> None:
    """A root's slope at zero: the loss is finite in any precision, and no gradient is."""
    section = describe_numerics(subject_of(planted("root_of_zero")))
    (fault, cure) = (one for one in section.findings if one.level in ("fault", "warning"))
    assert (
        "(and 3 more) is not finite in float32 either: no precision mode mends that" in fault.text
    )
    assert "planted_faults.py:" in fault.advice
    assert cure.advice == "mend the model or the loss"


def test_a_poor_form_that_fails_in_float32_too_is_named_and_cured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def by_hand(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        probabilities = torch.softmax(5000 * logits.float(), dim=1)
        return -torch.log(probabilities)[torch.arange(len(labels)), labels].mean()

    monkeypatch.setattr(classify, "find_loss", lambda *_: by_hand)
    data = {"model": {"name": "small_cnn", "image_size": 16}, **DIGITS}
    section = describe_numerics(
        subject_of(load_config({**data, "precision": "O3", "optimizer": {"eps": 1e-4}}))
    )
    said = {one.about: one.text for one in section.findings}
    assert "not finite in float32 either" in said["reference"]
    assert "write log_softmax(x) instead of log(softmax(x))" in said["stable form"]
    assert section.tables["cure"][0]["patch"] == {"precision": {"stable_forms": ["log"]}}


def test_delta_debugging_finds_the_fewest() -> None:
    for needed in ({"c"}, {"a", "h"}, {"b", "d", "g"}, set("abcdefgh")):
        found, is_minimal = fewest(
            list("abcdefgh"), lambda names, needed=needed: needed <= set(names), lambda: True
        )
        assert set(found) == needed
        assert is_minimal


def test_products_in_float16_are_summed_in_float32_and_rounded() -> None:
    numbers = torch.Generator().manual_seed(0)
    left, right = (torch.randn(64, 64, generator=numbers).half() for _ in range(2))
    with RoundedHalf():
        product = left @ right
    assert product.dtype == torch.float16
    assert torch.equal(product, (left.float() @ right.float()).half())


def test_zeros_without_memory_are_not_read() -> None:
    """StyleGAN2's gradient penalties make them in backward."""
    with observed({"net": torch.nn.Identity()}) as seen:
        result = torch.ones(4, 64) + torch._efficientzerotensor((4, 64))
        result * 2
    assert torch.equal(result, torch.ones(4, 64))
    assert [one.operator for one in seen.results] == ["mul"]


def test_operators_belong_to_the_module_that_ran_them_backward_too() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    with observed({"net": net}) as seen:
        net(torch.ones(2, 4)).sum().backward()
    places = {(one.module, one.operator, one.is_backward) for one in seen.results}
    assert ("net.0", "addmm", False) in places
    assert ("net.1", "tanh_backward", True) in places
    assert ("net.0", "mm", True) in places
    assert any(one.line.startswith("test_numerics.py:") for one in seen.results)
    assert len(sample_of(torch.ones(10_000))) == 2048


@pytest.mark.parametrize(
    ("name", "raised", "place"),
    [
        (
            "masked_beyond_half",
            "RuntimeError: value cannot be converted",
            r"planted_faults.py:\d+ in masked_beyond_half",
        ),
        (
            "scattered_into_float32",
            "RuntimeError: Index put requires",
            r"planted_faults.py:\d+ in scattered_into_float32",
        ),
        (
            "cholesky_of_half",
            'NotImplementedError: "cholesky_cpu"',
            r"planted_faults.py:\d+ in cholesky_of_half",
        ),
    ],
)
def test_what_raises_in_half_alone_is_a_finding_with_its_line_and_a_cure(
    name: str, raised: str, place: str
) -> None:
    section = describe_numerics(subject_of(planted(f"plant_{name}")))
    (fault,) = [one for one in section.findings if one.level == "fault"]
    assert fault.text.startswith(f"fine in float32, and in float16 it raises {raised}")
    assert re.fullmatch(f"{place}, module net.planted", fault.advice)
    assert section.tables["cure"][0]["patch"] == {"precision": {"keep_fp32": ["net.planted"]}}


@pytest.mark.parametrize("name", RIGHT_ON_CUDA)
def test_what_autocast_computes_in_float32_on_a_card_is_no_fault_on_a_cpu(name: str) -> None:
    section = describe_numerics(subject_of(planted(name)))
    assert section.worst != "fault"
    assert any(
        "computed in float32, as CUDA's autocast does" in one.text for one in section.findings
    )


@pytest.mark.parametrize("name", [*RIGHT_ON_CUDA[:2], "plant_log_of_tiny"])
def test_recomputed_blocks_follow_cuda_in_backward_too_and_their_operators_keep_their_lines(
    name: str,
) -> None:
    plain, recomputed = (
        examine(subject_of(planted(name, *more)))[0]
        for more in ([], ["memory.recompute={modules: [net.planted]}"])
    )
    assert recomputed.faults == plain.faults
    assert str(recomputed.losses) == str(plain.losses)
    assert recomputed.by_cuda_lists == plain.by_cuda_lists
    assert str(recomputed.parameters) == str(plain.parameters)
    assert [one.describe() for one in recomputed.culprits] == [
        one.describe() for one in plain.culprits
    ]


def test_a_step_that_raises_in_float32_too_is_the_model_s_own_error() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        describe_numerics(subject_of(planted("raises_always")))


def test_lost_weight_decay_is_a_warning() -> None:
    model = {"name": "small_cnn", "image_size": 16, "features": 4}
    optimizer = {"name": "adamw", "weight_decay": 0.1, "lr": 1e-3}
    config = load_config(
        {**DIGITS, "model": model, "optimizer": optimizer, "precision": "bf16-pure"}
    )
    warnings = [
        one.text for one in describe_numerics(subject_of(config)).findings if one.level == "warning"
    ]
    assert any("weight_decay 0.1 at optimizer.lr 0.001 is lost" in text for text in warnings)


def places_of(name: str) -> list[str]:
    (found,) = examine(subject_of(planted(name)))
    return [one.describe() for one in found.culprits]


def test_the_line_that_loses_a_number_is_blamed_and_not_the_layer_that_overflows_behind_it() -> (
    None
):
    (place,) = places_of("plant_lost_before_the_head")
    assert re.fullmatch(r"net\.planted: (add|sub) in float16 \(planted_faults.py:\d+\)", place)


def test_a_backward_operator_has_the_line_of_its_forward_call() -> None:
    value = torch.ones(3, requires_grad=True)
    with observed({}) as seen:
        total = value.sqrt().sum()
        total.backward()
    lines = {one.operator: one.line for one in seen.results if not one.is_backward}
    backward = {one.operator: one.line for one in seen.results if one.is_backward}
    assert lines["sqrt"].startswith("test_numerics.py:")
    assert backward["div"] == lines["sqrt"]


def test_a_fault_that_another_hides_is_named_too() -> None:
    section = describe_numerics(subject_of(planted("plant_twice")))
    said = [f"{one.text} {one.advice}" for one in section.findings if one.level == "fault"]
    assert any(
        "first wrong operator: net.planted.first: sigmoid in float16 (planted_faults.py:61)" in one
        for one in said
    )
    assert any("wrong independently of that: net.planted.second: " in one for one in said)
    assert len(said) == 2


def test_what_the_model_computes_in_float32_is_not_said_to_be_beyond_float16() -> None:
    section = describe_numerics(subject_of(planted("plant_large_in_float32")))
    assert section.worst != "fault"
    beyond = [
        row["forward_headroom_bits"]
        for row in section.tables["ranges"]
        if row["module"] == "net.planted"
    ]
    assert beyond[0] < 0
    assert not [one.text for one in section.findings if "float16's largest number" in one.text]


def test_many_modules_without_headroom_are_one_line_and_the_nearest_by_name() -> None:
    section = Section("numerics")
    note_little_headroom(section, "phase net", {"a": 2.0, "b": -5.0, "c": 1.0, "d": -1.0, "e": 2.5})
    texts = [one.text for one in section.findings]
    assert [text.split()[0] for text in texts] == ["b", "d", "c"]
    assert "5.0 bits beyond" in texts[0]
    assert texts[2].endswith("float16's largest number, and 2 more modules are near it or beyond")
    assert "more modules" not in texts[0] + texts[1]
