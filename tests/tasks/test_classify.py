"""Class weights and mixed samples of a classifier: as torch and torchvision have them, exact in micro-batches."""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.engine.step.step import update
from mpt.errors import ConfigError
from mpt.seams import IGNORED, Batch, Run
from mpt.seams.samples import DataSpec
from mpt.tasks.classify import Settings, class_weights
from mpt.tasks.shared import mixing
from mpt.vision_ops import import_torchvision
from tests.engine import parts

CLASSIFIER = {
    "model": {"name": "small_cnn", "features": 4},
    "dataset": "digits",
    "precision": "fp32",
}
UNCOUNTED = dataclasses.replace(parts.DIGITS, extra={})
WEIGHTS = {"0": 4.0, "7": 0.5}


def one_update(batch: Batch, **sections: Any) -> tuple[float, Tensor, Run]:
    """Return the loss and the gradient of an update, which the optimizer has not changed."""
    config = load_config({**CLASSIFIER, "optimizer": {"name": "sgd", "lr": 1e-30}, **sections})
    run = build_run(config, torch.device("cpu"), UNCOUNTED)
    run.task.trainable["net"].eval()  # BatchNorm would see micro-batches
    random.seed(5)
    done = update(run, run.phases[0], batch)
    gradient = torch.cat(
        [
            weight.grad.flatten()
            for weight in run.task.trainable["net"].parameters()
            if weight.grad is not None
        ]
    )
    return float(done.losses["loss"]), gradient, run


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weighted_classes_have_torch_s_loss_in_one_part_and_in_micro_batches(
    smoothing: float,
) -> None:
    batch = parts.batch()
    task = {"class_weights": WEIGHTS, "label_smoothing": smoothing}
    loss, gradient, run = one_update(batch, task=task)
    weight = torch.tensor([WEIGHTS.get(str(number), 1.0) for number in range(10)])
    net: Any = run.task.trainable["net"]
    with torch.no_grad():
        logits = net((batch["image"] - 0.5) / 0.5)
        expected = functional.cross_entropy(
            logits, batch["label"], weight, label_smoothing=smoothing
        )
    assert loss == pytest.approx(float(expected), rel=1e-6)
    parted_loss, parted, _ = one_update(batch, task=task, memory={"micro_batch": 3})
    assert parted_loss == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(parted, gradient, rtol=1e-5, atol=1e-7)


def test_balanced_weights_are_the_inverse_of_a_class_s_share() -> None:
    data = DataSpec({}, 40, ("a", "b", "c"), {"class_counts": [10, 30, 0]})
    assert class_weights(Settings(class_weights="balanced"), data) == pytest.approx(
        [2.0, 2 / 3, 1.0]
    )
    assert class_weights(Settings(class_weights={"b": 0.0}), data) == [1.0, 0.0, 1.0]
    assert class_weights(Settings(), data) is None


@pytest.mark.parametrize("loss", ["cross_entropy", "focal"])
def test_mixed_samples_are_exact_in_micro_batches(loss: str) -> None:
    task = {"mixup": 0.4, "cutmix": 1.0, "loss": loss}
    whole_loss, whole, _ = one_update(parts.batch(), task=task)
    parted_loss, parted, _ = one_update(parts.batch(), task=task, memory={"micro_batch": 3})
    assert parted_loss == pytest.approx(whole_loss, rel=1e-6)
    torch.testing.assert_close(parted, whole, rtol=1e-5, atol=1e-7)
    assert whole_loss != one_update(parts.batch(), task={"loss": loss})[0]


@pytest.mark.parametrize("memory", [{"micro_batch": 1}, {"micro_batch": 3}], ids=["1", "3"])
@pytest.mark.parametrize("loss", ["cross_entropy", "focal"])
@pytest.mark.parametrize("mixed", [{}, {"mixup": 0.4}], ids=["as they are", "mixed"])
def test_samples_that_are_left_out_count_in_no_part_of_a_batch(
    loss: str, mixed: Any, memory: Any
) -> None:
    batch = parts.batch()
    batch["label"][[0, 1, 2, 5]] = IGNORED  # the first part of three has no label at all
    task = {"loss": loss, **mixed}
    whole_loss, whole, _ = one_update(batch, task=task)
    parted_loss, parted, _ = one_update(batch, task=task, memory=memory)
    assert parted_loss == pytest.approx(whole_loss, rel=1e-6)
    torch.testing.assert_close(parted, whole, rtol=1e-5, atol=1e-7)
    if not mixed:
        known = {name: value[batch["label"] != IGNORED] for name, value in batch.items()}
        assert whole_loss == pytest.approx(one_update(known, task=task)[0], rel=1e-6)


