"""Losses of one forward: one backward, each logged by its name; and what is said where they are yielded one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpt.cli import main
from mpt.engine.step.shared_graphs import check_graphs
from mpt.engine.step.step import update
from mpt.errors import ConfigError
from mpt.seams import Batch, Loss, Phase, Run
from mpt.tasks.classify import Classify
from tests.engine.parts import batch, classifier
from tests.engine.step.test_step import run_with

TWO = r"loss 'size' shares a forward with 'label', .* return them together, as a tuple"


def two(net: nn.Module, part: Batch, size: str = "mean") -> tuple[Loss, Loss]:
    """Two losses of one forward; the second may be a sum over samples."""
    logits = net(part["image"])
    each = logits.square().mean(1)
    second = Loss("size", each.mean()) if size == "mean" else Loss("size", each.sum() / 8, "sum")
    return Loss("label", functional.cross_entropy(logits, part["label"])), second


def gradients(
    losses: Callable[[nn.Module, Batch], Any], micro_batch: int | None = None
) -> tuple[list[Tensor], Any]:
    run, phase = run_with(losses)
    run.adaptation.micro_batch_size = micro_batch
    kept: list[Tensor] = []
    phase.optimizer.register_step_pre_hook(
        lambda *_: kept.extend(
            p.grad.clone() for p in phase.module.parameters() if p.grad is not None
        )
    )
    part = {
        name: value.double() if value.is_floating_point() else value
        for name, value in batch(size=8).items()
    }
    return kept, update(run, phase, part).losses


def yielded(net: nn.Module, part: Batch) -> Iterator[tuple[Loss, Loss]]:
    yield two(net, part)


def one_by_one(net: nn.Module, part: Batch) -> Iterator[Loss]:
    yield from two(net, part)


def forward_each(net: nn.Module, part: Batch) -> Iterator[Loss]:
    yield two(net, part)[0]
    yield two(net, part)[1]


@pytest.mark.parametrize("micro_batch", [None, 3])
@pytest.mark.parametrize(
    "losses",
    [yielded, two, lambda *a: list(two(*a)), lambda *a: two(*a, "sum")],
    ids=["yield", "tuple", "list", "sum"],
)
def test_losses_given_together_have_one_backward_and_each_its_name(
    losses: Any, micro_batch: int | None
) -> None:
    expected, apart = gradients(forward_each)
    found, named = gradients(losses, micro_batch)
    assert all(
        torch.allclose(one, other, rtol=1e-12) for one, other in zip(expected, found, strict=True)
    )
    assert list(named) == ["label", "size"]
    assert float(named["label"]) == pytest.approx(float(apart["label"]), rel=1e-12)


def test_one_backward_is_done_for_losses_given_together(monkeypatch: pytest.MonkeyPatch) -> None:
    run, phase = run_with(two)
    seen = []
    backward = run.precision.backward

    def watched(value: Tensor, which: Phase) -> None:
        seen.append(value.item())
        backward(value, which)

    monkeypatch.setattr(run.precision, "backward", watched)
    part = {
        name: value.double() if value.is_floating_point() else value
        for name, value in batch(size=8).items()
    }
    losses = update(run, phase, part).losses
    assert seen == [pytest.approx(float(losses["label"] + losses["size"]), rel=1e-12)]


def test_losses_that_share_a_forward_and_come_one_by_one_are_one_line() -> None:
    with pytest.raises(ConfigError, match=TWO):
        gradients(one_by_one)


@pytest.mark.parametrize(
    "memory", [{"recompute": "all"}, {"offload_activations": True}], ids=["recompute", "offload"]
)
def test_they_are_that_line_under_tricks_too(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = sharing(monkeypatch, memory=memory)
    with pytest.raises(ConfigError, match=TWO):
        update(run, run.phases[0], batch(size=8))


def test_a_graph_kept_from_the_update_before_is_another_line() -> None:
    kept: list[Tensor] = []

    def recurrent(net: nn.Module, part: Batch) -> Iterator[Loss]:
        kept.append(net(part["image"]).exp().mean())
        yield Loss("loss", torch.stack(kept).sum())

    run, phase = run_with(recurrent)
    part = {
        name: value.double() if value.is_floating_point() else value
        for name, value in batch(size=8).items()
    }
    update(run, phase, part)
    with pytest.raises(
        ConfigError, match=r"reaches into the graph of an earlier update, .* detach"
    ):
        update(run, phase, part)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "its losses yielded NoneType"),
        (torch.ones(()), "its losses yielded Tensor"),
        ({"loss": torch.ones(())}, "its losses yielded dict"),
        (1.0, "its losses yielded float"),
        (
            Loss("loss", torch.ones((), dtype=torch.complex64, requires_grad=True)),
            "expected a tensor with one number, found one of complex64",
        ),
        ((Loss("loss", torch.ones(())), 3), "its losses yielded int"),
    ],
)
def test_anything_but_losses_is_refused_in_words(made: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        gradients(lambda net, part: made)


def test_an_empty_tuple_trains_nothing() -> None:
    with pytest.raises(ConfigError, match="no parameter received a gradient"):
        gradients(lambda net, part: ())


def sharing(monkeypatch: pytest.MonkeyPatch, **sections: Any) -> Run:
    """Return a classifier's run whose two losses share a forward and are yielded one by one."""
    monkeypatch.setattr(Classify, "losses", lambda self, part: one_by_one(self.net, part))
    return classifier("fp32", **sections)


def test_a_dry_run_finds_it_before_any_data(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_graphs(classifier("fp32")) is None
    run = sharing(monkeypatch)
    before = [p.detach().clone() for p in run.task.trainable["net"].parameters()]
    with pytest.raises(ConfigError, match=TWO):
        check_graphs(run)
    assert all(p.grad is None for p in run.task.trainable["net"].parameters())
    assert all(
        torch.equal(p, q)
        for p, q in zip(before, run.task.trainable["net"].parameters(), strict=True)
    )
    monkeypatch.setattr(Classify, "losses", lambda self, part: two(self.net, part))
    assert check_graphs(classifier("fp32")) is None
    monkeypatch.setattr(Classify, "losses", lambda self, part: forward_each(self.net, part))
    assert check_graphs(classifier("fp32")) is None


@pytest.mark.parametrize("command", ["train --dry-run", "train", "doctor"])
def test_commands_say_it_in_one_line(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Classify, "losses", lambda self, part: one_by_one(self.net, part))
    config = tmp_path / "c.yaml"
    config.write_text(
        "{model: small_cnn, dataset: digits, precision: fp32, train: {steps: 2, batch_size: 8}}"
    )
    monkeypatch.chdir(tmp_path)
    name, *options = command.split()
    with pytest.raises(SystemExit) as ended:
        main([name, str(config), *options])
    assert ended.value.code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    last = said.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "phase net: the loss 'size' shares a forward with 'label'" in last
