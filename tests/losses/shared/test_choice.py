"""A classifier's loss is found by its file's name, and every file that offers one keeps the contract."""

import pytest
import torch
from torch.nn import functional

from mpt.config.finding.registry import INSTALLED
from mpt.config.load import load_config
from mpt.config.options import CROSS_ENTROPY
from mpt.errors import ConfigError
from mpt.losses.shared.choice import find_loss
from mpt.seams import IGNORED

pytestmark = pytest.mark.tier("fast")


LABELS = torch.arange(12) % 4


def make_logits() -> torch.Tensor:
    return torch.randn(12, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)


def test_a_name_without_a_file_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"no loss 'fokal'; there are cross_entropy, .*focal"):
        find_loss("fokal")


@pytest.mark.parametrize("name", [CROSS_ENTROPY, *INSTALLED.functions("losses")])
def test_every_loss_is_a_mean_over_the_samples(name):
    logits = make_logits()
    loss = find_loss(name)
    whole = loss(logits, LABELS)
    halves = (loss(logits[:6], LABELS[:6]) + loss(logits[6:], LABELS[6:])) / 2
    assert whole.shape == ()
    torch.testing.assert_close(whole, halves)
    (gradient,) = torch.autograd.grad(whole, logits)
    assert gradient.isfinite().all()
    assert gradient.any()


@pytest.mark.parametrize("name", [CROSS_ENTROPY, *INSTALLED.functions("losses")])
def test_samples_without_a_label_count_in_no_loss(name):
    logits, labels = make_logits(), LABELS.clone()
    labels[:5] = IGNORED
    torch.testing.assert_close(
        find_loss(name)(logits, labels), find_loss(name)(logits[5:], LABELS[5:])
    )


def test_smoothing_belongs_to_cross_entropy():
    logits = make_logits()
    expected = functional.cross_entropy(logits, LABELS, label_smoothing=0.1)
    assert torch.equal(find_loss(CROSS_ENTROPY, 0.1)(logits, LABELS), expected)
    with pytest.raises(ConfigError, match="focal has none"):
        find_loss("focal", 0.1)


def test_focal_loss_forgets_what_is_right_already():
    sure, unsure = torch.tensor([[8.0, 0.0]]), torch.tensor([[0.1, 0.0]])
    label = torch.tensor([0])
    focal, entropy = find_loss("focal"), find_loss(CROSS_ENTROPY)
    assert focal(sure, label) / entropy(sure, label) < 1e-6
    assert 0.2 < focal(unsure, label) / entropy(unsure, label) < 0.25


@pytest.mark.parametrize(
    ("setting", "meant"), [("task.loss=fokal", "focal"), ("task.metrics=[top_fife]", "top_five")]
)
def test_a_wrong_name_is_told_with_the_configuration(setting, meant):
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        load_config({"model": "small_cnn"}, [setting])
    load_config({"model": "small_cnn"}, [setting.replace("fokal", "focal").replace("fife", "five")])
