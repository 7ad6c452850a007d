"""One update: what is drawn and prepared before the split, and losses normalised by more than a sample count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from mpt.engine.building.build import build_run
from mpt.engine.step.step import refuse_uneven, update
from mpt.errors import ConfigError
from mpt.seams import Batch, Loss, Phase, Run
from tests.engine.parts import DIGITS, batch, classifier

pytestmark = pytest.mark.tier("fast")


def run_with(losses: Any, **changes: Any) -> tuple[Run, Phase]:
    """Return a classifier's run in float64 whose one phase has these losses of (network, batch)."""
    run = classifier("fp32")
    net = run.task.trainable["net"].double().eval()
    phase = replace(
        run.phases[0], losses=lambda part: losses(net, part), **{"least_weight": 1.0, **changes}
    )
    return replace(run, phases=[phase]), phase


def gradients(
    run: Run, phase: Phase, micro_batch: int | None
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    run.adaptation.micro_batch_size = micro_batch
    kept: list[torch.Tensor] = []
    handle = phase.optimizer.register_step_pre_hook(
        lambda *_: kept.extend(
            p.grad.clone() for p in phase.module.parameters() if p.grad is not None
        )
    )
    weights = [p.detach().clone() for p in phase.module.parameters()]
    done = update(run, phase, weighted_batch())
    handle.remove()
    with torch.no_grad():
        for parameter, value in zip(phase.module.parameters(), weights, strict=True):
            parameter.copy_(value)
    return kept, done.losses


def weighted_batch() -> Batch:
    """Return samples with a weight each, of which the first part of a split has none."""
    drawn = {
        name: value.double() if value.is_floating_point() else value
        for name, value in batch(size=8).items()
    }
    return {**drawn, "score": torch.tensor([0.0, 0.0, 0.0, 2.0, 5.0, 0.25, 1.0, 3.0]).double()}


def by_score(net: nn.Module, part: Batch) -> Iterator[Loss]:
    each = nn.functional.cross_entropy(net(part["image"]), part["label"], reduction="none")
    total = part["score"].sum()
    yield Loss("score", (each * part["score"]).sum(), "sum", weight=total)
    yield Loss(
        "size", (net(part["image"]).square().sum(1) * part["score"]).sum(), "sum", weight=total
    )


@pytest.mark.parametrize("micro_batch", [1, 3, 4])
def test_micro_batches_of_a_normalised_phase_give_the_whole_batchs_gradient(
    micro_batch: int,
) -> None:
    run, phase = run_with(by_score, normalised=True)
    whole, whole_losses = gradients(run, phase, None)
    parts, part_losses = gradients(run, phase, micro_batch)
    for one, other in zip(whole, parts, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)
    for name in ("score", "size"):
        assert torch.allclose(whole_losses[name], part_losses[name], rtol=1e-6)


def test_a_total_weight_below_the_least_counts_as_the_least() -> None:
    def light(net: nn.Module, part: Batch) -> Iterator[Loss]:
        yield Loss("loss", net(part["image"]).sum(), "sum", weight=0.125 * len(part["image"]) / 8)

    run, phase = run_with(light, normalised=True)
    plain, plain_phase = run_with(
        lambda net, part: iter([Loss("loss", net(part["image"]).sum(), "sum")])
    )
    expected, _ = gradients(plain, plain_phase, None)
    for micro_batch in (None, 3):
        found, _ = gradients(run, phase, micro_batch)
        assert all(torch.allclose(one, other) for one, other in zip(expected, found, strict=True))
    phase = replace(phase, least_weight=0.0)
    found, _ = gradients(run, phase, None)
    assert all(torch.allclose(8 * one, other) for one, other in zip(expected, found, strict=True))


def test_a_normaliser_of_the_whole_batch_is_prepared_once_before_the_split() -> None:
    calls: list[int] = []

    def prepare(drawn: Batch) -> Batch:
        calls.append(len(drawn["score"]))
        return {**drawn, "share": drawn["score"] / drawn["score"].sum()}

    def shared(net: nn.Module, part: Batch) -> Iterator[Loss]:
        each = nn.functional.cross_entropy(net(part["image"]), part["label"], reduction="none")
        yield Loss("loss", (each * part["share"]).sum(), "sum")

    run, phase = run_with(shared, prepare=prepare)
    whole, _ = gradients(run, phase, None)
    parts, _ = gradients(run, phase, 3)
    assert calls == [8, 8]
    assert all(
        torch.allclose(one, other, rtol=1e-10) for one, other in zip(whole, parts, strict=True)
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", [0, 1])
def test_one_bad_loss_of_several_keeps_the_optimizer_from_stepping(bad: float, which: int) -> None:
    def two(net: nn.Module, part: Batch) -> Iterator[Loss]:
        for number in range(2):
            yield Loss(
                f"loss{number}", net(part["image"]).sum() * (bad if number == which else 1.0)
            )

    run, phase = run_with(two)
    before = [parameter.detach().clone() for parameter in phase.module.parameters()]
    done = update(run, phase, weighted_batch())
    assert not done.finite
    assert done.stats.skipped
    assert done.batch is not None
    assert all(map(torch.equal, phase.module.parameters(), before))
    assert all(parameter.grad is None for parameter in phase.module.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="only a CUDA device has a queue to be waited for"
)
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_an_update_on_a_gpu_waits_for_no_operator_and_still_refuses_nan(mode: str) -> None:
    if mode == "bf16" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this card does not compute in bfloat16")
    run = build_run(classifier(mode).config, torch.device("cuda"), DIGITS)
    (phase,) = run.phases
    drawn = {name: value.cuda() for name, value in batch().items()}
    update(run, phase, drawn)  # the first makes what the later ones use
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert update(run, phase, drawn).finite
    finally:
        torch.cuda.set_sync_debug_mode("default")
    before = [parameter.detach().clone() for parameter in phase.module.parameters()]
    drawn["image"] = drawn["image"] * float("nan")
    assert not update(run, phase, drawn).finite
    assert all(map(torch.equal, phase.module.parameters(), before))


def test_sharded_ranks_that_would_have_unequally_many_micro_batches_are_refused() -> None:
    """Each gathers weights with the others: one that has a micro-batch more would wait for ever."""
    _, phase = run_with(lambda net, part: iter(()))
    refuse_uneven(phase, 12, 4, None)
    refuse_uneven(phase, 7, 2, 4)
    for count, size, micro_batch in ((3, 4, None), (9, 2, 4)):
        with pytest.raises(ConfigError, match=f"has {count} samples for {size} processes"):
            refuse_uneven(phase, count, size, micro_batch)


OVERFLOWS = {"mode": "amp", "dtype": "float16", "init_scale": 2.0**40, "max_scale": 2.0**41}


@pytest.mark.parametrize("precision", ["fp32", OVERFLOWS], ids=["a NaN", "an overflow"])
def test_an_update_that_is_skipped_leaves_batchnorms_statistics_as_they_were(
    precision: Any,
) -> None:
    run = classifier(precision)
    part, module = batch(), run.phases[0].module
    if precision == "fp32":
        part["image"][0] = float("nan")
    before = [buffer.clone() for buffer in module.buffers()]
    assert update(run, run.phases[0], part).stats.skipped
    assert all(map(torch.equal, module.buffers(), before))
