"""Parameter groups by glob: which parameters get which settings, and that they last through a resume."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from mpt.config.load import load_config
from mpt.engine.state.state import capture, restore
from mpt.engine.step.step import update
from mpt.errors import CheckpointError, ConfigError
from mpt.optim.shared.groups import undecayed_names
from tests.engine.parts import batch, classifier, gan

pytestmark = pytest.mark.tier("fast")


def settings_of(run: Any, module: str = "net") -> dict[str, dict[str, Any]]:
    """Return each parameter's name with the settings of its group."""
    found = {}
    order = [f"{module}.{name}" for name, _ in run.task.trainable[module].named_parameters()]
    for group in run.optimizers[module].param_groups:
        for name in group.get("param_names", order):
            found[name] = {
                key: group[key] for key in ("lr", "lr_scale", "weight_decay") if key in group
            }
    return found


def sgd(**settings: Any) -> dict[str, Any]:
    return {"optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.01, **settings}}


def test_without_parts_the_optimizer_gets_one_plain_list():
    groups = classifier(**sgd()).optimizers["net"].param_groups
    assert len(groups) == 1
    assert "param_names" not in groups[0]
    assert "lr_scale" not in groups[0]


def test_a_glob_scales_the_rate_and_changes_the_decay_of_what_it_matches_alone():
    run = classifier(**sgd(parts={"net.stages.0.*": {"lr_scale": 0.25, "weight_decay": 0}}))
    found = settings_of(run)
    matched = {name for name in found if name.startswith("net.stages.0.")}
    assert matched
    assert len(found) > len(matched)
    for name, settings in found.items():
        wanted = {"lr": 0.025, "lr_scale": 0.25, "weight_decay": 0} if name in matched else None
        assert settings == (wanted or {"lr": 0.1, "weight_decay": 0.01})


def test_the_later_of_two_globs_wins():
    run = classifier(
        **sgd(
            parts={"net.*": {"lr_scale": 0.5, "weight_decay": 0.2}, "*.bias": {"weight_decay": 0}}
        )
    )
    for name, settings in settings_of(run).items():
        assert settings["lr_scale"] == 0.5
        assert settings["weight_decay"] == (0 if name.endswith(".bias") else 0.2)


def test_no_decay_spares_biases_and_normalisation_and_nothing_else():
    run = classifier(**sgd(no_decay=["bias", "norm"]))
    net = run.task.trainable["net"]
    # in this network: biases and BatchNorm
    spared = {n for n, p in net.named_parameters() if p.dim() <= 1}
    assert spared
    for name, settings in settings_of(run).items():
        assert settings["weight_decay"] == (0 if name.removeprefix("net.") in spared else 0.01)


def test_vectors_and_what_the_network_names_do_not_decay_as_in_timm():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma, self.table = (nn.Parameter(torch.ones(shape)) for shape in ((4,), (4, 4)))
            self.inner = nn.ModuleDict({"token": nn.Linear(4, 4), "last": nn.Linear(4, 4)})

        def no_weight_decay(self):
            return {"table", "inner.token.*"}

    spared = {"gamma", "table", "inner.token.weight", "inner.token.bias", "inner.last.bias"}
    assert undecayed_names(Net(), ["vector"]) == spared
    assert undecayed_names(nn.BatchNorm1d(4), ["vector"]) == {"weight", "bias"}


def test_a_norm_of_another_package_is_known_by_its_name_and_attention_biases_by_theirs():
    from mpt.optim.shared.groups import undecayed_names

    class MyRmsNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

    module = nn.ModuleDict(
        {"a": MyRmsNorm(), "b": nn.MultiheadAttention(4, 2), "c": nn.Linear(4, 4)}
    )
    assert undecayed_names(module, ["norm"]) == {"a.gain"}
    assert undecayed_names(module, ["bias"]) == {"b.in_proj_bias", "b.out_proj.bias", "c.bias"}


@pytest.mark.parametrize("precision", ["fp32", "O2", "bf16-pure", "amp"])
@pytest.mark.parametrize("memory", [{}, {"cpu_optimizer": True}, {"optimizer_in_backward": True}])
def test_groups_train_as_separate_learning_rates_would_in_every_mode(precision, memory):
    if "optimizer_in_backward" in memory and precision == "O2":
        pytest.skip("O2 refuses it")
    mode = {"mode": precision, "dtype": "bfloat16"} if precision in ("amp", "O2") else precision
    run = classifier(mode, memory=memory, **sgd(parts={"net.stages.0.*": {"lr_scale": 0.0}}))
    before = {name: p.detach().clone() for name, p in run.task.trainable["net"].named_parameters()}
    update(run, run.phases[0], batch())
    for name, parameter in run.task.trainable["net"].named_parameters():
        assert torch.equal(parameter, before[name]) == name.startswith("stages.0.")


def test_a_glob_that_matches_nothing_is_refused_with_names_that_exist():
    with pytest.raises(
        ConfigError, match=r"'net\.trunk\.\*' matches no trained parameter; there are net\."
    ):
        classifier(**sgd(parts={"net.trunk.*": {"lr_scale": 0.1}}))


def test_a_setting_that_the_optimizer_lacks_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer\.parts: this optimizer has no momentum"):
        gan(optimizer={"name": "adam", "parts": {"gen.*": {"momentum": 0.5}}})


@pytest.mark.parametrize("wrong", [{"lr": 1.0}, {"lr_scale": -1.0}, {"weight_decay": "none"}])
def test_wrong_keys_and_values_are_refused_while_reading(wrong):
    with pytest.raises(ConfigError, match=r"optimizer\.parts"):
        load_config({"model": "small_cnn", "optimizer": {"name": "sgd", "parts": {"net.*": wrong}}})


def test_a_resume_keeps_groups_and_state_bit_for_bit():
    parts = sgd(parts={"net.stages.0.*": {"lr_scale": 0.25}}, no_decay=["bias"])
    run, other = classifier(**parts), classifier(seed=1, **parts)
    update(run, run.phases[0], batch())
    restore(other, copy.deepcopy(capture(run)))  # a capture shares its tensors with the run
    for one in (run, other):
        update(one, one.phases[0], batch(1))
    for a, b in zip(run.task.net.parameters(), other.task.net.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_resume_with_other_parts_carries_each_parameters_momentum_over():
    run = classifier(**sgd())
    update(run, run.phases[0], batch())
    other = classifier(
        **sgd(parts={"net.stages.0.*": {"lr_scale": 0.25}, "*.bias": {"weight_decay": 0}})
    )
    restore(other, capture(run))
    for old, new in zip(run.task.net.parameters(), other.task.net.parameters(), strict=True):
        momentum = (
            one.optimizers["net"].state[p]["momentum_buffer"]
            for one, p in ((run, old), (other, new))
        )
        assert torch.equal(*momentum)
    assert settings_of(other)["net.stages.0.0.weight"]["lr_scale"] == 0.25
    back = classifier(**sgd())
    restore(back, capture(other))
    assert len(back.optimizers["net"].param_groups) == 1


def test_settings_that_a_resume_changes_take_effect():
    run = classifier(**sgd())
    update(run, run.phases[0], batch())
    other = classifier(**sgd(weight_decay=0.5))
    restore(other, capture(run))
    assert other.optimizers["net"].param_groups[0]["weight_decay"] == 0.5


def test_state_of_other_parameters_is_refused():
    run = classifier(**sgd(parts={"net.stages.0.*": {"lr_scale": 0.25}}))
    update(run, run.phases[0], batch())
    state = capture(run)
    state["optimizers"]["net"]["param_groups"][0]["param_names"][0] = "net.unknown"
    with pytest.raises(CheckpointError, match=r"net\.unknown|other parameters"):
        restore(classifier(**sgd()), state)