def test_a_batch_without_a_label_changes_no_weight() -> None:
    batch = parts.batch()
    batch["label"][:] = IGNORED
    loss, gradient, _ = one_update(batch)
    assert loss == 0
    assert not gradient.any()


def test_a_data_set_whose_labels_are_all_counted_takes_the_mean() -> None:
    for counts, normalised in (([4] * 10, False), ([4] * 9 + [3], True), (None, True)):
        data = DataSpec(
            parts.DIGITS.fields,
            40,
            parts.DIGITS.classes,
            {"class_counts": counts} if counts else {},
        )
        run = build_run(load_config(CLASSIFIER), torch.device("cpu"), data)
        assert run.phases[0].normalised is normalised


def numbers(*values: float) -> Iterator[float]:
    return iter(values)


@pytest.mark.parametrize(
    ("kind", "share", "x", "y"),
    [("mixup", 0.3, 0, 0), ("cutmix", 0.6, 2, 13), ("cutmix", 0.0, 8, 8)],
)
def test_the_mixture_is_torchvision_s(
    monkeypatch: pytest.MonkeyPatch, kind: str, share: float, x: int, y: int
) -> None:
    batch = parts.batch()
    drawn = numbers(x, y)
    with monkeypatch.context() as patched:
        patched.setattr(random, "betavariate", lambda alpha, beta: share)
        patched.setattr(random, "randrange", lambda stop: next(drawn))
        mixed = mixing.mix(
            batch, 0.2 if kind == "mixup" else None, 0.2 if kind == "cutmix" else None
        )
    v2 = import_torchvision("transforms.v2")
    theirs = (v2.MixUp if kind == "mixup" else v2.CutMix)(alpha=0.2, num_classes=10)
    places = numbers(x, y)
    with monkeypatch.context() as patched:
        patched.setattr(
            type(theirs._dist),
            "sample",
            lambda self, shape=(): torch.tensor([share], dtype=torch.float64),
        )
        patched.setattr(torch, "randint", lambda high, size: torch.tensor([int(next(places))]))
        image, soft = theirs(batch["image"], batch["label"])
    assert torch.equal(mixed["image"], image)
    logits = torch.randn(8, 10, generator=torch.Generator().manual_seed(1))
    own = mixed[mixing.SHARE][0]
    loss = own * functional.cross_entropy(logits, mixed["label"])
    loss = loss + (1 - own) * functional.cross_entropy(logits, mixed[mixing.OTHER])
    assert float(loss) == pytest.approx(float(functional.cross_entropy(logits, soft)), rel=1e-6)


def test_weights_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"there is no class 'cat'; the data set has 0, 1"):
        parts.classifier(task={"class_weights": {"cat": 2}})
    with pytest.raises(ConfigError, match=r"does not say how many samples"):
        class_weights(Settings(class_weights="balanced"), UNCOUNTED)
    with pytest.raises(
        ConfigError, match=r"belong to the loss cross_entropy, and task\.loss is focal"
    ):
        parts.classifier(task={"class_weights": WEIGHTS, "loss": "focal"})
    with pytest.raises(
        ConfigError, match=r"it mixes samples of a batch; a classifier has task\.mixup"
    ):
        parts.classifier(dataset={"name": "digits", "augment": ["MixUp"]})


def test_data_of_one_class_are_warned_of_once() -> None:
    config = load_config(CLASSIFIER)
    run = build_run(config, torch.device("cpu"), UNCOUNTED)
    assert run.task.advise({}) == []
    one = dataclasses.replace(UNCOUNTED, classes=("cat",))
    run = build_run(config, torch.device("cpu"), one)
    (said,) = run.task.advise({})
    assert said.startswith("the data have one class, cat, and nothing to tell apart")
    assert run.task.advise({}) == []
